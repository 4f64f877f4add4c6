"""Programs of the ranks of test_data_parallel.py, and the same training in one process."""

from __future__ import annotations

import contextlib
import io
import os
import random
import runpy
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fusedtrain
from fusedtrain.nn import SyncBatchNormAct
from helpers import ROOT
from helpers.optimizers import make

STEPS, BAD, DECAY, CLIP = 4, 1, 0.9, 0.5  # the loss of rank 1 overflows in step BAD
KILLED = 3  # the step in whose backward rank 1 is killed
# [step, half of the rank's batch, rank, sample, ...]
_GENERATOR = torch.Generator().manual_seed(5)
INPUTS = torch.randn(STEPS, 2, 2, 3, 2, 4, 4, generator=_GENERATOR, dtype=torch.float64)
TARGETS = torch.randn(STEPS, 2, 2, 3, 3, generator=_GENERATOR, dtype=torch.float64)
EVERYTHING = slice(None)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU(),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 3),
    ).double()  # fmt: skip


def converted(synchronised: bool = True) -> nn.Module:
    model = network()
    if synchronised:
        fusedtrain.nn.convert_sync_batchnorm(model)
    assert len(fusedtrain.convert(model).norms) == 2
    norm = SyncBatchNormAct if synchronised else nn.BatchNorm2d
    assert sum(type(part) is norm for part in model.modules()) == 2
    return model


class Stock:
    """An AMP step in torch's parts: unscale_, clip_grad_norm_, step, average."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=0.1, weight_decay=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.averages = [p.detach().clone() for p in self.params]

    def step(self) -> float:
        self.scaler.unscale_(self.optimizer)
        norm = float(nn.utils.clip_grad_norm_(self.params, CLIP))
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= scale:
            for average, p in zip(self.averages, self.params, strict=True):
                average.lerp_(p.detach(), 1 - DECAY)
        self.optimizer.zero_grad()
        return norm


class Fused:
    """The same step by fusedtrain."""

    def __init__(self, model: nn.Module, zero: str = "none", **options: Any) -> None:
        self.params, self.zero = list(model.parameters()), zero
        writeback = "zero" if zero == "step" else "none"
        self.optimizer = make(
            "AdamW", self.params, max_grad_norm=CLIP, ema_decay=DECAY,
            gradient_writeback=writeback, **options,
        )  # fmt: skip
        self.scaler = fusedtrain.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def step(self) -> float:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.zero == "memory":
            fusedtrain.zero_grad(self.params, set_to_none=False)
        elif self.zero == "none":
            self.optimizer.zero_grad()
        assert self.optimizer.grad_norm is not None
        return float(self.optimizer.grad_norm)

    @property
    def averages(self) -> list[Tensor]:
        return [average for _, average in self.optimizer.averaged_parameters()]


def train(
    model: nn.Module,
    amp: Stock | Fused,
    ranks: Any = EVERYTHING,
    halves: bool = False,
    steps: range = range(STEPS),
    save: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Trains on the samples of these ranks.

    Args:
        halves: two backward passes a step, the first without communication.
    """
    record: dict[str, Any] = {"losses": [], "norms": [], "scales": []}
    for step in steps:
        pieces = [slice(0, 1), slice(1, 2)] if halves else [EVERYTHING]
        total = 0.0
        for piece in pieces:
            x, y = (t[step, piece, ranks].flatten(0, 2) for t in (INPUTS, TARGETS))
            last = piece is pieces[-1] or not isinstance(model, DistributedDataParallel)
            with contextlib.nullcontext() if last else model.no_sync():
                loss = (model(x) - y).square().mean() / len(pieces)
                total += loss.item()
                if step == BAD and ranks != slice(0, 1):
                    loss = loss * float("inf")
                amp.scaler.scale(loss).backward()
        record["losses"].append(total)
        record["norms"].append(amp.step())
        record["scales"].append(amp.scaler.get_scale())
        save(step)
    record["params"] = [p.detach() for p in amp.params]
    record["buffers"] = list(model.buffers())
    record["averages"] = amp.averages
    return record


class Way(NamedTuple):
    """A way to train with DistributedDataParallel."""

    options: Mapping[str, Any] = MappingProxyType({})
    zero: str = "none"
    halves: bool = False
    hook: bool = False


WAYS = {
    "plain": Way(),
    "static graph": Way({"static_graph": True}),
    "small buckets": Way({"bucket_cap_mb": 1e-4}),
    "bucket views, zeroed": Way({"gradient_as_bucket_view": True}, zero="memory"),
    "bucket views, zeroed by the step": Way({"gradient_as_bucket_view": True}, zero="step"),
    "no_sync": Way(halves=True),
    "no_sync, bucket views": Way({"gradient_as_bucket_view": True}, zero="step", halves=True),
    "comm hook": Way(hook=True),
}


