"""Batch norm with what follows it against eager torch and torch.compile of that.

The standard shapes, in every layout and dtype; and every distinct batch norm of real networks
(``shapes.py``) against eager. Rivals take turns within one test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain
from benchmarks.harness import ops, shapes
from benchmarks.harness.cases import LAYOUTS, Options, dtype_name
from benchmarks.harness.clock import Call
from benchmarks.harness.guards import (
    NotTheJob,
    Tolerance,
    admit,
    agrees,
    refuse_the_reference,
    same_kind,
)
from benchmarks.harness.race import Race

FAMILY = "batch_norm"
REPORT = ops.report(FAMILY)
Shape = tuple[int, ...]
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cpu": ((16, 96, 56, 56), (32, 96, 56, 56)),
    "cuda": ((32, 96, 56, 56), (256, 96, 56, 56)),  # the smaller fits into the L2 cache
}
QUICK_SHAPE = (2, 16, 14, 14)
# In which a device trains. The second only at the last shape; torch.compile, which takes 5 s and
# more a row on the CPU, there in the first, forward+backward. --full has all with all.
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STANDARD = ("bn_relu", "bn_silu", "bn_add_relu", "frozen_bn_relu")
LAYER_BATCHES = (8, 32)
GATE_BATCH = 8  # a row with torch.compile has its whole batch checked: it compiles for one size
PASSES = ("forward", "forward+backward")
Layer = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class NormOp:
    """Batch norm and what follows it."""

    act: str = ""  # class in torch.nn
    add: bool = False  # of a residual, before the activation
    frozen: bool = False  # eval mode, parameters without gradient

    def tensors(self, pass_name: str) -> int:
        """Tensors of the input's size that must be read and written, whoever does it.

        Forward reads the input for the statistics, and again to normalise it, and writes the
        output: 3; a residual is read: 4. Backward reads gradient and input for the sums over a
        channel, and both again, and writes the gradient of the input: 5. With residual and
        activation it reads what the activation is differentiated by and writes the residual's
        gradient, from which the second sweep can start: 7; without activation that is the gradient
        which came, 5. Frozen: 2, and gradient, output or input, gradient of the input: 3.
        """
        forward, backward = (2, 3) if self.frozen else (3, 5)
        if self.add:
            forward += 1
            backward += 2 if self.act else 0
        return forward if pass_name == "forward" else forward + backward


OPS = {
    "bn_relu": NormOp("ReLU"),
    "bn_silu": NormOp("SiLU"),
    "bn_add_relu": NormOp("ReLU", add=True),
    "frozen_bn_relu": NormOp("ReLU", frozen=True),
    "bn": NormOp(),
    "bn_add": NormOp(add=True),
}


def _prepared(norm: Any, op: NormOp, device: str) -> Any:
    """Parameters and statistics that no shortcut is right for; the same for all."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor, around in (
            (norm.weight, 1.0),
            (norm.bias, 0.0),
            (norm.running_mean, 0.0),
            (norm.running_var, 1.0),
        ):
            tensor.copy_(around + 0.2 * torch.rand(tensor.shape, generator=generator) - 0.1)
    if op.frozen:
        norm.eval().requires_grad_(False)
    return norm.to(device)


