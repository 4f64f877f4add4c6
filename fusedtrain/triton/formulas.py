"""Every activation as two functions of blocks: its value, and g times its derivative.

The mathematics is that of csrc/formulas.h, with the same limits at the infinities; NaN stays NaN.
``x`` is float32 (for 16-bit tensors too) or float64; ``a`` and ``b`` are scalars of that dtype,
unused by formulas without such parameters. ``saved`` is the output in functions marked "output",
otherwise the input. This module has no loops, pointers or layouts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..reference.pointwise import IDENTITY, POINTWISE
from .launch import STORED, WIDE
from .vecmath import (
    at_least,
    at_most,
    clamp,
    expm1,
    log1p_unit,
    normal_cdf,
    normal_cdf_and_density,
    reciprocal,
    sigmoid,
    sigmoid_and_slope,
    sqrt,
    tanh,
)

# --- piecewise linear


class Formula(NamedTuple):
    """The functions of an activation (None without one), and the dtype of its parameters."""

    forward: Any
    backward: Any
    saves_output: bool
    stored: Any


@functools.cache
def formula_of(op: int, dtype: torch.dtype) -> Formula:
    """The formula for tensors of `dtype`; `op` is a line of ``FT_POINTWISE``, or -1 for none."""
    if not IDENTITY <= op < len(POINTWISE):
        raise RuntimeError(
            f"fusedtrain: activation must be from {IDENTITY} to {len(POINTWISE) - 1}"
        )
    if op == IDENTITY:
        return Formula(None, None, False, WIDE[dtype])
    row = POINTWISE[op]
    stored = STORED if row.rounds else WIDE
    forward, backward = (globals()[f"{row.name}_{part}"] for part in ("forward", "backward"))
    return Formula(forward, backward, row.saves == "output", stored[dtype])


@triton.jit
def relu_forward(x, a, b):
    return at_least(x, 0.0)


@triton.jit
def relu_backward(g, saved, a, b):  # output
    return tl.where(saved <= 0.0, 0.0, g)


@triton.jit
def relu6_forward(x, a, b):
    return clamp(x, 0.0, 6.0)


@triton.jit
def relu6_backward(g, saved, a, b):  # output
    return tl.where((saved <= 0.0) | (saved >= 6.0), 0.0, g)


@triton.jit
def leaky_relu_forward(x, a, b):
    return tl.where(x > 0.0, x, a * x)


@triton.jit
def leaky_relu_backward(g, saved, a, b):  # output
    return tl.where(saved > 0.0, g, a * g)


@triton.jit
def hardtanh_forward(x, a, b):
    return clamp(x, a, b)


@triton.jit
def hardtanh_backward(g, saved, a, b):  # output
    return tl.where((saved <= a) | (saved >= b), 0.0, g)


@triton.jit
def hardshrink_forward(x, a, b):
    return tl.where((x >= -a) & (x <= a), 0.0, x)


@triton.jit
def hardshrink_backward(g, saved, a, b):  # output
    # equal (- for +): `saved` is 0 where the branch is taken
    return tl.where((saved == 0.0) & (a + saved >= 0.0), 0.0, g)


@triton.jit
def softshrink_forward(x, a, b):
    # equal (>= for >): 0 either way
    # equal (<= for <): 0 either way; torch's vectors and its tail disagree about the sign
    return tl.where(x > a, x - a, tl.where(x < -a, x + a, x * 0.0))


@triton.jit
def softshrink_backward(g, saved, a, b):  # output
    return tl.where(saved == 0.0, 0.0, g)


@triton.jit
def threshold_forward(x, a, b):
    return tl.where(x <= a, b, x)


@triton.jit
def threshold_backward(g, saved, a, b):
    return tl.where(saved <= a, 0.0, g)


@triton.jit
def hardsigmoid_forward(x, a, b):
    # From the nearer end, where 3 - |x| is exact: the output is 0 or 1 only if the slope is 0.
    t = at_least(3.0 - tl.abs(x), 0.0) / 6.0
    return tl.where(x < 0.0, t, 1.0 - t)  # equal (<= for <): a half either way


@triton.jit
def hardsigmoid_backward(g, saved, a, b):  # output
    return tl.where((saved > 0.0) & (saved < 1.0), g * 0.16666666666666666, 0.0)  # 0 at NaN


# --- piecewise quadratic


@triton.jit
def hardswish_forward(x, a, b):
    x = at_least(x, -3.0)
    return x * (at_most(x + 3.0, 6.0) / 6.0)


@triton.jit
def hardswish_backward(g, saved, a, b):
    slope = saved * 0.33333333333333333 + 0.5
    return tl.where(saved <= -3.0, 0.0, tl.where(saved >= 3.0, g, g * slope))


@triton.jit
def hard_mish_forward(x, a, b):
    x = at_least(x, -2.0)
    return x * (0.5 * at_most(x + 2.0, 2.0))


@triton.jit
def hard_mish_backward(g, saved, a, b):
    # equal (>= for >): the slope of 0 is 1 either way
    return tl.where(saved < -2.0, 0.0, tl.where(saved > 0.0, g, g * (saved + 1.0)))


@triton.jit
def relu_squared_forward(x, a, b):
    x = at_least(x, 0.0)
    return x * x


@triton.jit
def relu_squared_backward(g, saved, a, b):
    return tl.where(saved <= 0.0, 0.0, g * (2.0 * saved))


# --- exponential tails


@triton.jit
def elu_forward(x, a, b):
    e = a * expm1(at_most(x, 0.0))  # equal (constant): positive numbers take x
    # equal (>= for >): 0 either way, but for its sign where alpha is negative
    return tl.where(x > 0.0, x, e)


@triton.jit
def elu_backward(g, saved, a, b):
    return tl.where(saved > 0.0, g, g * (a * tl.exp(at_most(saved, 0.0))))


@triton.jit
def celu_forward(x, a, b):
    e = a * expm1(at_most(x, 0.0) * reciprocal(a))  # equal (constant): positive numbers take x
    # equal (>= for >): expm1 keeps zeros, and alpha divides before it multiplies
    return tl.where(x > 0.0, x, e)


@triton.jit
def celu_backward(g, saved, a, b):
    # equal (>= for >): the slope of 0 is 1 either way
    # equal (constant #1): positive numbers have the slope exp(0)
    return tl.where(saved > 0.0, g, g * tl.exp(at_most(saved, 0.0) * reciprocal(a)))


@triton.jit
def selu_forward(x, a, b):  # scale, and scale times alpha: arXiv:1706.02515
    e = 1.7580993408473766 * expm1(at_most(x, 0.0))
    # equal (>= for >): zeros are kept either way
    return tl.where(x > 0.0, 1.0507009873554804934 * x, e)


@triton.jit
def selu_backward(g, saved, a, b):
    slope = 1.7580993408473766 * tl.exp(at_most(saved, 0.0))
    return g * tl.where(saved > 0.0, 1.0507009873554804934, slope)


@triton.jit
def softplus_forward(x, a, b):
    z = a * x
    y = (at_least(z, 0.0) + log1p_unit(tl.exp(-tl.abs(z)))) * reciprocal(a)
    return tl.where(z > b, x, y)


@triton.jit
def softplus_backward(g, saved, a, b):  # output
    z = a * saved
    return tl.where(z > b, g, g * -expm1(-z))


@triton.jit
def logsigmoid_forward(x, a, b):
    return at_most(x, 0.0) - log1p_unit(tl.exp(-tl.abs(x)))


@triton.jit
def logsigmoid_backward(g, saved, a, b):  # output
    return g * -expm1(saved)


# --- S-shaped, and gated by an S-shape. For |x| above 1000, exp(x) is 0 or inf in both dtypes.


@triton.jit
def sigmoid_forward(x, a, b):
    return sigmoid(x)


@triton.jit
def sigmoid_backward(g, saved, a, b):  # output
    return g * (saved * (1.0 - saved))


@triton.jit
def tanh_forward(x, a, b):
    return tanh(x)


@triton.jit
def tanh_backward(g, saved, a, b):  # output
    return g * (1.0 - saved * saved)


@triton.jit
def tanhshrink_forward(x, a, b):
    return x - tanh(x)


@triton.jit
def tanhshrink_backward(g, saved, a, b):
    t = tanh(saved)
    return g * (t * t)


@triton.jit
def softsign_forward(x, a, b):
    x = clamp(x, -1e30, 1e30)  # equal (constant #1): it is -1 from -1e30 on
    return x / (1.0 + tl.abs(x))


@triton.jit
def softsign_backward(g, saved, a, b):  # output
    d = 1.0 - tl.abs(saved)
    return g * (d * d)


@triton.jit
def silu_forward(x, a, b):
    x = at_least(x, -1000.0)  # equal (constant): it is -0 from -1000 on
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_backward(g, saved, a, b):
    x = clamp(saved, -1000.0, 1000.0)  # equal (constant #1): it is 0 from -1000 on
    s, slope = sigmoid_and_slope(x)
    return g * (s + x * slope)


@triton.jit
def quick_gelu_forward(x, a, b):
    x = at_least(x, -1000.0)  # equal (constant): it is -0 from -1000 on
    return x / (1.0 + tl.exp(-1.702 * x))


@triton.jit
def quick_gelu_backward(g, saved, a, b):
    x = clamp(saved, -1000.0, 1000.0)  # equal (constant #1): it is 0 from -1000 on
    s, slope = sigmoid_and_slope(1.702 * x)
    return g * (s + 1.702 * x * slope)


# tanh(softplus(x)) = n / (n + 2) with n = e (e + 2), e = exp(x). From 20 up it is 1.
@triton.jit
def mish_forward(x, a, b):
    e = tl.exp(at_most(x, 20.0))
    n = e * (e + 2.0)
    return at_least(x, -1000.0) * (n / (n + 2.0))


@triton.jit
def mish_backward(g, saved, a, b):
    x = clamp(saved, -1000.0, 20.0)  # equal (constant #1): it is 0 from -1000 on
    e = tl.exp(x)
    n = e * (e + 2.0)
    r = 1.0 / (n + 2.0)
    return g * (n * r + x * (4.0 * e * (e + 1.0) * r) * r)


@triton.jit
def gelu_forward(x, a, b):
    return at_least(x, -40.0) * normal_cdf(x)  # equal (constant): the probability is 0 from -40 on


@triton.jit
def gelu_backward(g, saved, a, b):
    x = clamp(saved, -40.0, 40.0)  # equal (constant #1): probability and density are 0 from -40 on
    cumulative, density = normal_cdf_and_density(x)
    return g * (cumulative + x * density)


# 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
@triton.jit
def gelu_tanh_forward(x, a, b):
    z = clamp(x, -30.0, 30.0)  # equal (constant #1): the sigmoid is 0 from -30 on
    s = sigmoid(z * (1.59576912160573071176 + 0.07135481627260025 * z * z))
    return at_least(x, -30.0) * s


@triton.jit
def gelu_tanh_backward(g, saved, a, b):
    x = clamp(saved, -30.0, 30.0)  # equal (constant #1): sigmoid and slope are 0 from -30 on
    s, slope = sigmoid_and_slope(x * (1.59576912160573071176 + 0.07135481627260025 * x * x))
    return g * (s + x * slope * (1.59576912160573071176 + 0.21406444881780075 * x * x))


# (x + sqrt(x^2 + a)) / 2; for x < 0 in a form without cancellation.
@triton.jit
def squareplus_root(x, b):
    # equal (constant): 3e18 has a square in float32, too
    c = at_most(tl.abs(x), 1e18)  # above, x^2 + b is x^2
    return at_least(sqrt(c * c + b), tl.abs(x))


@triton.jit
def squareplus_value(x, s, b):
    c = tl.abs(x)
    return tl.where(x < 0.0, 0.5 * b / (s + c), 0.5 * s + 0.5 * c)


@triton.jit
def squareplus_forward(x, a, b):
    return squareplus_value(x, squareplus_root(x, a), a)


@triton.jit
def squareplus_backward(g, saved, a, b):
    x = clamp(saved, -1e18, 1e18)  # equal (constant #1): the slope is 0 from -1e18 on
    s = squareplus_root(x, a)
    return g * tl.where(s == 0.0, 0.5, squareplus_value(x, s, a) / s)


# --- channelwise: backward also gives the gradients of the parameters, element by element


@triton.jit
def prelu_forward(x, a, b):
    return tl.where(x > 0.0, x, a * x)


@triton.jit
def prelu_backward(g, saved, a, b):
    # equal (>= for >): 0 times a finite gradient is 0
    share = tl.where(saved > 0.0, 0.0, g * saved)
    return tl.where(saved > 0.0, g, a * g), share, share


@triton.jit
def star_relu_forward(x, a, b):
    r = at_least(x, 0.0)
    return a * r * r + b


@triton.jit
def star_relu_backward(g, saved, a, b):
    r = at_least(saved, 0.0)
    return tl.where(saved <= 0.0, 0.0, g * (2.0 * a * r)), g * (r * r), g
