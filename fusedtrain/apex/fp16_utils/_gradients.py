"""Helpers of the functions that take lists of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..._torch_private import foreach_copy_


def refuse_sparse(params: Iterable[Tensor], argument: str) -> None:
    """Raises RuntimeError for the first parameter with a sparse gradient."""
    for index, p in enumerate(params):
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"{argument}[{index}]: its gradient is sparse ({p.grad.layout}), but must be "
                "dense. Build the embedding with sparse=False, or make the gradient dense: "
                "p.grad = p.grad.to_dense()"
            )


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, by index whatever their strides, and converts it."""
    if targets:
        foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is inf or NaN; the host waits once for each device."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flags.setdefault(tensor.device, []).append(tensor.isfinite().all())
    # Each device gets its work before the host waits for the first.
    finite = [torch.stack(some).all() for some in flags.values()]
    return all(map(bool, finite))