def _one_way(rank: int, way: Way) -> dict[str, Any]:
    model = DistributedDataParallel(converted(), **way.options)
    sent: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    if way.hook:
        hook.__annotations__.clear()  # strings, which torch compares with classes
        model.register_comm_hook(None, hook)
    before = None
    amp = Fused(model, way.zero)
    mine = slice(rank, rank + 1)
    if "gradient_as_bucket_view" in way.options:
        # The buckets of the first step are made anew for the second.
        train(model, amp, mine, way.halves, steps=range(2))
        before = [p.grad.data_ptr() for p in amp.params if p.grad is not None]
        assert len(before) == len(amp.params)
        record = train(model, amp, mine, way.halves, steps=range(2, STEPS))
        record["kept"] = before == [p.grad.data_ptr() for p in amp.params if p.grad is not None]
    else:
        record = train(model, amp, mine, way.halves)
    record["sent"] = sum(sent)
    return record


def _local_statistics(rank: int) -> dict[str, Any]:
    """Without synchronised statistics: converted and stock, both with DistributedDataParallel."""
    results = {}
    for name, amp_of, inner in (
        ("ours", Fused, converted(synchronised=False)), ("stock", Stock, network()),
    ):  # fmt: skip
        model = DistributedDataParallel(inner, static_graph=name == "ours")
        results[name] = train(model, amp_of(model), slice(rank, rank + 1))
    return results


def _compressed(rank: int) -> dict[str, Any]:
    """Gradients sent as float16, with both optimizers."""
    results = {}
    for name, amp_of in (("ours", Fused), ("stock", Stock)):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(32, 3).double())
        model.register_comm_hook(None, fp16_compress_hook)
        amp = amp_of(model)
        for step in range(3):
            x, y = (t[step, :, rank].flatten(0, 1) for t in (INPUTS, TARGETS))
            amp.scaler.scale((model(x.flatten(1)) - y).square().mean()).backward()
            amp.step()
        results[name] = [p.detach() for p in model.parameters()]
    return results


def _rounded(rank: int) -> dict[str, Any]:
    """bfloat16 with differently seeded ranks: rounded at random, and with float32 masters."""
    results = {}
    for option in ("stochastic_rounding", "master_weights"):
        torch.manual_seed(rank)
        random.seed(rank)
        model = DistributedDataParallel(nn.Linear(32, 64).bfloat16())  # takes rank 0's weights
        first = [p.detach().clone() for p in model.parameters()]
        options = {option: True}
        optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=1e-4, **options)
        for step in range(8):
            x = INPUTS[step % STEPS, :, rank].flatten(0, 1).flatten(1).bfloat16()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        params = [p.detach() for p in model.parameters()]
        masters = [optimizer.state[p].get("master_param", p.detach()) for p in model.parameters()]
        results[option] = {"first": first, "params": params, "masters": masters}
    return results


def _redundant(rank: int) -> dict[str, Any]:
    """torch's ZeroRedundancyOptimizer, which keeps each state on one rank only."""
    results = {}
    for name in ("zero", "plain"):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(32, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        model = DistributedDataParallel(inner)
        options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
        optimizer: torch.optim.Optimizer
        if name == "zero":
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), optimizer_class=fusedtrain.optim.LAMB, **options
            )
        else:
            optimizer = fusedtrain.optim.LAMB(model.parameters(), max_grad_norm=None, **options)
        for step in range(3):
            x, y = (t[step, :, rank].flatten(0, 1) for t in (INPUTS, TARGETS))
            optimizer.zero_grad()
            (model(x.flatten(1)) - y).square().mean().backward()
            optimizer.step()
        results[name] = [p.detach() for p in model.parameters()]
    return results


def example(name: str) -> str:
    """Output of an example of examples/integrations, which finds the process group in being."""
    init, destroy = dist.init_process_group, dist.destroy_process_group
    stream = io.StringIO()
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(stream):
            runpy.run_path(str(ROOT / "examples/integrations" / name), run_name="__main__")
    finally:
        dist.init_process_group, dist.destroy_process_group = init, destroy
    return stream.getvalue()


def checkpoint(model: nn.Module, amp: Fused, path: str) -> None:
    """Writes a file of its own, and puts that in the place of the last one."""
    state = {
        "model": model.state_dict(),
        "optimizer": amp.optimizer.state_dict(),
        "scaler": amp.scaler.state_dict(),
    }
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def _killed(rank: int, folder: str) -> None:
    """Rank 1 is killed in the backward pass of step KILLED; rank 0 saves after each step."""
    inner = converted()
    model = DistributedDataParallel(inner)
    amp = Fused(model)
    train(model, amp, slice(rank, rank + 1), steps=range(KILLED - 1))

    def die(grad: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def save(step: int) -> None:
        if rank == 0:
            checkpoint(inner, amp, f"{folder}/checkpoint.pt")
        elif step == KILLED - 1:
            amp.params[0].register_hook(die)

    train(model, amp, slice(rank, rank + 1), steps=range(KILLED - 1, STEPS), save=save)


def on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results: dict[str, Any] = {f"way {name}": _one_way(rank, way) for name, way in WAYS.items()}
    for case in (_local_statistics, _compressed, _rounded, _redundant):
        results[case.__name__.strip("_")] = case(rank)
    os.chdir(folder)
    results["example"] = [example("ddp_checkpoint.py") for _ in range(2)]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    try:
        _killed(rank, folder)
    except RuntimeError:  # of Gloo, on rank 0
        Path(f"{folder}/noticed").write_text(traceback.format_exc())
    time.sleep(0.5)  # see rank_processes.py
