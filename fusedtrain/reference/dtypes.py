"""Dtypes of the math and layouts of the results, shared by all references."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(t: Tensor) -> Tensor:
    """A 16-bit tensor in float32, the dtype of its math, as in the kernels."""
    return t.float() if t.dtype == torch.float16 or t.dtype == torch.bfloat16 else t


def wide_of(t: Tensor) -> torch.dtype:
    """The dtype of a tensor's math: float64 for float64, else float32."""
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with the strides of a dense tensor of its shape; differentiable.

    For a backward whose op depends on the order of memory: a gradient may have any layout, and so
    may a saved tensor that hooks (save_on_cpu) have moved.
    """
    if tensor.stride() == strides:
        return tensor
    # A tensor that vmap has batched needs memory for the whole batch.
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def in_strides_of(tensor: Tensor, model: Tensor) -> Tensor:
    """The tensor in the dtype and strides of the model; differentiable."""
    return torch.empty_like(model).copy_(tensor)
