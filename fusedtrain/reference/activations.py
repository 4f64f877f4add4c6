"""Activations in plain torch: forward, backward, and the table that declares each op. Formulas of
what torch lacks are in activations_beyond_torch.py.

TorchScript, torch.compile and torch.func see ``forward`` instead of a kernel. ``backward`` takes
the gradient and the saved tensor: the output if the derivative is an exact function of the output,
else the input. ``backward`` is differentiable, so double backward works to any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations_beyond_torch import (
    hard_mish,
    hard_mish_backward,
    quick_gelu,
    quick_gelu_backward,
    relu_squared,
    relu_squared_backward,
    squareplus,
    squareplus_backward,
)
from .dtypes import widened


@dataclass(frozen=True)
class Activation:
    """One row of the table: everything about an activation except its kernels."""

    name: str
    forward: Callable[..., Tensor]
    backward: Callable[..., Any]
    saves: str  # "input" or "output"
    parameters: tuple[str, ...] = ()  # numbers, or tensors if `tensors` is set
    example: tuple[Any, ...] = ()  # values of the parameters in tests and benchmarks
    tensors: bool = False
    per_channel: bool = False  # tensors may have one value for each channel (dimension 1)
    rounds: bool = False  # parameters, to the dtype: backward compares the saved output with them
    # Parameter values for which the kernel is exact; for others eager torch runs. Bounds of 1e-3
    # and 1e3 keep a saved output within float16's range and resolution.
    valid: Callable[..., bool] | None = None
    # Backward from the output, for `inplace`; torch's function loses the same digits.
    backward_in_place: Callable[..., Tensor] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The example parameters, as the op takes them."""
        if not self.tensors:
            return self.example
        return tuple(torch.tensor(v, device="cpu") for v in self.example)

    def eager(self, input: Tensor) -> Tensor:
        """Eager torch's result, with the example parameters."""
        return self.forward(input, *self.arguments_for(input))

    def arguments_for(self, input: Tensor) -> tuple[Any, ...]:
        """The example parameters on the input's device and in its dtype."""
        return tuple(
            p.to(input.device, input.dtype) if isinstance(p, Tensor) else p for p in self.arguments
        )


# --- forward: every function scripts ---


def relu(input: Tensor) -> Tensor:
    return F.relu(input)


def relu6(input: Tensor) -> Tensor:
    return F.relu6(input)


def leaky_relu(input: Tensor, negative_slope: float) -> Tensor:
    return F.leaky_relu(input, negative_slope)


def elu(input: Tensor, alpha: float) -> Tensor:
    return F.elu(input, alpha)


def celu(input: Tensor, alpha: float) -> Tensor:
    return F.celu(input, alpha)


def selu(input: Tensor) -> Tensor:
    return F.selu(input)


def silu(input: Tensor) -> Tensor:
    return F.silu(input)


def mish(input: Tensor) -> Tensor:
    return F.mish(input)


def gelu(input: Tensor) -> Tensor:
    return F.gelu(input)


