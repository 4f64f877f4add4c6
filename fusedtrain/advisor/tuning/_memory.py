"""Memory of a training step on the CPU, counted: no process is brought to its limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._recompute import Recipe, observed
from ..._torch_private import pytree

SHARE = 0.5  # of the memory that is available at the start: the limit for a step on the CPU


def available_memory() -> int | None:
    """Bytes that Linux can give without swapping; None where the system does not tell it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(sizes, None)


def bytes_kept(call: Callable[[], Any], besides: Iterable[Tensor]) -> int:
    """Bytes of the storages that autograd keeps for backward during the call.

    ``besides`` are not counted: parameters, buffers, inputs.
    """
    excluded = {_address(tensor) for tensor in besides} | {0}
    sizes: dict[int, int] = {}

    def observe(tensor: Tensor, recipe: Recipe | None) -> None:
        for one in (tensor,) if recipe is None else recipe.kept():
            address = _address(one)
            if address not in excluded:
                sizes[address] = one.untyped_storage().nbytes()

    with observed(observe):
        call()
    return sum(sizes.values())


def fixed_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes of parameters, buffers and the optimizer's state."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        leaves = pytree.tree_leaves(list(optimizer.state.values()))
        tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum({_address(t): t.untyped_storage().nbytes() for t in tensors}.values())


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass, or of another layout
        return 0
