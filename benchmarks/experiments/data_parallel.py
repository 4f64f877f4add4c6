"""DistributedDataParallel beside one process with the whole batch: losses and time."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import KEYS, columns_of, triple
from benchmarks.experiments.measure import Timed, gain_text
from benchmarks.experiments.models import random_batch, small_resnet

RANKS = 2
ONE = "1 process, whole batch"
SYNC = "DDP, 2 processes, synchronised batch norm"
LOCAL = "DDP, 2 processes, batch norm of each process"
THREADS = "DataParallel, 1 process, 2 GPUs"
SAME = 1e-9  # relative, of losses in float64 after some steps
LR, MOMENTUM = 0.05, 0.9
DDP = ("ddp", "ddp_low", "ddp_high")  # of DataParallel: the gain by DDP
NEEDS = "there are not two GPUs"


class Sizes(NamedTuple):
    batch: int
    pixels: int
    width: int
    steps: int  # that are compared
    rounds: int  # that are timed


def sizes(settings: Settings) -> Sizes:
    if settings.quick:
        return Sizes(batch=16, pixels=8, width=8, steps=3, rounds=2)
    if settings.device == "cuda":
        return Sizes(batch=512, pixels=32, width=64, steps=8, rounds=30)
    return Sizes(batch=64, pixels=32, width=16, steps=8, rounds=20)


def _gpus(settings: Settings) -> int:
    return torch.cuda.device_count() if settings.device == "cuda" else 0


# --- a rank ---


class Rank:
    """One of the two processes; process 0 also is the one process with the whole batch.

    Args:
        settings: with "cuda", each rank has a GPU of its own, or both share the only one.
        rank: 0 or 1.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.device = torch.device(settings.device)
        if settings.device == "cuda":
            self.device = torch.device("cuda", rank % _gpus(settings))
            torch.cuda.set_device(self.device)

    def model(self, way: str) -> nn.Module:
        """The network of the settings' seed: the same weights in each process."""
        cpu = replace(self.settings, device="cpu")
        model = small_resnet(cpu, sizes(self.settings).width).to(self.device)
        fusedtrain.convert(model)
        return fusedtrain.nn.convert_sync_batchnorm(model) if way == SYNC else model

    def wrapped(self, way: str, model: nn.Module) -> nn.Module:
        if way == THREADS:
            return nn.DataParallel(model, device_ids=[*range(RANKS)])
        if way == ONE:
            return model
        devices = [self.device] if self.settings.device == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)

    def batch(self, way: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The whole batch, or this rank's half."""
        cpu = replace(self.settings, device="cpu")
        images, labels = random_batch(cpu, *sizes(self.settings)[:2])
        if way in (SYNC, LOCAL):
            images, labels = (part.chunk(RANKS)[self.rank] for part in (images, labels))
        return images.to(self.device, dtype), labels.to(self.device)

    def step_of(self, way: str, dtype: torch.dtype) -> Callable[[], Tensor]:
        """A training step, which returns the mean loss of this rank's images."""
        model = self.model(way).to(dtype)
        network = self.wrapped(way, model)
        optimizer = fusedtrain.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        images, labels = self.batch(way, dtype)

        def step() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(images), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def losses(self, way: str) -> list[float]:
        """Losses of the whole batch, step by step, in float64."""
        step, losses = self.step_of(way, torch.float64), []
        for _ in range(sizes(self.settings).steps):
            loss = step()
            if way in (SYNC, LOCAL):
                dist.all_reduce(loss)
                loss = loss / RANKS
            losses.append(float(loss))
        return losses

    def _takes_part(self, way: str) -> bool:
        return self.rank == 0 or way in (SYNC, LOCAL)

    def compared(self, ways: Sequence[str]) -> dict[str, list[float]]:
        """Losses of each way; ranks without work wait."""
        losses = {}
        for way in ways:
            if self._takes_part(way):
                losses[way] = self.losses(way)
            dist.barrier()
        return losses

    def timed(self, ways: Sequence[str]) -> dict[str, list[float]]:
        """Seconds of each round, in which the ways take turns. One process has all threads."""
        all_threads = torch.get_num_threads()
        calls = {
            way: self.step_of(way, torch.float32) for way in ways if self._takes_part(way)
        }  # DDP is constructed by both ranks in the same order
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(2 + sizes(self.settings).rounds):
            for way in ways:
                threads = max(1, all_threads // RANKS) if way in (SYNC, LOCAL) else all_threads
                torch.set_num_threads(threads)
                self._meet()
                start = time.perf_counter()
                if way in calls:
                    calls[way]()
                self._meet()
                if number >= 2:
                    samples[way].append(time.perf_counter() - start)
        torch.set_num_threads(all_threads)
        return samples

    def _meet(self) -> None:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def _on_a_rank(
    rank: int, folder: str, settings: Settings, ways: Sequence[str], threads: int
) -> None:
    """The process's main function: rank 0 writes ``results.json``."""
    torch.set_num_threads(threads)
    # NCCL refuses two ranks on one GPU, gloo does not.
    backend = "nccl" if _gpus(settings) >= RANKS else "gloo"
    work = Rank(settings, rank)
    dist.init_process_group(backend, f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        results: dict[str, Any] = {"losses": work.compared(ways), "seconds": work.timed(ways)}
        if rank == 0:
            (Path(folder) / "results.json").write_text(json.dumps(results), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def results_of(settings: Settings, ways: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Losses and seconds of each way, from two fresh processes. A file is their meeting point:
    there is no port that another program may have."""
    method = "spawn"
    if settings.device == "cpu" and "forkserver" in multiprocessing.get_all_start_methods():
        # The server imports torch once and forks; processes of "spawn" import torch each, for 4 s.
        method = "forkserver"
        multiprocessing.set_forkserver_preload(["benchmarks.experiments.data_parallel"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, settings, [*ways], torch.get_num_threads())
        torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
            _on_a_rank, arguments, nprocs=RANKS, start_method=method
        )
        text = (Path(folder) / "results.json").read_text(encoding="utf-8")
    results: dict[str, dict[str, list[float]]] = json.loads(text)
    return results


def off_by(losses: Sequence[float], whole: Sequence[float]) -> float:
    """The largest difference of a step's loss, relative to the whole batch's."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, whole, strict=True))


def ways_of(settings: Settings) -> list[str]:
    return [ONE, SYNC, LOCAL, *([THREADS] if _gpus(settings) >= RANKS else [])]


def _runs(settings: Settings) -> Iterator[Run]:
    results = results_of(settings, ways_of(settings))
    losses, times = results["losses"], Timed(results["seconds"])
    for way in ways_of(settings):
        numbers = {
            "ms": 1e3 * times.seconds(way),
            "off": off_by(losses[way], losses[ONE]) * 1e6,
        }
        if way != ONE:
            numbers |= dict(zip(KEYS, times.gain(ONE, way), strict=True))
        if way == THREADS:  # of one round, as all ratios
            numbers |= dict(zip(DDP, times.gain(THREADS, LOCAL), strict=True))
        yield Run(way, numbers, "both processes share a GPU" if _shared(settings, way) else "")


def _shared(settings: Settings, way: str) -> bool:
    return way in (SYNC, LOCAL) and _gpus(settings) == 1


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    return [_judge_same(runs), _judge_threads(runs)]


def _judge_same(runs: Mapping[str, Run]) -> Verdict:
    sync, local = runs.get(SYNC), runs.get(LOCAL)
    if sync is None or local is None:
        return Verdict(None, "nothing was measured")
    off, off_local = (run.numbers["off"] * 1e-6 for run in (sync, local))
    words = (
        f"with synchronised batch norms the losses differ by at most {off:.0e} of the loss in "
        f"float64, and with each process's own batch norms by {off_local:.0e}; speed of 2 "
        f"processes over 1: {gain_text(triple(sync))}"
    )
    return Verdict(off < SAME, words + ("" if not sync.note else f" ({sync.note})"))


def _judge_threads(runs: Mapping[str, Run]) -> Verdict:
    threads = runs.get(THREADS)
    if threads is None:
        return Verdict(None, NEEDS)
    gain = triple(threads, DDP)
    words = f"DDP's speed over DataParallel's on the same two GPUs: {gain_text(gain)}"
    if gain[1] <= 1.0 <= gain[2]:
        return Verdict(None, f"{words}: 1 is within the interval")
    return Verdict(gain[1] > 1.0, words)


def _setup(settings: Settings) -> str:
    batch, pixels, width, steps, rounds = sizes(settings)
    backend = "NCCL" if _gpus(settings) >= RANKS else "gloo"
    return (
        f"ResNet-8 ({width} to {4 * width} channels) after fusedtrain.convert, {batch} random "
        f"images of {pixels} pixels in all, fusedtrain's SGD, {backend}. Losses: {steps} steps in "
        f"float64. Time: {rounds} rounds in float32; two processes have half of the threads each. "
        "Speeds are over one process."
    )


EXPERIMENT = Experiment(
    name="data_parallel",
    title="Data parallel training",
    question="Is DistributedDataParallel the same training as one process with the whole batch, "
    "and what does DataParallel cost?",
    setup=_setup,
    columns={
        "ms": Column("ms a step", 2),
        **columns_of("speed"),
        **columns_of("DDP's speed over this", DDP),
        "off": Column("losses off by, 1e-6", 3),
    },
    claims=(
        Claim(
            "DistributedDataParallel averages gradients: with synchronised batch norms it trains "
            "as one process with the whole batch.",
            "PyTorch, notes on DistributedDataParallel; no number",
        ),
        Claim(
            "DistributedDataParallel is faster than DataParallel, also on one machine.",
            "PyTorch performance tuning guide; no number, no device",
        ),
    ),
    runs=_runs,
    judge=_judge,
)
