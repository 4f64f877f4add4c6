"""Measurements after the run, on copies: the same work done in the other way."""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from ... import optim
from ..._graph.example import arguments_of
from ..._graph.state import duplicate
from ..._graph.tracer import same_generators
from ..._torch_private import pytree
from ...conversion import ConversionReport, convert
from ...folding import drop_redundant_bias, fold_frozen_norms
from .._views import parameters_of
from ..bench.clock import Effort, cpu_clock, interleave, median_interval
from ._facts import Timing
from ._rules_optimizer import HAVE_FUSED

_ROUNDS = 5
_BUDGET = 2.0  # seconds for all optimizers
_MOST = 1 << 30  # bytes of parameters that are copied
_PASSES = Effort(min_rounds=6, max_rounds=20, seconds=0.5, sample_ns=5e6)
_MAPPED = 8 << 20
GPUS = ("cuda",)


def least_in_turns(
    calls: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = inf, fewest: int = 1
) -> dict[str, float]:
    """The least time of each call, since other processes only add to it. The calls take turns, in
    at most `rounds`, of which none but the `fewest` begins after so many seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= fewest and time.perf_counter() > end:
            break
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: min(each) for name, each in times.items()}


def shortest(call: Callable[[], Any], rounds: int) -> float:
    return least_in_turns({"": call}, rounds)[""]


def operator_seconds() -> float:
    """Time of an operator on one element, in forward and backward, in CPU time of this thread."""
    one = torch.zeros(1, requires_grad=True)

    def calls() -> None:
        y = one
        for _ in range(100):
            y = y.tanh()
        y.backward()
        one.grad = None

    times = []
    for _ in range(15):
        start = time.thread_time()
        calls()
        times.append(time.thread_time() - start)
    return median(times) / 200


def fault_seconds() -> float:
    """Time of a minor page fault: fresh memory is written, and written again."""
    import resource

    def once() -> float:
        with mmap.mmap(-1, _MAPPED) as memory:
            start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            times = []
            for _ in range(2):
                begin = time.thread_time()
                ctypes.memset(start, 1, _MAPPED)
                times.append(time.thread_time() - begin)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return max(times[0] - times[1], 0.0) / max(faults, 1)

    try:
        return median(once() for _ in range(5))
    except (OSError, BufferError):
        return 0.0


def oversubscription(threads: int, cores: int) -> float:
    """The time of a parallel operator with so many threads, by its time with one a core."""
    x = torch.zeros(1 << 20)
    try:
        times = {}
        for count in (threads, cores):
            torch.set_num_threads(count)
            x.exp()
            times[count] = shortest(lambda: x.exp(), 10)
    finally:
        torch.set_num_threads(threads)
    return times[threads] / times[cores]


def bias_seconds(shape: tuple[int, ...], like: Tensor) -> float:
    """Time of the sum that is the gradient of a bias."""
    gradient = torch.zeros(shape, dtype=like.dtype, device=like.device)
    dims = [dim for dim in range(len(shape)) if dim != 1]
    return shortest(lambda: _done(gradient.sum(dims)), 3)


def half_ratio(convolution: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """The time of forward and backward in 16 bits, by that in float32."""
    times = []
    layer = copy.deepcopy(convolution)
    for kind in (dtype, torch.float32):
        layer.to(kind)
        x = torch.randn(shape, dtype=kind, requires_grad=True)

        def call(x: Tensor = x) -> None:
            layer(x).sum().backward()

        call()
        times.append(shortest(call, 3))
    return times[0] / times[1]


def clearing_seconds(size: float, device: str) -> float:
    """Time of a memset, and of the addition instead of a write in backward."""
    gradient = torch.zeros(max(int(min(size, _MOST)) // 4, 1), device=device)
    other = torch.zeros_like(gradient)
    return shortest(lambda: _done(gradient.zero_().add_(other)), 3)


def _done(tensor: Tensor) -> None:
    if tensor.device.type in GPUS:
        torch.cuda.synchronize()


def optimizer_timing(optimizer: torch.optim.Optimizer, budget: float = _BUDGET) -> Timing | None:
    """A step as it is, with fused=True, and of fusedtrain's class; None where none can be made."""
    cls = type(optimizer)
    parameters = parameters_of(optimizer)
    if sum(p.nbytes for p in parameters) > _MOST or any(p.is_sparse for p in parameters):
        return None
    ways: dict[str, tuple[Any, dict[str, Any]]] = {"now": (cls, {})}
    if cls.__name__ in HAVE_FUSED:
        ways["torch_fused"] = cls, {"fused": True, "foreach": None}
    if (ours := getattr(optim, cls.__name__, None)) is not None:
        ways["fusedtrain"] = ours, {"fused": None, "foreach": None}
    steps: dict[str, Callable[[], Any]] = {}
    for name, (kind, options) in ways.items():
        try:
            step = _step_of(_twin(kind, optimizer, options))
            step()
            step()
        except (RuntimeError, TypeError, ValueError):
            continue
        steps[name] = step
    return Timing(**least_in_turns(steps, 4 * _ROUNDS, budget)) if "now" in steps else None


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The step without the hooks of all optimizers, which count the steps of the script."""
    hooked = type(optimizer).step
    function = getattr(hooked, "__wrapped__", hooked)

    def step() -> None:
        function(optimizer)
        _done(parameters_of(optimizer)[0])

    return step


def _twin(cls: Any, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Any:
    """An optimizer of the class with parameters of the same shapes, and gradients."""
    accepted = set(inspect.signature(cls.__init__).parameters)
    groups = []
    for group in optimizer.param_groups:
        parameters = []
        for p in group["params"]:
            parameter = nn.Parameter(torch.zeros_like(p.detach()))
            if p.grad is not None:
                parameter.grad = torch.full_like(parameter, 1e-3)
            parameters.append(parameter)
        chosen = {k: v for k, v in {**group, **options}.items() if k in accepted and k != "params"}
        groups.append({**chosen, "params": parameters})
    defaults = {k: v for k, v in groups[0].items() if k != "params"}
    return cls(groups, **defaults)


def fusable(model: nn.Module, example: Any) -> tuple[str, int, int, int, int]:
    """Layers and calls that `convert` would fuse, the bytes kept before, with "store", "recompute",
    and those of dropout's masks."""
    reports: list[ConversionReport] = []
    for memory in ("store", "recompute"):
        report = convert(model, example, memory=memory, dry_run=True)
        changed = _kinds(report)
        if report.proof is None or not (changed or report.proof.masks):
            return "", 0, 0, 0, 0
        reports.append(report)
    store, recompute = (report.proof for report in reports)
    assert store is not None
    assert recompute is not None
    saved = store.saved_before, store.saved_after, recompute.saved_after
    return changed, *saved, store.masks


