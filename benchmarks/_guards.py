"""What stands between a benchmark and numbers that would mislead."""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch


@cache
def has_kernel(op: str, device: str) -> bool:
    """Whether the device has a kernel of fusedtrain's op."""
    key = {"cpu": "CPU", "cuda": "CUDA"}[device]
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedtrain::{op}", key)


def refuse_the_reference(op: str, device: str) -> None:
    """Skip where plain torch would pass for a kernel (the conftest sets FUSEDTRAIN_REQUIRE)."""
    required = os.environ.get("FUSEDTRAIN_REQUIRE", "").split(",")
    if device in required and not has_kernel(op, device):
        pytest.skip(f"fusedtrain has no {device} kernel of {op}")
