"""Batch norm with what follows: fusedtrain's layer, eager torch's, that compiled, the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._text import shape_text
from ...nn import BatchNormAct2d, BatchNormAddAct, GroupNormAct
from . import clock
from ._match import COMPILE, LAYOUTS, Contest, Entry, Options, match_of
from .clock import Call
from .gate import NotTheJob, Tolerance, agrees, same_kind

PASSES = ("forward", "forward+backward")
Layer = Callable[..., Tensor]  # of the input and the residual, if there is one
Makers = Mapping[str, Callable[["NormOp", int, str], "Contestant"]]


@dataclass(frozen=True)
class NormOp:
    """Batch norm, or group norm, and what follows it."""

    act: str = ""  # class in torch.nn
    add: bool = False  # of a residual, before the activation
    frozen: bool = False  # eval mode, parameters without gradient
    groups: int = 0  # at most, of a group norm; 0: a batch norm

    def norm(self, channels: int) -> Any:
        """The norm in torch."""
        groups = min(self.groups, channels)
        return nn.GroupNorm(groups, channels) if groups else nn.BatchNorm2d(channels)

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
    "gn_silu": NormOp("SiLU", groups=32),
}


def _prepared(norm: Any, op: NormOp, device: str) -> Any:
    """Parameters and statistics that no shortcut is right for; the same for all."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("weight", "bias", "running_mean", "running_var"):
            tensor = getattr(norm, name, None)
            if tensor is not None:
                around = 1.0 if name in ("weight", "running_var") else 0.0
                tensor.copy_(around + 0.2 * torch.rand(tensor.shape, generator=generator) - 0.1)
    if op.frozen:
        norm.eval().requires_grad_(False)
    return norm.to(device)


class Contestant:
    """A layer: the function to call, and the batch norm in it."""

    def __init__(self, norm: Any, function: Layer) -> None:
        self.norm, self.function = norm, function

    def leaves(self, x: Tensor, residual: Tensor | None) -> list[Tensor]:
        """Tensors whose gradients backward computes."""
        parameters = [p for p in (self.norm.weight, self.norm.bias) if p.requires_grad]
        return [x, *([] if residual is None else [residual]), *parameters]


def ours(op: NormOp, channels: int, device: str) -> Contestant:
    """fusedtrain's layer."""
    options: dict[str, Any] = {"apply_act": bool(op.act)}
    if op.act:
        options["act_layer"] = getattr(nn, op.act)
    if op.groups:
        norm: Any = GroupNormAct(channels, min(op.groups, channels), **options)
    elif op.add:
        norm = BatchNormAddAct(channels, **options)
    else:
        norm = BatchNormAct2d(channels, **options)
    norm = _prepared(norm, op, device)
    return Contestant(norm, norm)


def eager(op: NormOp, channels: int, device: str) -> Contestant:
    """The usual code of networks: the norm, the addition and the activation in place."""
    norm = _prepared(op.norm(channels), op, device)
    act = getattr(nn, op.act)(inplace=True) if op.act else nn.Identity()

    def function(x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = norm(x)
        if residual is not None:
            out += residual
        result: Tensor = act(out)
        return result

    return Contestant(norm, function)


def compiled(op: NormOp, channels: int, device: str) -> Contestant:
    """torch.compile of that; it compiles at its first call."""
    stock = eager(op, channels, device)
    return Contestant(stock.norm, clock.compiled(stock.function))


CONTESTANTS: Makers = {"fusedtrain": ours, "eager": eager, "compile": compiled}


# --- the gate ---

# Rounding to the dtype, of each step where it is eager torch's: of every element relative to its
# magnitude and the root mean square of the tensor, and of the whole tensor.
EACH = {torch.float32: 1e-4, torch.bfloat16: 2**-5, torch.float16: 2**-8}
WHOLE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Nearer to zero than this, rounding can decide which side of a ReLU a number is on.
MARGIN = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}
CALLS = 3  # of the gate: a module may take another way from its second call on


@dataclass(frozen=True)
class Exact:
    """A case in float64: all that a contestant's first call is compared with."""

    gradient: Tensor  # of the output; zero where rounding could decide
    output: Tensor
    gradients: Sequence[Tensor]
    statistics: Sequence[Tensor]  # running mean and variance, after the calls


