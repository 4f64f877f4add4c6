"""Calls on tensors of 64 numbers, where the host's work is all the time: contestants, and the gate.

A contestant is made anew for each row. The gate runs several calls of one contestant, because a
module may take another way from its second call on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain.functional as F
from fusedtrain.advisor.bench.clock import Function
from fusedtrain.advisor.bench.gate import FORWARD, GRADIENT, NotTheJob, Tolerance, agrees
from fusedtrain.nn import BatchNormAct2d, BatchNormAddAct

CHANNELS = 16
SHAPE = (1, CHANNELS, 2, 2)
P = 0.1  # of dropout
NO_GRADIENTS, FORWARD_PASS, BOTH = "no gradients", "forward", "forward+backward"
PASSES = (NO_GRADIENTS, FORWARD_PASS, BOTH)
GATE_CALLS = 3


@dataclass
class Contestant:
    """A call.

    Args:
        function: of the inputs.
        trained: parameters, of which backward computes gradients.
        state: what the call modifies.
    """

    function: Function
    trained: Sequence[Tensor] = ()
    state: Sequence[Tensor] = ()


Maker = Callable[[str, torch.dtype], Contestant]


@dataclass(frozen=True)
class Call:
    """A fused call and the calls that it replaces.

    Args:
        ours, eager: make the contestants on a device, for a dtype.
        inputs: shapes of the tensors behind the first.
        at_most: fusedtrain's time over eager's, forward, and forward and backward.
        drops: whether elements are dropped at random.
    """

    ours: Maker
    eager: Maker
    inputs: tuple[tuple[int, ...], ...] = ()
    at_most: tuple[float, float] = (1.0, 1.0)
    drops: bool = False

    def target(self, pass_name: str) -> float:
        return self.at_most[pass_name == BOTH]


def _of_function(function: Function) -> Maker:
    return lambda device, dtype: Contestant(function)


def _vectors(device: str, dtype: torch.dtype) -> list[Tensor]:
    """Weight, bias, running mean and variance: the same for all contestants."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.rand(CHANNELS, generator=generator) + start for start in (0.5, -0.5, 0.0, 0.5)]
    weight, bias, *running = (vector.to(device, dtype) for vector in made)
    return [weight.requires_grad_(), bias.requires_grad_(), *running]


def _of_norm(norm: Any, function: Function, device: str, dtype: torch.dtype) -> Contestant:
    norm.to(device, dtype)
    values = _vectors(device, dtype)
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
    return Contestant(function, tensors[:2], tensors[2:])


def _our_module(act: str, add: bool) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Contestant:
        norm = (BatchNormAddAct if add else BatchNormAct2d)(CHANNELS, act_layer=getattr(nn, act))
        return _of_norm(norm, norm, device, dtype)

    return make


def _their_modules(act: str) -> Maker:
    """The ops of networks: the norm, the addition and the activation in place."""

    def make(device: str, dtype: torch.dtype) -> Contestant:
        norm, activation = nn.BatchNorm2d(CHANNELS), getattr(nn, act)(inplace=True)

        def function(x: Tensor, residual: Tensor | None = None) -> Tensor:
            out = norm(x)
            if residual is not None:
                out += residual
            result: Tensor = activation(out)
            return result

        return _of_norm(norm, function, device, dtype)

    return make


def _our_function(act: str) -> Maker:
    def make(device: str, dtype: torch.dtype) -> Contestant:
        weight, bias, mean, var = _vectors(device, dtype)

        def function(x: Tensor, residual: Tensor | None = None) -> Tensor:
            return F.batch_norm_act(
                x, mean, var, weight, bias, True, activation=act, residual=residual
            )

        return Contestant(function, (weight, bias), (mean, var))

    return make


def _their_functions(act: str) -> Maker:
    activation = getattr(T, act)

    def make(device: str, dtype: torch.dtype) -> Contestant:
        weight, bias, mean, var = _vectors(device, dtype)

        def function(x: Tensor, residual: Tensor | None = None) -> Tensor:
            out = T.batch_norm(x, mean, var, weight, bias, True)
            if residual is not None:
                out += residual
            result: Tensor = activation(out, inplace=True)
            return result

        return Contestant(function, (weight, bias), (mean, var))

    return make


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    return T.gelu(x + bias.view(1, -1, 1, 1))


def _activation(name: str) -> Call:
    ours, eager = _of_function(getattr(F, name)), _of_function(getattr(T, name))
    return Call(ours, eager, at_most=(1.0, 1.35))


