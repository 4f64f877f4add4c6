"""A match: fusedtrain and its rivals on the same tensors, gated, timed in turns, beside a copy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..._torch_private import TorchDispatchMode
from .clock import (
    NORMAL,
    Call,
    Clock,
    Effort,
    Function,
    compare,
    compiled,
    cpu_clock,
    cuda_clock,
    interleave,
    median_interval,
)
from .gate import NotTheJob

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CLOCKS: Mapping[str, Clock] = {"cpu": cpu_clock, "cuda": cuda_clock}
OURS, EAGER, COMPILE = "fusedtrain", "eager", "compile"
T = TypeVar("T")
COPY, FRESH_COPY = "copy", "copy_fresh"  # into memory that exists, and into a new tensor


@dataclass(frozen=True)
class Options:
    """Choice of the work to be timed.

    Args:
        device: "cpu" or "cuda".
        dtype: of the tensors.
        size: elements of the largest tensor, or parameters; 0: what the family takes.
        quick: a few small rows.
        compiled: torch.compile of eager takes part.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    size: int = 0
    quick: bool = False
    compiled: bool = False

    def elements(self, cpu: int, cuda: int, quick: int) -> int:
        """The size asked for, or the default of the family on this device."""
        return self.size or (quick if self.quick else {"cpu": cpu, "cuda": cuda}[self.device])

    def random(self, *shape: int, seed: int = 0, layout: str = "contiguous") -> Tensor:
        """Normally distributed numbers, drawn on the device; the same at each call."""
        generator = torch.Generator(self.device).manual_seed(seed)
        made = torch.randn(shape, generator=generator, device=self.device).to(self.dtype)
        return made.contiguous(memory_format=LAYOUTS[layout]) if made.dim() == 4 else made


@dataclass
class Match:
    """Contestants that are timed, on tensors that exist.

    Args:
        calls: who -> the call; "fusedtrain" and "eager" are among them.
        gate: raises NotTheJob if that contestant's numbers are wrong.
        bytes: what the job must read and write at least.
        source: the copy that the row is compared with is one of this tensor.
        prepare: called before each sample, not timed.
        in_place: the job allocates nothing, and is compared with a copy that does not, either.
    """

    calls: dict[str, Call]
    gate: Callable[[str], None]
    bytes: float
    source: Tensor
    prepare: Callable[[str], object] | None = None
    in_place: bool = False


@dataclass(frozen=True)
class Contest:
    """Contestants on the same tensors, whose passes are matches of their own.

    Args:
        functions: who -> a function or a layer.
        check: who, function; raises NotTheJob if that contestant's numbers are wrong.
        call: function, pass -> the call to be timed.
        bytes: what a pass must read and write at least.
        source: see `Match`.
    """

    functions: Mapping[str, Any]
    check: Callable[[str, Any], None]
    call: Callable[[Any, str], Call]
    bytes: Callable[[str], float]
    source: Tensor
    _passed: set[str] = field(default_factory=set)

    def gate(self, who: str) -> None:
        """Each contestant is checked once, so that torch.compile compiles once."""
        if who not in self._passed:
            self.check(who, self.functions[who])
            self._passed.add(who)

    def match(self, part: str) -> Match:
        """The match of a pass."""
        calls = {who: self.call(function, part) for who, function in self.functions.items()}
        return Match(calls, self.gate, self.bytes(part), self.source)


def match_of(part: str, make: Callable[..., Contest], *arguments: Any) -> Match:
    """The match of a pass, of a contest that is made now."""
    return make(*arguments).match(part)


def duel(options: Options, ours: Function, eager: Function) -> dict[str, Function]:
    """The usual contestants: fusedtrain's function, eager torch's, and that one compiled."""
    functions = {OURS: ours, EAGER: eager}
    if options.compiled:
        functions[COMPILE] = compiled(eager)
    return functions


