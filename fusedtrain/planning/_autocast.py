"""Autocast of a training step: the forward enters and leaves autocast, and casts each weight anew.
The cache of an outer autocast would hide the bytes of these casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of the autocast that the caller has entered; None outside."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(device: str) -> AbstractContextManager[object]:
    """The context of all work outside forwards."""
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


@contextmanager
def autocast_to(dtype: torch.dtype | None, device: str) -> Iterator[None]:
    """The context of a forward; None: no autocast, but the model's own."""
    with nullcontext() if dtype is None else torch.autocast(device, dtype):
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
