"""The fused AMP step against torch's and timm's optimizers, on the parameters of real networks.

A job (``_contestants.JOBS``) is what stands between ``backward()`` and the next ``forward()``.
Rivals take turns within one test and work on the same parameters and gradients, each with states
of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import _step_gate
from benchmarks._contestants import (
    DEEPSPEED,
    JOBS,
    KINDS,
    RULES,
    Contestant,
    bytes_per_parameter,
    does,
    ours,
    parameters,
    rival,
    rivals,
)
from benchmarks._guards import refuse_the_reference
from benchmarks._measure import (
    Call,
    Clock,
    Effort,
    FlushingCudaClock,
    ReplayClock,
    cpu_clock,
    cuda_clock,
    interleave,
)
from benchmarks._parameter_lists import MODELS, Shape, shapes
from benchmarks._step_rows import step_row

# On the CPU the largest takes 13 to 20 GB and a minute a row: only by --model.
CPU_MODELS = MODELS[:-1]
ALL_JOBS = ("adamw", "sgd")  # the others: "check", unless --full
SMALL_NETS = ("efficientnet_b0", "resnet50")  # for all optimizers but AdamW
LR = 1e-6  # what is timed does not depend on it, and thousands of steps leave the weights sane
# The copy goes through as much memory as the job, but not more than this each way: several times
# the largest caches.
COPY_BYTES = 1 << 28
REPLAY = ReplayClock()


@dataclass(frozen=True)
class Case:
    """One row: all its rivals share parameters, gradients and the measurement loop."""

    model: str
    op: str  # the optimizer
    kind: str
    job: str

    def __str__(self) -> str:
        return f"{self.op}-{self.job}-{self.kind}-{self.model}"


def select(
    device: str = "cpu",
    *,
    full: bool = False,
    quick: bool = False,
    ops: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a run, those of one network and dtype together."""
    if quick:
        names = ops or ("adamw",)
        found = [Case("efficientnet_b0", op, "float32", "zero") for op in names if op in RULES]
        return [replace(case, model=m) for case in found for m in models or (case.model,)]
    cases = []
    for model in MODELS if device == "cuda" or models else CPU_MODELS:
        for kind in KINDS:
            for op in RULES:
                whole = op == "adamw" and (kind == "float32" or model in ("resnet50", MODELS[-1]))
                small = kind == "float32" and model in SMALL_NETS
                for job in JOBS:
                    common = job == "check" or op in ALL_JOBS
                    wanted = full or whole or (small and common)
                    if wanted and (not ops or op in ops) and (not models or model in models):
                        cases.append(Case(model, op, kind, job))
    return cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        option("--device"),
        full=option("--full"),
        quick=option("--quick"),
        ops=tuple(option("--op")),
        models=tuple(option("--model")),
    )
    metafunc.parametrize("case", cases, ids=str)


def _contestant(who: str, case: Case, tensors: tuple[list[Tensor], list[Tensor]]) -> Contestant:
    kind = KINDS[case.kind]
    values, grads = tensors
    if kind.master:  # its owner follows what others write to its parameters
        values = [value.clone() for value in values]
    params = parameters(values, grads)
    if who == "fusedtrain":
        return ours(case.op, case.job, kind, params, lr=LR)
    return rival(who, case.op, case.job, kind, params, lr=LR)


@cache
def _gate(who: str, case: Case, device: str) -> str:
    """Why the contestant's numbers are wrong; empty where they are right."""
    try:
        _step_gate.check(who, case.op, case.job, case.kind, device)
    except _step_gate.NotTheJob as error:
        return str(error)
    return ""


def _entrants(case: Case, device: str) -> list[str]:
    """Those that are to be timed: they passed the gate, and ours must."""
    blame = _gate("fusedtrain", replace(case, model=""), device)
    if blame:
        pytest.fail(f"{case} on {device}: {blame}. Not timed", pytrace=False)
    entrants = ["fusedtrain"]
    for who in rivals(case.op, KINDS[case.kind], device):
        try:
            blame = _gate(who, replace(case, model=""), device)
        except Exception as error:
            # A peer that is installed and does not build is no reason to lose the row.
            if who != DEEPSPEED:
                raise
            blame = str(error)
        if blame:
            warnings.warn(f"{case} on {device}: {who} left out: {blame}", stacklevel=1)
        else:
            entrants.append(who)
    return entrants


