"""Two ranks, each a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

# A server imports torch once and forks: the processes of "spawn" import it each, for 4 s.
_METHOD = next(m for m in ("forkserver", "spawn") if m in multiprocessing.get_all_start_methods())
if _METHOD == "forkserver":
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed"])


def on_two_ranks(function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function(rank, *arguments)`` for the ranks 0 and 1."""
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        function, arguments, nprocs=2, start_method=_METHOD
    )
