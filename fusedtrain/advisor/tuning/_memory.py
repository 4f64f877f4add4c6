"""Memory of a training step on the CPU, counted: no process is brought to its limits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ..._graph.kept import address_of
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


def fixed_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes of parameters, buffers and the optimizer's state."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        leaves = pytree.tree_leaves(list(optimizer.state.values()))
        tensors += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return sum({address_of(t): t.untyped_storage().nbytes() for t in tensors}.values())
