"""DistributedDataParallel on two gloo ranks: each way to train equals one process on the whole
batch, which trains in torch's parts and float64. Some checks the ranks make themselves."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

if not dist.is_available():
    pytest.skip("needs a torch with torch.distributed", allow_module_level=True)

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fusedtrain
from fusedtrain.nn import SyncBatchNormAct
from helpers import ROOT
from helpers.optimizers import make
from helpers.rank_processes import example, exit_codes_of_ranks

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


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def assert_replicas(tensors: Iterable[Tensor]) -> None:
    """Both ranks have the same bits."""
    for t in tensors:
        both = [torch.empty_like(t) for _ in range(2)]
        dist.all_gather(both, t.contiguous())
        assert torch.equal(*both)


def _local_statistics(rank: int) -> list[float]:
    """Without synchronised statistics: converted and stock, both with DistributedDataParallel."""
    results = {}
    for name, amp_of, inner in (
        ("ours", Fused, converted(synchronised=False)), ("stock", Stock, network()),
    ):  # fmt: skip
        model = DistributedDataParallel(inner, static_graph=name == "ours")
        results[name] = train(model, amp_of(model), slice(rank, rank + 1))
    for part in ("losses", "params", "averages", "buffers", "scales"):
        close(results["ours"][part], results["stock"][part])
    return results["ours"]["losses"]


def _compressed(rank: int) -> None:
    """Gradients sent as float16, with both optimizers."""
    results = []
    for amp_of in (Fused, Stock):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(32, 3).double())
        model.register_comm_hook(None, fp16_compress_hook)
        amp = amp_of(model)
        for step in range(3):
            amp.scaler.scale(linear_loss(model, step, rank)).backward()
            amp.step()
        results.append([p.detach() for p in model.parameters()])
    close(*results)
    assert_replicas(results[0])


def linear_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of a model of 32 features."""
    x, y = (t[step, :, rank].flatten(0, 1) for t in (INPUTS, TARGETS))
    loss: Tensor = (model(x.flatten(1)) - y).square().mean()
    return loss


def _rounded(rank: int) -> None:
    """bfloat16 with differently seeded ranks: rounded at random, and with float32 masters."""
    for option in ("stochastic_rounding", "master_weights"):
        torch.manual_seed(rank)
        random.seed(rank)
        model = DistributedDataParallel(nn.Linear(32, 64).bfloat16())  # takes rank 0's weights
        first = next(model.parameters()).detach().clone()
        options = {option: True}
        optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=1e-4, **options)
        for step in range(8):
            x = INPUTS[step % STEPS, :, rank].flatten(0, 1).flatten(1).bfloat16()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        params = [p.detach() for p in model.parameters()]
        masters = [optimizer.state[p].get("master_param", p.detach()) for p in model.parameters()]
        assert_replicas([*params, *masters])
        assert not torch.equal(first, params[0])


def _redundant(rank: int) -> None:
    """torch's ZeroRedundancyOptimizer, which keeps each state on one rank only."""
    lamb, options = fusedtrain.optim.LAMB, {"lr": 0.1, "weight_decay": 0.1}
    results = []
    for optimizer_of in (
        lambda params: ZeroRedundancyOptimizer(params, optimizer_class=lamb, **options),
        lambda params: lamb(params, max_grad_norm=None, **options),
    ):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(32, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        model = DistributedDataParallel(inner)
        optimizer = optimizer_of(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            linear_loss(model, step, rank).backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    close(*results)


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
    results["local losses"] = _local_statistics(rank)
    for check in (_compressed, _rounded, _redundant):
        check(rank)
    os.chdir(folder)
    results["example"] = [example("ddp_checkpoint.py") for _ in range(2)]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    try:
        _killed(rank, folder)
    except RuntimeError:  # of Gloo, on rank 0
        Path(f"{folder}/noticed").write_text(traceback.format_exc())
    time.sleep(0.5)  # see rank_processes.py


# --- in this process

Record = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the files that both ranks leave; rank 1 ends by a signal."""
    path = tmp_path_factory.mktemp("ranks")
    assert exit_codes_of_ranks(on_a_rank, str(path)) == [0, -signal.SIGKILL]
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Record]:
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def truth() -> dict[bool, Record]:
    """One process with the whole batch; True: in two halves."""
    records = {}
    for halves in (False, True):
        model = network()
        records[halves] = train(model, Stock(model), halves=halves)
    return records


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_equals_one_process_on_the_whole_batch(
    name: str, ranks: list[Record], truth: dict[bool, Record]
) -> None:
    first, second = (rank[f"way {name}"] for rank in ranks)
    want = truth[WAYS[name].halves]
    for part in ("params", "averages", "buffers"):
        close(first[part], want[part])
        assert all(map(torch.equal, first[part], second[part])), part
    count = len(first["losses"])  # the last ones: bucket views train in two parts
    losses = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    close(losses, want["losses"][-count:])
    # After an overflow the stock norm is NaN or infinite, as the sum of scaled gradients comes out.
    for ours, theirs in zip(first["norms"], want["norms"][-count:], strict=True):
        if math.isfinite(theirs):
            assert ours == pytest.approx(theirs, rel=1e-6)
        else:
            assert not math.isfinite(ours)
    assert str(first["norms"]) == str(second["norms"])
    assert first["scales"] == second["scales"] == want["scales"][-count:]
    assert want["scales"] == [8.0, 4.0, 4.0, 8.0]
    if WAYS[name].hook:
        assert first["sent"] == STEPS * sum(p.numel() for p in first["params"])
    if "views" in name:
        assert first["kept"]  # gradients are where they were in memory


def test_without_synchronised_statistics_losses_differ(ranks: list[Record]) -> None:
    """Each rank's are those of the stock model: the ranks say so."""
    assert ranks[0]["local losses"] != ranks[1]["local losses"]


def test_the_example_runs(ranks: list[Record]) -> None:
    path = ROOT / "examples" / "integrations" / "ddp_checkpoint.py"
    assert len(path.read_text().splitlines()) < 40
    first, second = ranks[0]["example"]
    assert first.startswith("from step 0: ")
    assert second.startswith("from step 20: ")
    assert min(float(text.split()[-1]) for text in (first, second)) > 0.7
    assert ranks[1]["example"] == ["", ""]


def test_a_killed_rank_leaves_a_checkpoint_that_goes_on(
    folder: Path, truth: dict[bool, Record]
) -> None:
    assert "RuntimeError" in (folder / "noticed").read_text()
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    model = converted()
    amp = Fused(model)
    model.load_state_dict(saved["model"])
    amp.optimizer.load_state_dict(saved["optimizer"])
    amp.scaler.load_state_dict(saved["scaler"])
    record = train(model, amp, steps=range(KILLED, STEPS))
    for part in ("params", "averages", "buffers"):
        close(record[part], truth[False][part])
    assert record["scales"] == truth[False]["scales"][KILLED:]
