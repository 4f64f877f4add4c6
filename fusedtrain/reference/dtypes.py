"""What is computed in which dtype, and how results lie in memory: shared by all references."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(t: Tensor) -> Tensor:
    """Math of 16-bit tensors is done in float32, as in the kernels."""
    return t.float() if t.dtype == torch.float16 or t.dtype == torch.bfloat16 else t


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
