"""Data parallel training: is DDP one process with the whole batch, and what costs DataParallel?

Two processes have half of the threads each. Speeds are over one process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import (
    Numbers,
    Row,
    Settings,
    Timed,
    processes,
    require,
    synchronise,
)
from benchmarks.experiments.models import random_batch, small_resnet

RANKS = 2
ONE, THREADS = "1 process, whole batch", "DataParallel, 1 process, 2 GPUs"
SYNC = "DDP, 2 processes, synchronised batch norm"
LOCAL = "DDP, 2 processes, batch norm of each process"
SAME = 1e-9  # relative, of losses in float64 after some steps
PATIENCE = timedelta(seconds=120)  # for the other rank, which may have died


def _gpus(settings: Settings) -> int:
    return torch.cuda.device_count() if settings.device == "cuda" else 0


def _step_of(
    way: str, dtype: torch.dtype, rank: int, settings: Settings
) -> Callable[[], Tensor] | None:
    """A training step, which returns the mean loss of this rank's images; None where the rank has
    no work. The weights are the same in each process."""
    both = way in (SYNC, LOCAL)
    if rank and not both:
        return None
    # Each rank has a GPU of its own, or both share the only one.
    gpu = torch.device("cuda", rank % max(1, _gpus(settings)))
    device = gpu if settings.device == "cuda" else torch.device("cpu")
    batch, pixels, width = settings.pick((16, 8, 8), (64, 32, 16), (512, 32, 64))
    cpu = replace(settings, device="cpu")
    model = small_resnet(cpu, width).to(device)
    fusedtrain.convert(model)
    model = fusedtrain.nn.convert_sync_batchnorm(model) if way == SYNC else model
    network = model.to(dtype)
    if way == THREADS:
        network = nn.DataParallel(model, device_ids=[*range(RANKS)])
    elif both:
        devices = [device] if settings.device == "cuda" else None
        network = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    optimizer = fusedtrain.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = random_batch(cpu, batch, pixels)
    if both:
        images, labels = images.chunk(RANKS)[rank], labels.chunk(RANKS)[rank]
    images, labels = images.to(device, dtype), labels.to(device)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _losses(way: str, rank: int, settings: Settings) -> list[float]:
    """Losses of the whole batch, step by step, in float64."""
    step, losses = _step_of(way, torch.float64, rank, settings), []
    for _ in range(settings.pick(3, 8, 8) if step else 0):
        assert step is not None
        loss = step()
        if way in (SYNC, LOCAL):
            dist.all_reduce(loss)
            loss = loss / RANKS
        losses.append(float(loss))
    dist.barrier()
    return losses


def _seconds(ways: Sequence[str], rank: int, settings: Settings) -> dict[str, list[float]]:
    """Seconds of each round, in which the ways take turns. One process has all threads."""
    threads = torch.get_num_threads()
    calls = {way: _step_of(way, torch.float32, rank, settings) for way in ways}
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(2 + settings.pick(2, 20, 30)):
        for way, call in calls.items():
            torch.set_num_threads(max(1, threads // RANKS) if way in (SYNC, LOCAL) else threads)
            synchronise(settings)
            dist.barrier()
            start = time.perf_counter()
            if call is not None:
                call()
            synchronise(settings)
            dist.barrier()
            if number >= 2:
                samples[way].append(time.perf_counter() - start)
    return samples


def on_a_rank(rank: int, folder: str, settings: Settings, ways: Sequence[str], threads: int) -> Any:
    """In one of the two processes: losses and seconds. Rank 0 has those of one process, too."""
    torch.set_num_threads(threads)
    if settings.device == "cuda":
        torch.cuda.set_device(rank % _gpus(settings))
    # NCCL refuses two ranks on one GPU, gloo does not. A file is the meeting point: there is no
    # port that another program may have.
    backend, file = "nccl" if _gpus(settings) >= RANKS else "gloo", f"file://{folder}/rendezvous"
    dist.init_process_group(backend, file, PATIENCE, rank=rank, world_size=RANKS)
    try:
        losses = {way: _losses(way, rank, settings) for way in ways}
        return losses, _seconds(ways, rank, settings)
    finally:
        dist.destroy_process_group()


def results_of(settings: Settings, ways: Sequence[str]) -> Any:
    """Losses and seconds of each way, from two fresh processes."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, processes(["0", "1"]) as workers:
        answers = [
            worker.submit(on_a_rank, int(rank), folder, settings, ways, threads)
            for rank, worker in workers.items()
        ]
        results = [answer.result() for answer in answers]
        return results[0]


def rows(settings: Settings) -> Iterator[Row]:
    ways = [ONE, SYNC, LOCAL, *([THREADS] if _gpus(settings) >= RANKS else [])]
    losses, seconds = results_of(settings, ways)
    times = Timed(seconds)
    for way in ways:
        pairs = zip(losses[way], losses[ONE], strict=True)
        off = max(abs(loss - whole) / abs(whole) for loss, whole in pairs)
        if way == SYNC:
            require("losses of DDP with synchronised batch norms", off, SAME)
        numbers: Numbers = {"ms a step": 1e3 * times.seconds(way), "losses off by, 1e-6": off * 1e6}
        numbers |= times.over(ONE, way, "speed")
        if way == THREADS:
            numbers["DDP's speed over this"] = times.gain(THREADS, LOCAL)
        shared = way in (SYNC, LOCAL) and _gpus(settings) == 1
        yield Row(way, numbers, "both processes share a GPU" if shared else "")
