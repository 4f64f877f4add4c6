"""One row of a benchmark: its rivals take turns, and what came of it is stored."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import mean, median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.cases import dtype_name
from benchmarks.harness.guards import admit
from benchmarks.harness.rows import make_row
from fusedtrain._graph.kept import kept_bytes
from fusedtrain.advisor.bench import COPY, FRESH_COPY, Contest
from fusedtrain.advisor.bench.clock import (
    Call,
    Clock,
    Effort,
    FlushingCudaClock,
    Function,
    cpu_clock,
    cuda_clock,
    interleave,
)

# Passes of a function of one tensor, which in all of them requires a gradient.
PASSES = ("forward", "backward", "forward+backward")
# A copy goes through as much memory as a step, but not more than this each way: several times the
# largest caches.
COPY_BYTES = 1 << 28
Prepare = Callable[[str], object]


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

    def match(
        self,
        contest: Contest,
        pass_name: str,
        where: str,
        *,
        family: str,
        op: str,
        kept: Mapping[str, Call] | None = None,
        **extra: Any,
    ) -> None:
        """Gates the contestants, times them beside copies of the source, and makes the row.

        ``kept``: who -> a forward, where rows say how many bytes that keeps for backward.
        """
        match, source = contest.match(pass_name), contest.source
        admitted = admit(match.calls, lambda who, _: match.gate(who), where)
        if self.is_off:
            return
        out = torch.empty_like(source)
        copies: dict[str, Call] = {COPY: lambda: out.copy_(source), FRESH_COPY: source.clone}
        samples = self.samples({**admitted, **copies})
        if kept is not None:
            extra["kept"] = {who: kept_bytes(kept[who]) / source.numel() for who in admitted}
        self.finish(
            family,
            samples,
            moved=match.bytes,
            copied=2 * source.nbytes,
            op=op,
            dtype=dtype_name(source.dtype),
            numel=source.numel(),
            **{"pass": pass_name, **extra},
        )


def call_of(
    function: Function, pass_name: str, x: Tensor, gradient: Tensor, weights: Sequence[Tensor] = ()
) -> Call:
    """The timed call of a pass in training: forward keeps what backward needs, and backward alone
    repeats itself on what one forward kept."""
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    if pass_name == "forward":
        return lambda: function(*leaves)
    if pass_name == "backward":
        y = function(*leaves)
        return lambda: torch.autograd.grad(y, leaves, gradient, retain_graph=True)
    return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)


@lru_cache(maxsize=1)
def copy_buffers(moved: int, device: str) -> tuple[Tensor, Tensor]:
    """Source and target of the copy that a step is compared with, which moves so many bytes."""
    source = torch.ones(min(moved // 2, COPY_BYTES) // 4, device=device)
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
