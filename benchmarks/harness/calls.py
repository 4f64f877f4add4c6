"""Calls on tensors of 64 numbers, where the host's work is all the time: contestants, and the gate.

A contestant is made anew for each row. The gate runs several calls of one contestant, because a
module may take another way from its second call on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from fusedtrain.advisor.bench.clock import Function
from fusedtrain.advisor.bench.gate import FORWARD, GRADIENT, NotTheJob, Tolerance, agrees
from fusedtrain.advisor.bench.norms import OPS, Contestant as Layer, eager, ours

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


def _layer(make: Callable[..., Layer], name: str) -> Maker:
    """The layers of ``advisor/bench/norms.py``; ours is called without a wrapper."""

    def layer(device: str, dtype: torch.dtype) -> Contestant:
        made = make(OPS[name], CHANNELS, device)
        norm = made.norm.to(dtype)
        function = norm if make is ours else made.function
        return Contestant(function, (norm.weight, norm.bias), (norm.running_mean, norm.running_var))

    return layer


def _norm(name: str) -> Call:
    inputs = (SHAPE,) if OPS[name].add else ()
    return Call(_layer(ours, name), _layer(eager, name), inputs)


def _norm_function(name: str) -> Call:
    op, act = OPS[name], OPS[name].act.lower()

    def tensors(device: str, dtype: torch.dtype) -> list[Tensor]:
        """Weight, bias, running mean and variance."""
        layer = _layer(eager, name)(device, dtype)
        return [*layer.trained, *layer.state]

    def fused(device: str, dtype: torch.dtype) -> Contestant:
        weight, bias, mean, var = tensors(device, dtype)

        def function(x: Tensor, residual: Tensor | None = None) -> Tensor:
            return F.batch_norm_act(
                x, mean, var, weight, bias, True, activation=act, residual=residual
            )

        return Contestant(function, (weight, bias), (mean, var))

    def composed(device: str, dtype: torch.dtype) -> Contestant:
        weight, bias, mean, var = tensors(device, dtype)
        activation = getattr(T, act)

        def function(x: Tensor, residual: Tensor | None = None) -> Tensor:
            out = T.batch_norm(x, mean, var, weight, bias, True)
            if residual is not None:
                out += residual
            result: Tensor = activation(out, inplace=True)
            return result

        return Contestant(function, (weight, bias), (mean, var))

    return Call(fused, composed, (SHAPE,) if op.add else ())


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    return T.gelu(x + bias.view(1, -1, 1, 1))


def _activation(name: str) -> Call:
    ours, eager = _of_function(getattr(F, name)), _of_function(getattr(T, name))
    return Call(ours, eager, at_most=(1.0, 1.35))


CALLS: dict[str, Call] = {
    **{name: _norm(name) for name in ("bn_relu", "bn_silu", "bn_add_relu")},
    **{
        f"batch_norm_act {name}": _norm_function(f"bn_{name.replace(' ', '_')}")
        for name in ("relu", "silu", "add relu")
    },
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
