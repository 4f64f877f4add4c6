"""Rules of GPUs that choose torch's depthwise kernels or ours: benchmark rows have both.

depthwise_gpus.json is made of the results of `make gpu` by tools/depthwise_gpus.py. A device
without rows has torch's kernels, as does a call that no row is like.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from .depthwise_autograd import Faster

FILE = Path(__file__).with_suffix(".json")
# Torch's time by ours: for a kind of call and pass, and outputs of a channel.
Rows = dict[str, dict[int, float]]
_SINCE = "2026-11-29"  # of the last change of the CUDA kernels: older rows are of others
_LIKE = 4  # times more or fewer outputs
_FORWARD, _BACKWARD, _BOTH = "forward", "backward", "forward+backward"


def _kind(window: str, dtype: str, layout: str, part: str) -> str:
    return f"{window} {dtype} {layout} {part}"


def rows_of(entries: Iterable[Mapping[str, Any]]) -> dict[str, Rows]:
    """Rows of each device, of the entries of a file of results; "2-d 3/1": 3 x 3, stride 1."""
    devices: dict[str, Rows] = {}
    for entry in entries:
        row = entry["extra_info"]
        if row.get("family") != "depthwise" or row["device_type"] == "cpu":
            continue
        if row["date"] < _SINCE:
            continue
        stride = int(row["op"].rpartition("/")[2])
        outputs = math.prod(-(-side // stride) for side in row["shape"][2:])
        kind = _kind(row["op"], row["dtype"], row["layout"], row["pass"])
        rows = devices.setdefault(row["device"], {})
        rows.setdefault(kind, {})[outputs] = row["ns"]["eager"] / row["ns"]["fusedtrain"]
    return devices


def _faster(
    rows: Rows, dtype: torch.dtype, kernel: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int], outputs: int, channels_last: bool,
) -> Faster:  # fmt: skip
    """The rule of a GPU, with the arguments of `faster` in depthwise.py."""
    if max(dilation) > 1 or len({*kernel}) > 1 or len({*stride}) > 1:
        return Faster(False, False, False)
    window = f"{len(kernel)}-d {kernel[0]}/{stride[0]}"
    layout = "channels_last" if channels_last else "contiguous"

    def wins(part: str) -> bool | None:
        like = rows.get(_kind(window, str(dtype).removeprefix("torch."), layout, part), {})
        nearest = min(like, key=lambda n: abs(math.log(n / outputs)), default=0)
        is_like = nearest <= outputs * _LIKE and outputs <= nearest * _LIKE
        return like[nearest] > 1 if is_like else None

    both = bool(wins(_BOTH))
    forward, backward = (both if won is None else won for won in map(wins, (_FORWARD, _BACKWARD)))
    return Faster(forward, backward, backward)


@lru_cache(1)
def _devices() -> dict[str, Rows]:
    text: dict[str, dict[str, dict[str, float]]] = json.loads(FILE.read_text())
    return {
        device: {kind: {int(n): ratio for n, ratio in like.items()} for kind, like in rows.items()}
        for device, rows in text.items()
    }


def _name_of_gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


_NAMES: dict[str, Callable[[torch.device], str]] = {"cuda": _name_of_gpu}


@lru_cache(64)
def rule_of(device: torch.device) -> Callable[..., Faster] | None:
    """The rule of a device by its name; None where no row has it."""
    name = _NAMES.get(device.type)
    rows = _devices().get(name(device)) if name else None
    return partial(_faster, rows) if rows else None
