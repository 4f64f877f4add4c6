"""What the definitions of all ops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def wide_of(t: Tensor) -> torch.dtype:
    """What a tensor is computed in: float64 for float64, else float32."""
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides, those of a dense tensor of its shape; differentiable.

    For a backward whose op goes by the order of memory: a gradient has any layout, and a saved
    tensor too where hooks (save_on_cpu) had it in between.
    """
    if tensor.stride() == strides:
        return tensor
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def fallback(function: Callable[..., Any], warn: Callable[[torch.device], None]) -> Any:
    """A plain-torch formula as the kernel of last resort; `warn` is told of the device."""

    def run(first: Tensor, *rest: Any) -> Any:
        warn(first.device)
        return function(first, *rest)

    return run