def gelu_tanh(input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def sigmoid(input: Tensor) -> Tensor:
    return torch.sigmoid(input)


def logsigmoid(input: Tensor) -> Tensor:
    return F.logsigmoid(input)


def tanh(input: Tensor) -> Tensor:
    return torch.tanh(input)


def tanhshrink(input: Tensor) -> Tensor:
    return F.tanhshrink(input)


def softplus(input: Tensor, beta: float, threshold: float) -> Tensor:
    return F.softplus(input, beta, threshold)


def softsign(input: Tensor) -> Tensor:
    return F.softsign(input)


def hardswish(input: Tensor) -> Tensor:
    return F.hardswish(input)


def hardsigmoid(input: Tensor) -> Tensor:
    return F.hardsigmoid(input)


def hardtanh(input: Tensor, min_val: float, max_val: float) -> Tensor:
    return F.hardtanh(input, min_val, max_val)


def hardshrink(input: Tensor, lambd: float) -> Tensor:
    return F.hardshrink(input, lambd)


def softshrink(input: Tensor, lambd: float) -> Tensor:
    return F.softshrink(input, lambd)


def threshold(input: Tensor, threshold: float, value: float) -> Tensor:
    return F.threshold(input, threshold, value)


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    return F.prelu(input, weight)


def star_relu(input: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    if input.dtype == scale.dtype and input.dtype == bias.dtype:
        r = widened(F.relu(input))
        y = widened(scale) * r * r + widened(bias)
        return y.to(input.dtype)
    return scale * F.relu(input) ** 2 + bias


# --- backward from the output. Masks compare in the dtype of the tensor: parameters are rounded to
# --- that dtype, as in the kernels.


def relu_backward(grad: Tensor, output: Tensor) -> Tensor:
    # torch's, for its layout: convolutions before it round another way in another layout
    result: Tensor = torch.ops.aten.threshold_backward(grad, output, 0)
    return result


def relu6_backward(grad: Tensor, output: Tensor) -> Tensor:
    return grad.masked_fill((output <= 0) | (output >= 6), 0)


def leaky_relu_backward(grad: Tensor, output: Tensor, negative_slope: float) -> Tensor:
    return torch.where(output > 0, grad, (widened(grad) * negative_slope).to(grad.dtype))


def sigmoid_backward(grad: Tensor, output: Tensor) -> Tensor:
    y = widened(output)
    return (widened(grad) * (y * (1 - y))).to(grad.dtype)


def logsigmoid_backward(grad: Tensor, output: Tensor) -> Tensor:
    return (widened(grad) * -torch.expm1(widened(output))).to(grad.dtype)


def tanh_backward(grad: Tensor, output: Tensor) -> Tensor:
    y = widened(output)
    return (widened(grad) * (1 - y * y)).to(grad.dtype)


def softplus_backward(grad: Tensor, output: Tensor, beta: float, threshold: float) -> Tensor:
    z = widened(output) * beta
    slope = torch.where(z > threshold, 1.0, -torch.expm1(-z))
    return (widened(grad) * slope).to(grad.dtype)


def softsign_backward(grad: Tensor, output: Tensor) -> Tensor:
    d = 1 - widened(output).abs()
    return (widened(grad) * (d * d)).to(grad.dtype)


def hardsigmoid_backward(grad: Tensor, output: Tensor) -> Tensor:
    inside = (output > 0) & (output < 1)  # not NaN, where torch has 0 too
    return (widened(grad) * (1.0 / 6.0)).to(grad.dtype).masked_fill(~inside, 0)


def hardtanh_backward(grad: Tensor, output: Tensor, min_val: float, max_val: float) -> Tensor:
    return grad.masked_fill((output <= min_val) | (output >= max_val), 0)


def hardshrink_backward(grad: Tensor, output: Tensor, lambd: float) -> Tensor:
    return grad.masked_fill(output == 0, 0) if lambd >= 0 else grad.clone()


def softshrink_backward(grad: Tensor, output: Tensor, lambd: float) -> Tensor:
    return grad.masked_fill(output == 0, 0)


# --- backward from the input ---


def elu_backward(grad: Tensor, input: Tensor, alpha: float) -> Tensor:
    x = widened(input)
    slope = torch.where(x > 0, 1.0, alpha * x.clamp(max=0).exp())
    return (widened(grad) * slope).to(grad.dtype)


def celu_backward(grad: Tensor, input: Tensor, alpha: float) -> Tensor:
    x = widened(input)
    slope = torch.where(x > 0, 1.0, (x.clamp(max=0) * (1.0 / alpha)).exp())
    return (widened(grad) * slope).to(grad.dtype)


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934, 1.6732632423543772848  # arXiv:1706.02515


def selu_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input)
    slope = torch.where(x > 0, _SELU_SCALE, _SELU_SCALE * _SELU_ALPHA * x.clamp(max=0).exp())
    return (widened(grad) * slope).to(grad.dtype)


def _elu_from_output(
    grad: Tensor, output: Tensor, alpha: float, scale: float, rate: float
) -> Tensor:
    result: Tensor = torch.ops.aten.elu_backward(grad, alpha, scale, rate, True, output)
    return result


def silu_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input)
    s = torch.sigmoid(x)
    return (widened(grad) * (s * (1 + x * (1 - s)))).to(grad.dtype)


def mish_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input)
    t = torch.tanh(F.softplus(x))
    return (widened(grad) * (t + x * torch.sigmoid(x) * (1 - t * t))).to(grad.dtype)


def gelu_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input)
    cumulative = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return (widened(grad) * (cumulative + x * density)).to(grad.dtype)


def gelu_tanh_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input)
    x = x.clamp(-30, 30)  # outside, the slope is 0 or 1, and the cube overflows
    linear, cubic = math.sqrt(2 / math.pi), math.sqrt(2 / math.pi) * 0.044715
    t = torch.tanh(x * (linear + cubic * x * x))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (linear + 3 * cubic * x * x)
    return (widened(grad) * slope).to(grad.dtype)


def tanhshrink_backward(grad: Tensor, input: Tensor) -> Tensor:
    t = torch.tanh(widened(input))
    return (widened(grad) * (t * t)).to(grad.dtype)


def hardswish_backward(grad: Tensor, input: Tensor) -> Tensor:
    x = widened(input)
    slope = torch.where(x >= 3, 1.0, x / 3 + 0.5)
    return (widened(grad) * slope).to(grad.dtype).masked_fill(x <= -3, 0)


def threshold_backward(grad: Tensor, input: Tensor, threshold: float, value: float) -> Tensor:
    return grad.masked_fill(input <= threshold, 0)


