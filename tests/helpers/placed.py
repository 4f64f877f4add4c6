"""Tensors of a call on the device of its kernel, as they lie in host memory; and what is written
there, brought back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def placed(t: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """A copy with the strides, the gaps and the offset of `t`, which ``t.to(device)`` loses: where
    memory begins on 16 bytes, both are misaligned alike."""
    if t.device.type == "meta":
        return t
    memory = t.detach().as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0)
    copy = torch.empty(memory.shape, dtype=dtype or t.dtype, device=device).copy_(memory)
    return copy.as_strided(t.size(), t.stride(), t.storage_offset())


def call_placed(
    op: Callable[..., Any],
    device: str,
    arguments: Iterable[Any],
    written: Iterable[int],
    stays: Iterable[int] = (),
) -> Any:
    """The result of `op` on copies of the tensors, in lists too, on `device`. The arguments
    numbered in `written` get the values that `op` wrote; those in `stays` are not copied."""
    originals, kept = list(arguments), set(stays)

    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(moved, value))
        return placed(value, device) if isinstance(value, Tensor) else value

    copies = [v if i in kept else moved(v) for i, v in enumerate(originals)]
    result = op(*copies)
    for i in set(written) - kept:
        old, new = originals[i], copies[i]
        for a, b in zip(old, new) if isinstance(old, (list, tuple)) else [(old, new)]:
            if isinstance(a, Tensor) and a.device.type != "meta":
                a.copy_(b)
    return result