@lru_cache(maxsize=1)
def _tensors(model: str, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    return _random(shapes(model), dtype, device)


def _random(
    of: Iterable[Shape], dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    values = [0.05 * torch.randn(shape, dtype=dtype, device=device) for shape in of]
    return values, [1e-2 * torch.randn_like(value) for value in values]


@lru_cache(maxsize=1)
def copy_buffers(nbytes: int, device: str) -> tuple[Tensor, Tensor]:
    """Source and target of the copy that a job is compared with."""
    source = torch.ones(nbytes // 4, device=device)
    return source, torch.ones_like(source)


class _CountingOps(TorchDispatchMode):
    """Counts the operators that reach the dispatcher below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_ops(call: Call) -> int:
    """Operators that a call dispatches."""
    with _CountingOps() as mode:
        call()
    return mode.count


def count_launches(call: Call) -> int:
    """Kernels that a call launches on the GPU, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    # The driver's and the runtime's calls: cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernelEx.
    return sum(e.count for e in profiler.key_averages() if "LaunchKernel" in e.key)


def _prepare(case: Case, grads: list[Tensor]) -> Callable[[str], object] | None:
    """Gradients for the next sample, where the job zeroes them.

    Updates of zero gradients would also let moments decay to denormal numbers, which are slow.
    """
    if not does(case.job, "zero"):
        return None
    kept = [grad.clone() for grad in grads]
    return lambda who: torch._foreach_copy_(grads, kept)


def _host_ns(
    case: Case, entrants: list[str], device: str, effort: Effort
) -> dict[str, list[float]]:
    """The same calls on one element a tensor: everything that is not memory."""
    tensors = _random([(1,)] * len(shapes(case.model)), KINDS[case.kind].dtype, device)
    calls: dict[str, Call] = {who: _contestant(who, case, tensors).call for who in entrants}
    clock = cpu_clock if device == "cpu" else cuda_clock
    return interleave(calls, clock, effort, _prepare(case, tensors[1]))


@pytest.mark.benchmark(timer=REPLAY)
def test_amp_step(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("optimizer_step", device)
    try:
        entrants = _entrants(case, device)
    except ImportError as error:
        pytest.skip(f"{case.op}: no rival, {error}")
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    tensors = _tensors(case.model, KINDS[case.kind].dtype, device)
    contestants = {who: _contestant(who, case, tensors) for who in entrants}
    calls: dict[str, Call] = {who: c.call for who, c in contestants.items()}
    numel = sum(p.numel() for p in tensors[0])
    moved = numel * bytes_per_parameter(case.op, case.job, KINDS[case.kind])
    source, target = copy_buffers(min(moved // 2, COPY_BYTES), device)
    calls["copy"] = lambda: target.copy_(source)
    samples = interleave(calls, clock, effort, _prepare(case, tensors[1]))
    counter = count_ops if device == "cpu" else count_launches
    counts = {who: counter(calls[who]) for who in entrants}
    del contestants, calls
    host = _host_ns(case, entrants, device, replace(effort, seconds=min(effort.seconds, 0.1)))
    benchmark.group = f"{case.kind} {case.model} {case.job}"
    benchmark.extra_info["l2_flushed"] = isinstance(clock, FlushingCudaClock)
    benchmark.extra_info.update(
        step_row(
            model=case.model,
            op=case.op,
            job=case.job,
            kind=case.kind,
            numel=numel,
            tensors=len(tensors[0]),
            device=device,
            moved=moved,
            copied=2 * source.nbytes,
            samples=samples,
            host=host,
            counts=counts,
        )
    )
    REPLAY.replay(benchmark, samples["fusedtrain"])
