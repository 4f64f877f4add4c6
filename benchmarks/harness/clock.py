"""Data of the machine for each row."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime, timezone
from typing import Any

import torch

from fusedtrain.advisor.bench.clock import device_name

# Policies of glibc for freed memory, and the environment that a process needs for each.
# "bounded": buffers up to 32 MiB are reused. Left alone, glibc decides by the history of the
# process whether a buffer of some MiB is reused or mapped anew: at 2^20 float32 numbers that is
# 70 us against 600 us, for whichever side it hits. "kept": all are reused, whatever their size; a
# layer's 38 MB mapped anew cost more in page faults than in arithmetic.
ALLOCATORS = {
    "bounded": {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)},
    "kept": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
}


def setting(device: str) -> dict[str, Any]:
    """Data of the machine and the day, for a row."""
    return {
        "device": device_name(device),
        "device_type": device,
        "backend": os.environ.get("FUSEDTRAIN_BACKEND", "default"),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": torch.get_num_threads(),
        "allocator": allocator() if device == "cpu" else "",
        **({"nvml": nvml()} if device == "cuda" else {}),
    }


def nvml() -> dict[str, float]:
    """Clock of the multiprocessors, power and temperature right behind a row; empty without
    nvidia-ml-py."""
    with contextlib.suppress(Exception):  # of several kinds: the driver may refuse any question
        return {
            "sm_mhz": torch.cuda.clock_rate(),
            "watts": torch.cuda.power_draw() / 1e3,
            "celsius": torch.cuda.temperature(),
        }
    return {}


def allocator() -> str:
    """The name in ``ALLOCATORS`` that this process runs with; "default" without any setting."""
    for name, settings in ALLOCATORS.items():
        if settings.items() <= dict(os.environ).items():
            return name
    others = sorted(name for name in os.environ if name.startswith("MALLOC_"))
    return f"with {', '.join(others)}" if others else "default"