CALLS: dict[str, Call] = {
    "bn_relu": Call(_our_module("ReLU", add=False), _their_modules("ReLU")),
    "bn_silu": Call(_our_module("SiLU", add=False), _their_modules("SiLU")),
    "bn_add_relu": Call(_our_module("ReLU", add=True), _their_modules("ReLU"), (SHAPE,)),
    "batch_norm_act relu": Call(_our_function("relu"), _their_functions("relu")),
    "batch_norm_act silu": Call(_our_function("silu"), _their_functions("silu")),
    "batch_norm_act add relu": Call(_our_function("relu"), _their_functions("relu"), (SHAPE,)),
    **{name: _activation(name) for name in ("silu", "gelu", "mish", "hardswish", "leaky_relu")},
    "glu": Call(_of_function(partial(F.glu, dim=1)), _of_function(partial(T.glu, dim=1))),
    "gate": Call(
        _of_function(lambda x, gate: F.gated(x, gate, "sigmoid")),
        _of_function(lambda x, gate: x * gate.sigmoid()),
        ((1, CHANNELS, 1, 1),),
    ),
    "bias_gelu_dropout": Call(
        _of_function(lambda x, bias: F.bias_act_dropout(x, bias, "gelu", P, dim=1)),
        _of_function(lambda x, bias: T.dropout(_biased(x, bias), P)),
        ((CHANNELS,),),
        drops=True,
    ),
}


def inputs(
    call: Call, layout: torch.memory_format, device: str, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """The inputs of a call, which require gradients, and the gradient of its output."""
    generator = torch.Generator().manual_seed(0)

    def made(shape: Sequence[int]) -> Tensor:
        tensor = torch.randn(shape, generator=generator).to(device, dtype)
        return tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor

    leaves = [made(shape).requires_grad_() for shape in (SHAPE, *call.inputs)]
    return leaves, made(call.eager(device, dtype).function(*leaves).shape)


def timed(
    contestant: Contestant, pass_name: str, leaves: Sequence[Tensor], gradient: Tensor
) -> Callable[[], object]:
    """The timed call of a pass. The caller turns gradients off for the first of ``PASSES``."""
    function = contestant.function
    if pass_name != BOTH:
        return lambda: function(*leaves)
    of = [*leaves, *contestant.trained]
    return lambda: torch.autograd.grad(function(*leaves), of, gradient)


# --- the gate ---


def results(
    contestant: Contestant, leaves: Sequence[Tensor], gradient: Tensor, *, last: bool
) -> list[Tensor]:
    """Output, gradients and state after the first or the last of ``GATE_CALLS`` calls."""
    for _ in range(GATE_CALLS if last else 1):
        with torch.no_grad():
            plain = contestant.function(*leaves)
        output = contestant.function(*leaves)
        of = [*leaves, *contestant.trained]
        gradients = torch.autograd.grad(output, of, gradient)
    _same_kind(output, gradient)
    if plain.requires_grad or not output.requires_grad:
        raise NotTheJob("the output requires a gradient where it must not, or not where it must")
    return [plain, output.detach(), *gradients, *contestant.state]


def _same_kind(output: Tensor, like: Tensor) -> None:
    """Raise NotTheJob unless dtype and layout are equal; strides of dimensions of size 1 say
    nothing."""
    kind, wanted = (
        (t.dtype, [stride for stride, size in zip(t.stride(), t.shape) if size > 1])
        for t in (output, like)
    )
    if kind != wanted:
        raise NotTheJob(f"returned {kind[0]} with strides {kind[1]}")


def check(call: Call, maker: Maker, layout: torch.memory_format, device: str) -> None:
    """Raise NotTheJob unless the contestant's numbers are those of eager torch in float64."""
    leaves, gradient = inputs(call, layout, device)
    if call.drops:
        _check_dropping(maker(device, torch.float32), leaves, gradient)
        return
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    for last in (False, True):
        one = maker(device, torch.float32)
        actual = results(one, leaves, gradient, last=last)
        exact = results(call.eager(device, torch.float64), wide, gradient.double(), last=last)
        _compare(actual, exact, len(leaves) + len(one.trained))


def _compare(actual: Sequence[Tensor], exact: Sequence[Tensor], gradients: int) -> None:
    names = ["output without gradients", "output", *["gradient"] * gradients]
    names += ["running statistics"] * (len(exact) - len(names))
    for name, of, expected in zip(names, actual, exact, strict=True):
        rtol, atol, _ = (GRADIENT if name == "gradient" else FORWARD)[torch.float32]
        size = float(expected.detach().abs().amax())
        agrees(name, of, expected, Tolerance(10 * rtol, 10 * (atol + rtol * size)))


def _check_dropping(one: Contestant, leaves: Sequence[Tensor], gradient: Tensor) -> None:
    """Checks many calls: the share that is dropped, the values of all others, and one mask for
    forward and backward."""
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    value = _biased(*exact)
    dropped = 0.0
    for _ in range(200):
        output, *gradients = results(one, leaves, gradient, last=False)[1:]
        mask = (output != 0).double() / (1 - P)
        dropped += float((output == 0).double().mean()) / 200
        truth = torch.autograd.grad(value * mask, exact, gradient.double(), retain_graph=True)
        _compare([output, output, *gradients], [value * mask, value * mask, *truth], len(truth))
    if abs(dropped - P) > 0.02:  # 12,800 elements: 7 standard deviations
        raise NotTheJob(f"drops {dropped:.3f} of the elements, not {P}")
