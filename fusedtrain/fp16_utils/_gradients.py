"""What the functions over lists of gradients have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def refuse_sparse(params: Iterable[Tensor], argument: str) -> None:
    """Raises RuntimeError for the first parameter with a sparse gradient."""
    for index, p in enumerate(params):
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"{argument}[{index}]: its gradient is sparse ({p.grad.layout}), and only dense "
                "ones can be used here. Build the embedding with sparse=False, or make the "
                "gradient dense: p.grad = p.grad.to_dense()"
            )


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source to its target, by index whatever their strides, and converts it.

    One call for all pairs of the same devices and dtypes: torch's kernel for many tensors takes no
    mixture of dtypes, and would copy one by one.
    """
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        key = (target.device, target.dtype, source.device, source.dtype)
        to, of = groups.setdefault(key, ([], []))
        to.append(target)
        of.append(source)
    for to, of in groups.values():
        torch._foreach_copy_(to, of)


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is inf or NaN; the host waits once for each device.

    By the largest magnitude of each tensor, which is one of its elements: it overflows in no dtype,
    as a sum could, and it is NaN where an element is.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.numel():  # an empty one has no largest
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    flags: dict[torch.device, list[Tensor]] = {}
    for (device, _), group in groups.items():
        largest = torch.stack(torch._foreach_norm(group, float("inf")))
        flags.setdefault(device, []).append(largest.isfinite().all())
    # All devices have got their work before the first is waited for.
    finite = [torch.stack(some).all() for some in flags.values()]
    return all(map(bool, finite))
