"""Two ranks, each a process of its own."""

from __future__ import annotations

import contextlib
import io
import multiprocessing.connection
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from helpers import ROOT

# A server imports once what the ranks need, and forks: the processes of "spawn" import torch each,
# for 4 s, and torch.optim imports torch._dynamo, for 3 s.
_METHOD = next(m for m in ("forkserver", "spawn") if m in multiprocessing.get_all_start_methods())
if _METHOD == "forkserver":
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp"])


def on_two_ranks(function: Callable[..., None], *arguments: Any) -> None:
    """Calls ``function(rank, *arguments)`` for the ranks 0 and 1."""
    torch.multiprocessing.start_processes(function, arguments, nprocs=2, start_method=_METHOD)


def results_of_two_ranks(program: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Results of ``program(rank, *arguments)`` for both ranks of a gloo group, which meet and leave
    their results in an empty folder."""
    on_two_ranks(_in_a_group, program, str(folder), *arguments)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _in_a_group(rank: int, program: Callable[..., Any], folder: str, *arguments: Any) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(program(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    # If a thread of Gloo frees the last tensor while Python exits, the process aborts: pytorch
    # pull 179291.
    time.sleep(0.5)


def exit_codes_of_ranks(function: Callable[..., None], *arguments: Any) -> list[int]:
    """As `on_two_ranks`, but a rank may die of a signal; returns the exit codes."""
    context = multiprocessing.get_context(_METHOD)
    kind: Any = context.Process
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


def example(name: str) -> str:
    """Output of an example of examples/integrations, which finds the process group in being."""
    import torch.distributed as dist

    init, destroy = dist.init_process_group, dist.destroy_process_group
    stream = io.StringIO()
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    try:
        with contextlib.redirect_stdout(stream):
            runpy.run_path(str(ROOT / "examples/integrations" / name), run_name="__main__")
    finally:
        dist.init_process_group, dist.destroy_process_group = init, destroy
    return stream.getvalue()
