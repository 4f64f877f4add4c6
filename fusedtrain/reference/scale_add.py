"""``y = x scale + residual`` in plain torch: squeeze-excite gate (arXiv:1709.01507), layer scale
(arXiv:2103.17239), stochastic depth. 16-bit math is in float32, rounded once."""

from __future__ import annotations

from torch import Tensor

from .channels import channel_sums, spread
from .dtypes import in_strides_of, widened


def scale_add(input: Tensor, scale: Tensor, residual: Tensor | None, dim: int) -> Tensor:
    y = widened(input) * spread(widened(scale), input, dim)
    if residual is not None:
        y = y + widened(residual)
    return in_strides_of(y, input)


def scale_add_backward(
    grad: Tensor, input: Tensor | None, scale: Tensor, dim: int, needs_input: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of input and scale, the second in the dtype that is computed in."""
    g = widened(grad)
    grad_input, grad_scale = grad.new_empty(0), g.new_empty(0)
    if needs_input:
        model = grad if input is None else input
        grad_input = in_strides_of(g * spread(widened(scale), grad, dim), model)
    if input is not None:
        products = (g * widened(input)).double()
        grad_scale = channel_sums(products, scale.shape[0], dim).to(g.dtype)
    return grad_input, grad_scale