class Contestant:
    """A layer: the function to call, and the batch norm in it."""

    def __init__(self, norm: Any, function: Layer) -> None:
        self.norm, self.function = norm, function

    def leaves(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """What backward computes gradients of."""
        parameters = [p for p in (self.norm.weight, self.norm.bias) if p.requires_grad]
        return [x, *([] if residual is None else [residual]), *parameters]


def ours(op: NormOp, channels: int, device: str) -> Contestant:
    """fusedtrain's layer."""
    options: dict[str, Any] = {"apply_act": bool(op.act)}
    if op.act:
        options["act_layer"] = getattr(nn, op.act)
    if op.add:
        norm: Any = fusedtrain.nn.BatchNormAddAct(channels, **options)
    else:
        norm = fusedtrain.nn.BatchNormAct2d(channels, **options)
    norm = _prepared(norm, op, device)
    if op.add:
        return Contestant(norm, norm)
    return Contestant(norm, lambda x, residual: norm(x))


def eager(op: NormOp, channels: int, device: str) -> Contestant:
    """What networks have: the norm, the addition and the activation in place."""
    norm = _prepared(nn.BatchNorm2d(channels), op, device)
    act = getattr(nn, op.act)(inplace=True) if op.act else nn.Identity()

    def function(x: Tensor, residual: Tensor | None) -> Tensor:
        out = norm(x)
        if residual is not None:
            out += residual
        result: Tensor = act(out)
        return result

    return Contestant(norm, function)


def compiled(op: NormOp, channels: int, device: str) -> Contestant:
    """torch.compile of that; it compiles at its first call."""
    # Dynamo keeps at most 8 variants of one function; rows must not meet that limit.
    torch.compiler.reset()
    stock = eager(op, channels, device)
    return Contestant(stock.norm, torch.compile(stock.function, fullgraph=True, dynamic=False))


CONTESTANTS = {"fusedtrain": ours, "eager": eager, "compile": compiled}


# --- the gate ---

# Rounding to the dtype, of each step where it is eager torch's: of every element relative to its
# magnitude and the root mean square of the tensor, and of the whole tensor.
EACH = {torch.float32: 1e-4, torch.bfloat16: 2**-5, torch.float16: 2**-8}
WHOLE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Nearer to zero than this, rounding can decide which side of a ReLU a number is on.
MARGIN = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}


@dataclass(frozen=True)
class Exact:
    """A case in float64: all that a contestant's first call is compared with."""

    gradient: Tensor  # of the output; zero where rounding could decide
    output: Tensor
    gradients: Sequence[Tensor]
    statistics: Sequence[Tensor]  # running mean and variance, after the call


def exact(op: NormOp, x: Tensor, residual: Tensor | None, gradient: Tensor) -> Exact:
    """Eager torch in float64."""
    norm = _prepared(nn.BatchNorm2d(x.shape[1]), op, str(x.device)).double()
    leaf = x.double().requires_grad_()
    added = None if residual is None else residual.double().requires_grad_()
    z = norm(leaf) if added is None else norm(leaf) + added
    masked = torch.where(z.detach().abs() > MARGIN[x.dtype], gradient, 0)
    output = getattr(nn, op.act)()(z) if op.act else z
    leaves = Contestant(norm, norm).leaves(leaf, added)
    gradients = torch.autograd.grad(output, leaves, masked.double())
    return Exact(masked, output.detach(), gradients, (norm.running_mean, norm.running_var))


def check(contestant: Contestant, truth: Exact, x: Tensor, residual: Tensor | None) -> None:
    """Raise NotTheJob unless the contestant's first call, forward and backward, is right."""
    leaf = x.detach().requires_grad_()
    added = None if residual is None else residual.detach().requires_grad_()
    output = contestant.function(leaf, added)
    same_kind(output, x)
    if not output.requires_grad:
        raise NotTheJob("the output does not require a gradient")
    gradients = torch.autograd.grad(
        output, contestant.leaves(leaf, added), truth.gradient, allow_unused=True
    )
    names = ["input", *([] if residual is None else ["residual"]), "weight", "bias"]
    _close("output", output, truth.output, x.dtype)
    for name, actual, expected in zip(names, gradients, truth.gradients):
        _close(f"gradient of {name}", actual, expected, x.dtype)
    norm = contestant.norm
    for name, expected in zip(("running_mean", "running_var"), truth.statistics, strict=True):
        _close(name, getattr(norm, name), expected, torch.float32)


