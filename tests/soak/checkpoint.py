"""Checkpoints that are there as a whole or not at all."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import torch


def temporary(path: Path) -> Path:
    """Where a checkpoint is written before it takes its place."""
    return path.with_name(path.name + ".tmp")


def write(path: Path, state: dict[str, Any]) -> None:
    """A process that dies in here leaves the earlier checkpoint as it was."""
    with open(temporary(path), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary(path), path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def death(folder: Path) -> Path:
    """Where the worker of this folder reads at which share of its next checkpoint it dies."""
    return folder / "death"


def die_while_writing(path: Path, state: dict[str, Any], share: float) -> None:
    """Writes the first `share` of what `write` would write, and kills this process."""
    whole = io.BytesIO()
    torch.save(state, whole)
    with open(temporary(path), "wb") as file:
        file.write(whole.getbuffer()[: int(share * whole.tell())])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def read(path: Path) -> dict[str, Any] | None:
    """The last whole checkpoint, or None."""
    return torch.load(path, weights_only=True) if path.exists() else None
