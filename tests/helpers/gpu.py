"""Tests that need a GPU, and a guard of code that must not wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: never in CI, see `make gpu`"
)


@contextmanager
def no_sync() -> Iterator[None]:
    """Within it a host that waits for the GPU raises RuntimeError."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