def call_of(
    function: Function,
    part: str,
    tensors: Sequence[Tensor],
    gradient: Tensor,
    constants: int = 0,
    *,
    trains: bool = False,
) -> Call:
    """The timed call of a pass; backward alone repeats itself on what one forward kept.

    The last ``constants`` of the tensors get no gradient. ``trains``: the others require one in
    the forward pass, too, which then keeps what backward needs.
    """
    trained = len(tensors) - constants
    leaves = [t.detach().requires_grad_(i < trained) for i, t in enumerate(tensors)]
    if part == "forward":
        arguments = leaves if trains else tensors
        return lambda: function(*arguments)
    if part == "backward":
        y = function(*leaves)
        return lambda: torch.autograd.grad(y, leaves[:trained], gradient, retain_graph=True)
    return lambda: torch.autograd.grad(function(*leaves), leaves[:trained], gradient)


def copies_of(source: Tensor, *, in_place: bool = False) -> dict[str, Call]:
    """The copies that a job is timed beside: into memory that exists, and into a new tensor."""
    target = torch.empty_like(source)
    copies: dict[str, Call] = {COPY: lambda: target.copy_(source)}
    return copies if in_place else {**copies, FRESH_COPY: source.clone}


@dataclass(frozen=True)
class Entry:
    """A row to be measured: what is said of it, and how the match is made."""

    family: str
    op: str
    part: str  # forward, forward+backward, or the job
    size: str
    make: Callable[[], Match]
    layout: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.op, self.part, self.size, self.layout)))


@dataclass
class Result:
    """A row.

    Args:
        ns: who -> nanoseconds per call, the median.
        interval: the 99 % interval of fusedtrain's median.
        ratio: rival -> the rival's time / fusedtrain's, the median over rounds.
        ratio_interval: the 99 % interval of that.
        gb_per_s: who -> the least bytes / time; of the copies, what these move.
        percent_of_copy: fusedtrain's of that of a copy into a new tensor (see `Match.in_place`).
        percent_of_preallocated_copy: of that of a copy into memory that exists, beside the former.
        operations: see `count_operations`.
        bytes: see `Match`.
        left_out: who -> why they were not timed.
        wrong: why fusedtrain was not timed; all else is empty then.
    """

    entry: Entry
    ns: dict[str, float] = field(default_factory=dict)
    interval: tuple[float, float] = (math.nan, math.nan)
    ratio: dict[str, float] = field(default_factory=dict)
    ratio_interval: dict[str, tuple[float, float]] = field(default_factory=dict)
    gb_per_s: dict[str, float] = field(default_factory=dict)
    percent_of_copy: float = math.nan
    percent_of_preallocated_copy: float = math.nan
    operations: float = 0.0
    bytes: float = 0.0
    rounds: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    wrong: str = ""

    def surely_slower(self, tolerance: float) -> bool:
        """Whether eager torch is faster by more than the tolerance, with all of the interval."""
        if EAGER not in self.ratio:
            return False
        return self.ratio_interval[EAGER][1] < 1 / (1 + tolerance)


def admitted(
    contestants: Mapping[str, T],
    check: Callable[[str, T], None],
    *,
    ours: Collection[str] = (OURS,),
    may_break: Collection[str] = (COMPILE,),
) -> tuple[dict[str, T], dict[str, str]]:
    """Contestants that passed the gate, and why the others did not.

    ``check`` takes a name and a contestant, and raises NotTheJob, here too if the contestant is one
    of ours; those that ``may_break`` may raise anything.
    """
    passed, left_out = {}, {}
    for who, contestant in contestants.items():
        try:
            check(who, contestant)
        except NotTheJob as error:
            if who in ours:
                raise NotTheJob(f"{who}: {error}" if len(ours) > 1 else str(error)) from error
            left_out[who] = str(error)
        except Exception as error:
            if who not in may_break:
                raise
            left_out[who] = f"{type(error).__name__}: {error}".split("\n")[0]
        else:
            passed[who] = contestant
    return passed, left_out


