"""Fixtures that all processes of a run share."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from typing import Any

import pytest
import torch


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """The result of `make`, made by the first process that asks; the others read it from a file.

    Processes of pytest-xdist steal tests from each other, and a module's fixture with them.
    """
    folder = factory.getbasetemp()
    if folder.name.startswith("popen-"):  # of a worker
        folder = folder.parent
    path = folder / f"{name}.pt"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            torch.save(make(), path)
    return torch.load(path, weights_only=False)