def _sum_to(t: Tensor, parameter: Tensor) -> Tensor:
    """The gradient of a parameter: one value a channel (dimension 1), or one in all."""
    if parameter.numel() == 1:
        return t.sum().reshape(parameter.shape).to(parameter.dtype)
    dims = [d for d in range(t.dim()) if d != 1]
    return (t.sum(dims) if dims else t).reshape(parameter.shape).to(parameter.dtype)


def _channels(parameter: Tensor, input: Tensor) -> Tensor:
    if parameter.numel() == 1 or input.dim() < 2:
        return widened(parameter)
    return widened(parameter).reshape([1, -1] + [1] * (input.dim() - 2))


def prelu_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    g, x = widened(grad), widened(input)
    grad_input = torch.where(x > 0, g, g * _channels(weight, input)).to(grad.dtype)
    grad_input = grad_input.reshape(input.shape)  # a 0-dim input meets a weight of one dimension
    return grad_input, _sum_to((g * x).masked_fill(x > 0, 0), weight)


def star_relu_backward(
    grad: Tensor, input: Tensor, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    g, r = widened(grad), widened(input).clamp_min(0)
    grad_input = (g * (2 * _channels(scale, input) * r)).to(grad.dtype).masked_fill(input <= 0, 0)
    return grad_input, _sum_to(g * (r * r), scale), _sum_to(g, bias)


_ROWS = (
    Activation("relu", relu, relu_backward, "output"),
    Activation("relu6", relu6, relu6_backward, "output"),
    Activation(
        "leaky_relu", leaky_relu, leaky_relu_backward, "output", ("negative_slope",), (0.01,),
        valid=lambda negative_slope: negative_slope >= 0,
    ),
    Activation(
        "elu", elu, elu_backward, "input", ("alpha",), (1.0,),
        backward_in_place=lambda g, y, alpha: _elu_from_output(g, y, alpha, 1.0, 1.0),
    ),
    Activation(
        "celu", celu, celu_backward, "input", ("alpha",), (1.0,),
        valid=lambda alpha: abs(alpha) >= 1e-30,  # whose inverse float32 holds
        backward_in_place=lambda g, y, alpha: _elu_from_output(g, y, alpha, 1.0, 1.0 / alpha),
    ),
    Activation(
        "selu", selu, selu_backward, "input",
        backward_in_place=lambda g, y: _elu_from_output(g, y, _SELU_ALPHA, _SELU_SCALE, 1.0),
    ),
    Activation("silu", silu, silu_backward, "input"),
    Activation("mish", mish, mish_backward, "input"),
    Activation("gelu", gelu, gelu_backward, "input"),
    Activation("gelu_tanh", gelu_tanh, gelu_tanh_backward, "input"),
    Activation("quick_gelu", quick_gelu, quick_gelu_backward, "input"),
    Activation("sigmoid", sigmoid, sigmoid_backward, "output"),
    Activation("logsigmoid", logsigmoid, logsigmoid_backward, "output"),
    Activation("tanh", tanh, tanh_backward, "output"),
    Activation("tanhshrink", tanhshrink, tanhshrink_backward, "input"),
    # Below a threshold of 20 the output does not determine the branch.
    Activation(
        "softplus", softplus, softplus_backward, "output", ("beta", "threshold"), (1.0, 20.0),
        valid=lambda beta, threshold: threshold >= 20 and 1e-3 <= abs(beta) <= 1e3,
    ),
    Activation("softsign", softsign, softsign_backward, "output"),
    Activation("hardswish", hardswish, hardswish_backward, "input"),
    Activation("hardsigmoid", hardsigmoid, hardsigmoid_backward, "output"),
    Activation(
        "hardtanh", hardtanh, hardtanh_backward, "output", ("min_val", "max_val"), (-1.0, 1.0),
        valid=lambda min_val, max_val: min_val <= max_val, rounds=True,
    ),
    Activation(
        "hardshrink", hardshrink, hardshrink_backward, "output", ("lambd",), (0.5,), rounds=True
    ),
    Activation(
        "softshrink", softshrink, softshrink_backward, "output", ("lambd",), (0.5,),
        valid=lambda lambd: lambd >= 0,
    ),
    Activation(
        "threshold", threshold, threshold_backward, "input", ("threshold", "value"), (0.5, -1.0)
    ),
    Activation("relu_squared", relu_squared, relu_squared_backward, "input"),
    Activation("hard_mish", hard_mish, hard_mish_backward, "input"),
    Activation(
        "squareplus", squareplus, squareplus_backward, "input", ("b",), (4.0,),
        valid=lambda b: b >= 0,
    ),
    Activation(
        "prelu", prelu, prelu_backward, "input", ("weight",), ([0.25],), tensors=True,
        per_channel=True,
    ),
    Activation(
        "star_relu", star_relu, star_relu_backward, "input", ("scale", "bias"),
        ([0.8944], [-0.4472]), tensors=True,
    ),
)  # fmt: skip

ACTIVATIONS: dict[str, Activation] = {row.name: row for row in _ROWS}
