"""Checkpoints that are there as a whole or not at all."""

from __future__ import annotations

import os
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


def read(path: Path) -> dict[str, Any] | None:
    """The last whole checkpoint, or None."""
    return torch.load(path, weights_only=True) if path.exists() else None