def measure(entry: Entry, device: str, effort: Effort = NORMAL) -> Result:
    """Gates and times one row."""
    match = entry.make()
    others = match.calls.keys() - {OURS, EAGER}
    try:
        calls, left_out = admitted(match.calls, lambda who, _: match.gate(who), may_break=others)
    except NotTheJob as error:
        return Result(entry, wrong=str(error))
    source = match.source
    copies = copies_of(source, in_place=match.in_place)
    operations = count_operations(calls[EAGER]) if EAGER in calls else 0.0
    samples = interleave({**calls, **copies}, CLOCKS[device], effort, match.prepare)
    return Result(
        entry,
        **numbers(samples, match.bytes, 2 * source.nbytes),
        interval=median_interval(samples[OURS]),
        operations=operations,
        left_out=left_out,
    )


def numbers(
    samples: Mapping[str, Sequence[float]], moved: float = 0.0, copied: float = 0.0
) -> dict[str, Any]:
    """Medians, ratios and, where a call moves bytes, bandwidths beside those of the copies, which
    move ``copied``, read and written."""
    ns = {who: statistics.median(values) for who, values in samples.items()}
    rivals = ns.keys() - {OURS, COPY, FRESH_COPY}
    result = {"rounds": len(samples[OURS]), "ns": ns, **compare(samples, rivals)}
    if moved:
        copies = [who for who in (FRESH_COPY, COPY) if who in ns]
        speed = {who: (copied if who in copies else moved) / time for who, time in ns.items()}
        shares = [100 * speed[OURS] / speed[who] for who in copies]
        result |= {"bytes": moved, "gb_per_s": speed, "percent_of_copy": shares[0]}
        if len(shares) > 1:
            result["percent_of_preallocated_copy"] = shares[1]
    return result


# --- the roofs ---


class _OperationCounter(TorchDispatchMode):
    """Counts flops where torch has a formula, of other operators the elements that they write.

    Views and copies do not count. An operator without a result (an optimizer's) is counted by its
    first argument. ``FlopCounterMode`` cannot be used: its hooks refuse ``torch.autograd.grad``.
    """

    NOT_ARITHMETIC = ("empty", "copy", "clone", "zero", "fill", "detach", "ones", "new_", "like")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        results = func(*args, **options)
        name = func.__name__.lower()
        formula = flop_registry.get(func.overloadpacket)
        if func.overloadpacket is torch.ops.aten.convolution_backward:
            self.count += _of_convolution_backward(*args)
        elif formula is not None:
            self.count += formula(*args, **options, out_val=results)
        elif not func.is_view and not any(word in name for word in self.NOT_ARITHMETIC):
            first = args[0] if args else None
            self.count += _largest(results if results is not None else first)
        return results


def _of_convolution_backward(gradient: Tensor, input: Tensor, weight: Tensor, *options: Any) -> int:
    """As many as forward for each gradient of the two. torch's formula leaves groups out."""
    *_, transposed, _, _, mask = options
    positions = input if transposed else gradient
    return 2 * positions.numel() * weight[0].numel() * sum(mask[:2])


def _largest(tensors: Any) -> int:
    """Elements of a tensor; of a list; of several results the largest's (the others are sums)."""
    if isinstance(tensors, Tensor):
        return tensors.numel()
    if isinstance(tensors, list):
        return sum(map(_largest, tensors))
    return max(map(_largest, tensors), default=0) if isinstance(tensors, tuple) else 0


def count_operations(eager: Call) -> float:
    """Arithmetic of a call as eager torch does it: a multiplication and an addition for each pair
    in convolutions and matrix products, one for each element that another operator writes."""
    with _OperationCounter() as counter:
        eager()
    return float(counter.count)


def peak_operations(options: Options, effort: Effort) -> float:
    """Operations per second of a large matrix product."""
    side = 256 if options.quick else {"cpu": 1024, "cuda": 8192}[options.device]
    a, b = options.random(side, side), options.random(side, side, seed=1)
    samples = interleave({"matmul": lambda: a @ b}, CLOCKS[options.device], effort)
    return 2 * side**3 / (statistics.median(samples["matmul"]) * 1e-9)
