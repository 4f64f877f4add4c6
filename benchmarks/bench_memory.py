"""Memory in training: what forward keeps, the peak of a step, the largest batch that fits.

`convert(memory="recompute")` ("fusedtrain") against eager torch, torch.compile and
`convert(memory="store")`, by the allocations of torch's profiler (CPU) or of CUDA's caching
allocator. Rivals take turns within one test.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from benchmarks import _networks
from benchmarks._guards import refuse_the_reference
from benchmarks._measure import Call, Clock, Effort, ReplayClock, interleave
from benchmarks._memory_rows import memory_row
from benchmarks._networks import Setup

REPLAY = ReplayClock()
CASES: dict[str, tuple[Setup, ...]] = {
    "cpu": (
        Setup("train", "resnet50", 8, 224, "contiguous"),
        Setup("train", "efficientnet_b0", 8, 224, "contiguous"),
    ),
    "cuda": (
        Setup("train", "resnet50", 64, 224, "channels_last"),
        Setup("train", "efficientnet_b0", 64, 224, "channels_last"),
    ),
}
MOST = 4  # times the batch are tried
QUICK = (Setup("train", "resnet18", 4, 64, "contiguous"),)


@dataclass(frozen=True)
class Case:
    """One row."""

    setup: Setup
    compiled: bool

    @property
    def op(self) -> str:
        """What --op selects."""
        return "memory"

    @property
    def model(self) -> str:
        """What --model selects."""
        return self.setup.model

    def __str__(self) -> str:
        return f"{self.setup.model}-{self.setup.batch}-{self.setup.layout}"


def select(
    device: str = "cpu",
    *,
    quick: bool = False,
    compiled: bool = True,
    ops: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a run."""
    return [
        Case(setup, compiled and not quick)
        for setup in (QUICK if quick else CASES[device])
        if (not ops or "memory" in ops) and (not models or setup.model in models)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        option("--device"),
        quick=option("--quick"),
        compiled=not option("--no-compile"),
        ops=tuple(option("--op")),
        models=tuple(option("--model")),
    )
    metafunc.parametrize("case", cases, ids=str)


@lru_cache(maxsize=1)
def _stock(setup: Setup, device: str) -> nn.Module:
    return _networks.build(setup, device)


def contestants(setup: Setup, device: str, compiled: bool) -> dict[str, Any]:
    """Copies of one network. fusedtrain's two differ in nothing but what they keep."""
    found: dict[str, Any] = {"eager": copy.deepcopy(_stock(setup, device))}
    for who, memory in (("store", "store"), ("fusedtrain", "recompute")):
        found[who] = copy.deepcopy(_stock(setup, device))
        fusedtrain.convert(found[who], memory="recompute")
        fusedtrain.convert(found[who], memory=memory)
    if compiled:
        torch.compiler.reset()
        found["compile"] = torch.compile(copy.deepcopy(_stock(setup, device)), dynamic=False)
    return found


def _most(run: Callable[[], Any], device: str) -> tuple[int, int]:
    """Bytes allocated by a call: at most, and in the end, while its result lives."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        most, end = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        del result
        return most - before, end - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    del result
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most, now


def bytes_of(model: Any, setup: Setup, device: str, batch: int = 0) -> tuple[int, int]:
    """Peak of forward and backward with gradients, and what forward keeps."""
    images, labels = _networks.batch_of(setup, device, batch)

    def forward() -> Tensor:
        return T.cross_entropy(model(images), labels)

    def step() -> None:
        forward().backward()

    model.zero_grad()
    peak, _ = _most(step, device)
    model.zero_grad()
    _, kept = _most(forward, device)
    return peak, kept


def largest(model: Any, setup: Setup, device: str, limit: int, peak: int) -> int:
    """Images of the largest batch whose peak is `limit` at the most. `peak`: of setup.batch."""

    def needed(batch: int) -> int:
        return bytes_of(model, setup, device, batch)[0]

    fewer = max(setup.batch // 2, 1)
    each = (peak - needed(fewer)) / (setup.batch - fewer)
    most = MOST * setup.batch  # of a small network gradients are most
    batch = setup.batch + int((limit - peak) / each) if each > 0 else most
    batch = min(max(fewer, batch), most)
    while batch > fewer and needed(batch) > limit:
        batch -= 1
    while batch < most and needed(batch + 1) <= limit:
        batch += 1
    return batch


def _calls(models: dict[str, Any], setup: Setup, device: str) -> dict[str, Call]:
    images, labels = _networks.batch_of(setup, device)

    def call(model: Any) -> Call:
        def step() -> None:
            model.zero_grad()
            T.cross_entropy(model(images), labels).backward()

        return step

    return {who: call(model) for who, model in models.items()}


@pytest.mark.benchmark(timer=REPLAY)
def test_memory(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    setup = case.setup
    refuse_the_reference("batch_norm_act", device)
    try:
        models = contestants(setup, device, case.compiled)
    except ImportError as error:
        pytest.skip(f"{case}: {error}")
    size = min(setup.batch, _networks.GATE_BATCH)
    batches = [_networks.batch_of(setup, device, size, seed) for seed in _networks.GATE_SEEDS]
    try:
        _networks.pass_gate(models["fusedtrain"], _stock(setup, device), setup, batches)
    except _networks.NotTheJob as error:
        pytest.fail(f"{case} on {device}: {error}. Not measured", pytrace=False)
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    peak, kept, fits = {}, {}, {}
    for who, model in list(models.items()):
        try:
            bytes_of(model, setup, device, min(2, setup.batch))  # what is made at the first call
            peak[who], kept[who] = bytes_of(model, setup, device)
        except Exception as error:
            if who != "compile":
                raise
            warnings.warn(f"{case}: no torch.compile rival: {error}", stacklevel=1)
            del models[who]
    for who in ("eager", "store", "fusedtrain"):
        limit = peak["eager"]
        fits[who] = (
            setup.batch if who == "eager" else largest(models[who], setup, device, limit, peak[who])
        )
    samples = interleave(_calls(models, setup, device), clock, effort)
    benchmark.group = f"memory {setup.model}"
    benchmark.extra_info.update(
        memory_row(setup, device=device, samples=samples, kept=kept, peak=peak, fits=fits)
    )
    REPLAY.replay(benchmark, samples["fusedtrain"])