def _close(what: str, actual: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    magnitude = expected.detach().square().mean().sqrt()
    allowed = Tolerance(EACH[dtype], EACH[dtype] * magnitude, WHOLE[dtype])
    agrees(what, actual, expected, allowed)


@dataclass(frozen=True)
class Case:
    """One row: its rivals share the tensors and the measurement loop."""

    op: str
    shape: Shape
    dtype: torch.dtype
    layout: str
    pass_name: str
    model: str = ""  # the network that has this layer
    compiled: bool = False

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        parts = (self.model, self.op, self.pass_name, dtype_name(self.dtype), self.layout, size)
        return "-".join(filter(None, parts))


def select(options: Options) -> list[Case]:
    """The cases of a run, those that share tensors together."""
    cases: list[Case] = []
    if options.quick and not options.models:
        cases = [
            Case(op, QUICK_SHAPE, torch.float32, layout, PASSES[1])
            for layout in LAYOUTS
            for op in options.ops or ("bn_silu", "bn_add_relu")
            if op in STANDARD
        ]
    elif not options.models:
        cases = _standard(options)
    if not options.quick or options.models:
        cases += _of_networks(options)
    if options.quick and options.models:
        cases = cases[:2]
    return [case for case in cases if not options.ops or case.op in options.ops]


def _standard(options: Options) -> list[Case]:
    first, *others = DTYPES[options.device]
    last = SHAPES[options.device][-1]
    cases = []
    for shape in SHAPES[options.device]:
        for dtype in ALL_DTYPES if options.full else (first, *others):
            if not options.full and dtype != first and shape != last:
                continue
            for layout in LAYOUTS:
                for op in STANDARD:
                    for pass_name in PASSES:
                        trains = pass_name == PASSES[1] and not OPS[op].frozen
                        rival = options.full or (trains and dtype == first and shape == last)
                        compiled = options.compiled and rival
                        cases.append(Case(op, shape, dtype, layout, pass_name, compiled=compiled))
    return cases


def _of_networks(options: Options) -> list[Case]:
    return [
        Case(
            layer.op, (batch, *layer[1:]), torch.float32, layout, pass_name, network,
            options.compiled and options.full,
        )
        for network in shapes.NORM_NETWORKS
        if not options.models or network in options.models
        for layer in shapes.distinct_norms(network)
        for batch in LAYER_BATCHES
        for layout in LAYOUTS
        for pass_name in (PASSES if options.full else PASSES[1:])
    ]  # fmt: skip


@lru_cache(maxsize=1)
def _tensors(shape: Shape, dtype: torch.dtype, layout: str, device: str) -> tuple[Tensor, ...]:
    """Input, residual, gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(shape, generator=generator) for _ in range(3))
    kind = LAYOUTS[layout]
    x, residual, gradient = (t.to(device, dtype).contiguous(memory_format=kind) for t in numbers)
    return 0.5 + 2 * x, residual, gradient


@lru_cache(maxsize=1)
def _exact(
    op: NormOp, shape: Shape, dtype: torch.dtype, layout: str, device: str, batch: int
) -> Exact:
    x, residual, gradient = (t[:batch] for t in _tensors(shape, dtype, layout, device))
    return exact(op, x, residual if op.add else None, gradient)


def _entrants(case: Case, device: str) -> dict[str, Contestant]:
    """Those that passed the gate."""
    op = OPS[case.op]
    key = (case.shape, case.dtype, case.layout, device)
    batch = case.shape[0] if case.compiled else GATE_BATCH
    x, residual, _ = (t[:batch] for t in _tensors(*key))
    contestants = {
        who: make(op, case.shape[1], device)
        for who, make in CONTESTANTS.items()
        if who != "compile" or case.compiled
    }

    def gate(who: str, contestant: Contestant) -> None:
        check(contestant, _exact(op, *key, batch), x, residual if op.add else None)

    return admit(contestants, gate, f"{case} on {device}")


def _call(contestant: Contestant, case: Case, tensors: tuple[Tensor, ...]) -> Call:
    x, residual, gradient = tensors
    function = contestant.function
    added = residual if OPS[case.op].add else None
    if case.pass_name == "forward":
        return lambda: function(x, added)
    x = x.detach().requires_grad_()
    added = None if added is None else added.detach().requires_grad_()
    leaves = contestant.leaves(x, added)
    return lambda: torch.autograd.grad(function(x, added), leaves, gradient)


def test_batch_norm(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("batch_norm_act", race.device)
    entrants = _entrants(case, race.device)
    if race.is_off():
        return
    tensors = _tensors(case.shape, case.dtype, case.layout, race.device)
    race.tensors(
        {who: _call(contestant, case, tensors) for who, contestant in entrants.items()},
        tensors[0],
        family=FAMILY,
        op=case.op,
        pass_name=case.pass_name,
        tensors=OPS[case.op].tensors(case.pass_name),
        shape=list(case.shape),
        layout=case.layout,
        model=case.model,
    )
