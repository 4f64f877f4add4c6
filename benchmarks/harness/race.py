"""One row of a benchmark: who is let in, the rivals that take turns, and the row that is made."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from statistics import mean, median
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.cases import Case, Work, dtype_name
from benchmarks.harness.rows import make_row
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench import Contest, admitted, copies_of
from fusedtrain.advisor.bench.clock import (
    Call,
    Clock,
    Effort,
    FlushingCudaClock,
    cpu_clock,
    cuda_clock,
    interleave,
)
from fusedtrain.advisor.bench.gate import NotTheJob

Prepare = Callable[[str], object]
T = TypeVar("T")


@cache
def has_kernel(op: str, device: str) -> bool:
    """Whether the device has a kernel of fusedtrain's op."""
    key = {"cpu": "CPU", "cuda": "CUDA"}[device]
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedtrain::{op}", key)


def refuse_the_reference(op: str, device: str) -> None:
    """Skip where plain torch would pass for a kernel (the conftest sets FUSEDTRAIN_REQUIRE)."""
    required = os.environ.get("FUSEDTRAIN_REQUIRE", "").split(",")
    if device in required and not has_kernel(op, device):
        pytest.skip(f"fusedtrain has no {device} kernel of {op}")


def admit(
    contestants: Mapping[str, T], check: Callable[[str, T], None], where: str, **rules: Any
) -> dict[str, T]:
    """Contestants to be timed: they passed the gate, and ours must. See ``admitted``."""
    try:
        passed, left_out = admitted(contestants, check, **rules)
    except NotTheJob as error:
        pytest.fail(f"{where}: {error}. Not timed", pytrace=False)
    for who, reason in left_out.items():
        warnings.warn(f"{where}: {who} left out: {reason}", stacklevel=2)
    return passed


@dataclass
class Race:
    """How the rivals of one test are timed.

    Args:
        clock: of the device.
        effort: how long one row may take.
        device: "cpu" or "cuda".
        is_off: the gates are all that runs.
        is_profiled: fusedtrain's call runs once between the profiler's marks, and the test skips.
        is_first: the row is one that `make gpu` begins with.
        entry: the row as files of results have it, but for its name; empty until it is made.
    """

    clock: Clock
    effort: Effort
    device: str
    is_off: bool = False
    is_profiled: bool = False
    is_first: bool = False
    entry: dict[str, Any] = field(default_factory=dict)
    _host: dict[str, float] = field(default_factory=dict)  # nanoseconds of the host, on CUDA

    def samples(
        self, calls: Mapping[str, Call], prepare: Prepare | None = None
    ) -> dict[str, list[float]]:
        """Nanoseconds per call (see ``interleave``)."""
        if self.is_profiled:
            profile_once(calls["fusedtrain"])
            pytest.skip("profiled, not timed")
        samples = interleave(calls, self.clock, self.effort, prepare)
        if isinstance(self.clock, FlushingCudaClock):
            self._host = {who: self.clock.host_ns[call] for who, call in calls.items()}
            self.clock.host_ns.clear()
        return samples

    def host(self) -> Race:
        """The same of what is not memory: brief, and never with a cold cache."""
        brief = replace(self.effort, seconds=min(self.effort.seconds, 0.1))
        return replace(self, clock=cpu_clock if self.device == "cpu" else cuda_clock, effort=brief)

    def count(self, call: Call) -> int:
        """Kernels that a call launches on CUDA, operators that it dispatches on the CPU."""
        return count_ops(call) if self.device == "cpu" else count_launches(call)

    def finish(self, family: str, samples: Mapping[str, Sequence[float]], **extra: Any) -> None:
        """Makes the row."""
        flushed = isinstance(self.clock, FlushingCudaClock)
        extra |= {"l2_flushed": flushed, **({"first": True} if self.is_first else {})}
        if self._host:
            extra.setdefault("host_ns", dict(self._host))
        row = make_row(family, self.device, samples, **extra)
        seconds = [1e-9 * ns for ns in samples["fusedtrain"]]
        stats = {"min": min(seconds), "max": max(seconds), "mean": mean(seconds)}
        stats |= {"median": median(seconds), "rounds": len(seconds)}
        self.entry.update(extra_info=row, stats=stats)

    def op(self, family: str, case: Case, kernel: str = "") -> None:
        """Gates the contestants of an op, times them beside copies of the source, makes the row.

        ``kernel``: the op that needs one on the device, for the reference is not to be timed.
        """
        if kernel:
            refuse_the_reference(kernel, self.device)
        work = Work(self.device, case.dtype, compiled=case.compiled)
        contest = contest_of(case.contest, case.arguments, work)
        match, source = contest.match(case.part), contest.source
        admitted = admit(match.calls, lambda who, _: match.gate(who), f"{case} on {self.device}")
        if self.is_off:
            return
        samples = self.samples({**admitted, **copies_of(source)})
        extra: dict[str, Any] = {"pass": case.part}
        if len(case.shape) > 1:
            extra |= {"shape": list(case.shape), "layout": case.layout, "model": case.model}
        if case.kept:
            leaf = source.detach().requires_grad_()
            forwards = {who: partial(contest.functions[who], leaf) for who in admitted}
            extra["kept"] = {who: kept_bytes(f) / source.numel() for who, f in forwards.items()}
        self.finish(
            family,
            samples,
            moved=match.bytes,
            copied=2 * source.nbytes,
            op=case.label or case.op,
            dtype=dtype_name(case.dtype),
            numel=source.numel(),
            **extra,
        )


@lru_cache(maxsize=1)
def contest_of(make: Callable[..., Contest], arguments: tuple[Any, ...], work: Work) -> Contest:
    """The contest of neighbouring rows: its contestants are gated, and compiled, once."""
    return make(work, *arguments)


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


def profile_once(call: Call) -> None:
    """A second call, whose kernels alone `ncu --profile-from-start off` looks at."""
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def in_graph(call: Call, calls: int = 50) -> float:
    """Nanoseconds of a call in a CUDA graph of so many: the kernels and the gaps between them,
    without the host. NaN where the call cannot be captured."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):  # what is made at the first call is made outside
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
    except RuntimeError as error:
        warnings.warn(f"no CUDA graph: {error}", stacklevel=2)
        return math.nan
    graph.replay()
    return min(cuda_clock(graph.replay, 1) for _ in range(5)) / calls


def count_launches(call: Call) -> int:
    """Kernels that a call launches on the GPU, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    # The driver's and the runtime's calls: cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernelEx.
    return sum(e.count for e in profiler.key_averages() if "LaunchKernel" in e.key)
