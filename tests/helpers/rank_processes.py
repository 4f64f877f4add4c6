"""Two ranks, each a process of its own."""

from __future__ import annotations

import multiprocessing.connection
from collections.abc import Callable
from typing import Any

import torch

# A server imports once what the ranks need, and forks: the processes of "spawn" import torch each,
# for 4 s, and torch.optim imports torch._dynamo, for 3 s.
_METHOD = next(m for m in ("forkserver", "spawn") if m in multiprocessing.get_all_start_methods())
if _METHOD == "forkserver":
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp"])


def on_two_ranks(function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function(rank, *arguments)`` for the ranks 0 and 1."""
    torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        function, arguments, nprocs=2, start_method=_METHOD
    )


def exit_codes_of_ranks(function: Callable[..., None], *arguments: Any) -> list[int]:
    """As `on_two_ranks`, but a rank may die of a signal; returns the exit codes."""
    context = multiprocessing.get_context(_METHOD)
    kind: Any = context.Process  # type: ignore[attr-defined]
    ranks = [kind(target=function, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    waiting = [rank.sentinel for rank in ranks]
    while waiting:
        for sentinel in multiprocessing.connection.wait(waiting):
            waiting.remove(sentinel)
        if any(rank.exitcode is not None and rank.exitcode > 0 for rank in ranks):
            for rank in ranks:  # the other one would wait for this one
                rank.kill()
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]
