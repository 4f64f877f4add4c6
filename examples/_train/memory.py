"""Memory that a forward pass keeps for backward."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no line on stderr for each profile


def saved_bytes(net: nn.Module, loss_of: Callable[[], Tensor], device: torch.device) -> int:
    """Bytes that one forward pass leaves allocated; the buffers of ``net`` stay as they are."""
    buffers = [b.clone() for b in net.buffers()]
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        loss = loss_of()
        kept = torch.cuda.memory_allocated(device) - before
    else:
        gc.collect()  # tensors from before, freed within, make torch write a line to stderr
        gc.disable()
        with torch.autograd.profiler.profile(profile_memory=True, use_kineto=False) as profile:
            loss = loss_of()
        gc.enable()
        kept = sum(event.self_cpu_memory_usage for event in profile.function_events or ())
    del loss
    restore(net, buffers)
    return kept


@torch.no_grad()
def restore(net: nn.Module, buffers: Sequence[Tensor]) -> None:
    """Gives the buffers of ``net`` these values."""
    for buffer, value in zip(net.buffers(), buffers, strict=True):
        buffer.copy_(value)
