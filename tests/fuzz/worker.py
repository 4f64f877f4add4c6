"""Work of a worker process. It imports nothing heavy before the first line is on the screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Outcome, Task


def prepare() -> None:
    """One thread, and everything imported beforehand."""
    import torch

    torch.set_num_threads(1)
    from . import engine  # noqa: F401


def work(task: Task, folder: str) -> Outcome:
    """Runs a task; the program of the moment is in the folder, should the process die."""
    from .engine import run_task

    return run_task(task, notes=Path(folder) / f"{os.getpid()}.py")
