"""How large a difference may be: relative to max(|expected|, 1), as in helpers/activations.py."""

from __future__ import annotations

import torch

from helpers.activations import TOLERANCE
from helpers.chains import TOLERANCE as CHAIN_TOLERANCE

SHORT = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}  # fmt: skip


def pointwise(dtype: str, scale: float) -> float:
    """Tolerance for an activation: so many roundings of its dtype."""
    kind = SHORT[dtype]
    return float(f"{scale * TOLERANCE[kind] * torch.finfo(kind).eps:.2g}")


def chained(dtype: str, scale: float) -> float:
    """Tolerance for several steps in a row, with sums in them."""
    return float(f"{scale * CHAIN_TOLERANCE[SHORT[dtype]]:.2g}")
