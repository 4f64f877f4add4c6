"""Difference of a tensor from the expected one."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def norm_of(tensor: Tensor, order: float = 2.0) -> float:
    return float(torch.linalg.vector_norm(_widened(tensor), order))


def relative_difference(
    actual: Tensor, expected: Tensor, order: float = 2.0, floor: float = 0.0
) -> float:
    """Norm of the difference by the norm of what is expected, or by `floor` if that is larger;
    infinite for another shape or dtype. The same infinity, and NaN and NaN, agree."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if actual.is_meta or torch.equal(actual, expected):
        return 0.0
    x, y = _widened(actual), _widened(expected)
    error, scale = norm_of(x - y, order), norm_of(y, order)
    if not math.isfinite(error):
        agree = (x == y) | (x.isnan() & y.isnan())
        if not bool(y[~agree].isfinite().all()):
            return math.inf
        error = norm_of((x - y).masked_fill(agree, 0), order)
        scale = norm_of(y.masked_fill(~y.isfinite(), 0), order)
    scale = max(scale, floor)
    return 0.0 if error == 0 else error / scale if scale and error == error else math.inf


def _widened(tensor: Tensor) -> Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to_dense().to(wide)
