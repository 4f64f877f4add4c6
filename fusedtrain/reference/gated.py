"""Gated products in plain torch, ``y = f(gate) value``: the GLU family (arXiv:1612.08083,
arXiv:2002.05202). 16-bit math is in float32, rounded once."""

from __future__ import annotations

from torch import Tensor

from .dtypes import in_strides_of, widened
from .pointwise import Pointwise


def gated(gate: Tensor, value: Tensor, activation: int, a: float, b: float) -> Tensor:
    opened = Pointwise(activation, a, b).forward(widened(gate))
    return in_strides_of(opened * widened(value), value)


def gated_gradients(
    grad: Tensor, gate: Tensor, value: Tensor, activation: int, a: float, b: float
) -> tuple[Tensor, Tensor]:
    """Of gate and value."""
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
