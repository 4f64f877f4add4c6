"""Gated products in plain torch, ``y = f(gate) value``: the GLU family (arXiv:1612.08083,
arXiv:2002.05202). 16-bit math is in float32, rounded once."""

from __future__ import annotations

from torch import Tensor

from .dtypes import in_strides_of, widened
from .pointwise import Pointwise
from .scale_add import scale_add, scale_add_backward


def gated(gate: Tensor, value: Tensor, activation: int, a: float, b: float) -> Tensor:
    opened = Pointwise(activation, a, b).forward(widened(gate))
    return in_strides_of(opened * widened(value), value)


def gated_gradients(
    grad: Tensor, gate: Tensor, value: Tensor, activation: int, a: float, b: float
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and value."""
    f, g = Pointwise(activation, a, b), widened(grad)
    opened = f.forward(widened(gate))
    saved = opened if f.saves_output else widened(gate)
    grad_gate = f.backward(g * widened(value), saved)
    return grad_gate.to(gate.dtype), (g * opened).to(value.dtype)


def gated_backward(
    grad: Tensor, gate: Tensor, value: Tensor, grad_gate: Tensor, grad_value: Tensor,
    activation: int, a: float, b: float,
) -> None:  # fmt: skip
    for out, gradient in zip(
        (grad_gate, grad_value), gated_gradients(grad, gate, value, activation, a, b), strict=True
    ):
        out.copy_(gradient)


def _opened(gate: Tensor, f: Pointwise) -> Tensor:
    """The activation of a gate of [N, C, 1, ...], rounded to the gate's dtype: [N, C]."""
    return f.forward(widened(gate)).to(gate.dtype).flatten(1)


def gated_spread(gate: Tensor, value: Tensor, activation: int, a: float, b: float) -> Tensor:
    """Product with a gate of one value a sample and channel, [N, C, 1, ...]."""
    return scale_add(value, _opened(gate, Pointwise(activation, a, b)), None, 1)


def gated_spread_backward(
    grad: Tensor, gate: Tensor, value: Tensor | None, activation: int, a: float, b: float,
    needs_value: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of gate and value. No value: the gate needs none."""
    f = Pointwise(activation, a, b)
    opened = _opened(gate, f)
    grad_value, sums = scale_add_backward(grad, value, opened, 1, needs_value)
    if value is None:
        return sums, grad_value
    saved = opened if f.saves_output else gate.flatten(1)
    grad_gate = f.backward(widened(sums.to(gate.dtype)), widened(saved))
    return grad_gate.to(gate.dtype).view(gate.shape), grad_value


def gated_spread_gradients(
    grad: Tensor, gate: Tensor, value: Tensor | None, activation: int, a: float, b: float
) -> tuple[Tensor | None, Tensor]:
    """The same, differentiable."""
    f, g = Pointwise(activation, a, b), widened(grad)
    opened = f.forward(widened(gate)).to(gate.dtype)
    grad_value = (g * widened(opened)).to(grad.dtype)
    if value is None:
        return None, grad_value
    over = list(range(2, gate.dim()))
    sums = (g * widened(value)).sum(over, keepdim=True).to(gate.dtype)
    grad_gate = f.backward(widened(sums), widened(opened if f.saves_output else gate))
    return grad_gate.to(gate.dtype), grad_value