def _kinds(report: ConversionReport) -> str:
    """The kinds of layers and calls that were fused, most frequent first, and how often."""
    norms = [norm.source for norm in (*report.norms, *report.group_norms)]
    sources = [layer.source for layer in report.converted] + norms
    counts = Counter(source.rpartition(".")[2] for source in sources)
    counts.update(call.activation for call in (*report.products, *report.calls))
    counts.update({"sum of a residual branch": len(report.branches)})
    return ", ".join(f"{count} x {kind}" for kind, count in (+counts).most_common())


def pass_seconds(
    model: nn.Module, example: Any, modes: Iterable[str], dtype: torch.dtype | None
) -> dict[str, list[float]]:
    """Times of forward and backward on copies, in turns, under autocast to `dtype`: as it is
    ("now") and converted with each `memory`, or with dropout fused ("dropout"). The median, and the
    least gain that is sure: how many times as long the stock model takes."""
    first = next(model.parameters())
    if sum(p.nbytes for p in model.parameters()) > _MOST:
        return {}

    def step(one: nn.Module) -> None:
        arguments, named = arguments_of(example)
        with torch.autocast(first.device.type, dtype, enabled=dtype is not None):
            leaves = pytree.tree_leaves(one(*arguments, **named))
        outputs = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
        one.zero_grad()
        _done(first)

    with same_generators():
        steps = {"now": functools.partial(step, duplicate(model))}
        for memory in modes:
            copied = duplicate(model)
            fuses = {"dropout": "fused"} if memory == "dropout" else {"memory": memory}
            convert(copied, example, **fuses)  # type: ignore[arg-type]
            steps[memory] = functools.partial(step, copied)
        times = interleave(steps, cpu_clock, _PASSES)
    gains = {name: [a / b for a, b in zip(times["now"], ns, strict=True)]
             for name, ns in times.items()}  # fmt: skip
    return {name: [median(ns) / 1e9, median_interval(gains[name])[0]] for name, ns in times.items()}


def redundant_biases(model: nn.Module) -> set[str]:
    """Names of the layers whose bias goes to a batch norm alone."""
    return {pair.conv for pair in drop_redundant_bias(duplicate(model)).folded}


def tuned_norms(model: nn.Module) -> set[str]:
    """Names of the norms that `fold_frozen_norms` takes."""
    return {pair.other for pair in fold_frozen_norms(duplicate(model)).folded}