def exact(op: NormOp, x: Tensor, residual: Tensor | None, gradient: Tensor) -> Exact:
    """Eager torch in float64."""
    norm = _prepared(op.norm(x.shape[1]), op, str(x.device)).double()
    leaf = x.double().requires_grad_()
    added = None if residual is None else residual.double().requires_grad_()
    for _ in range(CALLS):
        z = norm(leaf) if added is None else norm(leaf) + added
    masked = torch.where(z.detach().abs() > MARGIN[x.dtype], gradient, 0)
    output = getattr(nn, op.act)()(z) if op.act else z
    leaves = Contestant(norm, norm).leaves(leaf, added)
    gradients = torch.autograd.grad(output, leaves, masked.double())
    return Exact(masked, output.detach(), gradients, list(norm.buffers())[:2])


def check(contestant: Contestant, truth: Exact, x: Tensor, residual: Tensor | None) -> None:
    """Raise NotTheJob unless the contestant's calls, forward and backward, are right."""
    leaf = x.detach().requires_grad_()
    added = None if residual is None else residual.detach().requires_grad_()
    names = ["input", *([] if residual is None else ["residual"]), "weight", "bias"]
    for _ in range(CALLS):
        output = contestant.function(*((leaf,) if added is None else (leaf, added)))
        same_kind(output, x)
        if not output.requires_grad:
            raise NotTheJob("the output does not require a gradient")
        gradients = torch.autograd.grad(
            output, contestant.leaves(leaf, added), truth.gradient, allow_unused=True
        )
        _close("output", output, truth.output, x.dtype)
        for name, actual, expected in zip(names, gradients, truth.gradients):
            _close(f"gradient of {name}", actual, expected, x.dtype)
    norm = contestant.norm
    for name, expected in zip(("running_mean", "running_var"), truth.statistics):
        _close(name, getattr(norm, name), expected, torch.float32)


def _close(what: str, actual: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    magnitude = expected.detach().square().mean().sqrt()
    allowed = Tolerance(EACH[dtype], EACH[dtype] * magnitude, WHOLE[dtype])
    agrees(what, actual, expected, allowed)


# --- the command `bench` ---

STANDARD = ("bn_relu", "bn_silu", "bn_add_relu", "frozen_bn_relu")
GATE_BATCH = 8  # images that the gate looks at; where torch.compile takes part, all


def entries(options: Options) -> Iterator[Entry]:
    """The rows of the family: a batch norm of 96 channels."""
    pixels = 14 if options.quick else 56
    image = 96 * pixels**2
    batch = max(1, options.elements(16 * image, 256 * image, 2 * image) // image)
    shape = (batch, 96, pixels, pixels)
    for op in STANDARD[1:2] if options.quick else STANDARD:
        for layout in LAYOUTS:
            for part in PASSES[options.quick :]:
                make = partial(match_of, part, contest, options, op, shape, layout)
                yield Entry("norm", op, part, shape_text(shape), make, layout)


def contest(
    options: Options,
    name: str,
    shape: tuple[int, ...],
    layout: str,
    makers: Makers = CONTESTANTS,
    *,
    trains: bool = False,
) -> Contest:
    """The layer on an input of this shape; see `call_of` for `trains`."""
    op, device = OPS[name], options.device
    x, residual, gradient = (options.random(*shape, seed=n, layout=layout) for n in range(3))
    x = 0.5 + 2 * x
    added = residual if op.add else None
    entrants = {
        who: make(op, shape[1], device)
        for who, make in makers.items()
        if who != COMPILE or options.compiled
    }

    @lru_cache(maxsize=1)
    def truth(batch: int) -> Exact:
        return exact(op, x[:batch], None if added is None else added[:batch], gradient[:batch])

    def gate(who: str, contestant: Contestant) -> None:
        batch = shape[0] if options.compiled else GATE_BATCH  # it compiles for one size
        few = None if added is None else added[:batch]
        check(contestant, truth(batch), x[:batch], few)

    def call(contestant: Contestant, part: str) -> Call:
        function = contestant.function
        inputs = [x] if added is None else [x, added]
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        if part == "forward":
            arguments = leaves if trains else inputs
            return lambda: function(*arguments)
        trained = contestant.leaves(leaves[0], leaves[1] if op.add else None)
        return lambda: torch.autograd.grad(function(*leaves), trained, gradient)

    return Contest(entrants, gate, call, lambda part: op.tensors(part) * x.nbytes, x)
