"""Bias, activation, clamp and dropout: kernels, then launchers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._channels import SIZES, shape_of, store_sums, tile
from ._layout import check_same, dense_like
from .formulas import formula_of
from .launch import Launcher, check_dtype
from .pointwise import apply, differentiate
from .vecmath import clamp, widen

_BLOCK = {8: 256, 4: 512, 2: 1024}  # elements of a tile, fewer since words are drawn besides


@triton.jit
def number(p, x):
    """The float64 argument in the dtype of `x`."""
    return tl.full((), p, x.dtype)


@triton.jit
def exchanged(word):
    """The word with its halves exchanged: its second number (csrc/philox.h)."""
    return (word << 16) | (word >> 16)


@triton.jit
def keeps(seed_ptr, row, first, columns, threshold, TOGETHER: tl.constexpr,
          HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Mask of the elements of a tile that are not dropped. So many are drawn TOGETHER, those of a
    vector of 16 bytes: a block of the stream, half a block, or one number."""
    at = row * columns + first + TOGETHER * tl.arange(0, WIDTH // TOGETHER)[None, :]
    block, second = at // 8, at % 8 >= 4
    high = tl.load(seed_ptr + 1)
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    zero = low ^ low
    c2 = zero + (high & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((high >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), low, c1, c2, c3)
    if TOGETHER == 8:
        even = tl.join(tl.join(w0, exchanged(w0)), tl.join(w2, exchanged(w2)))
        odd = tl.join(tl.join(w1, exchanged(w1)), tl.join(w3, exchanged(w3)))
        numbers = tl.reshape(tl.join(even, odd), (HEIGHT, WIDTH))
    elif TOGETHER == 4:
        n0, n1 = tl.where(second, exchanged(w0), w0), tl.where(second, exchanged(w1), w1)
        n2, n3 = tl.where(second, exchanged(w2), w2), tl.where(second, exchanged(w3), w3)
        numbers = tl.reshape(tl.join(tl.join(n0, n2), tl.join(n1, n3)), (HEIGHT, WIDTH))
    else:
        which = at % 4
        word = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
        numbers = tl.where(second, exchanged(word), word)
    return numbers >= tl.full((), threshold, tl.int64).to(tl.uint32)


@triton.jit(do_not_specialize=[*SIZES, "threshold"])
def bias_act_kernel(  # equal (other=): elements beyond the data are not stored
    x_ptr, bias_ptr, seed_ptr, residual_ptr, y_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, per_sample: tl.int64,
    threshold: tl.int64, a: tl.float64, b: tl.float64, gain: tl.float64, bound: tl.float64,
    keep: tl.float64,
    FORWARD: tl.constexpr, STORED: tl.constexpr, BIAS: tl.constexpr, CLAMPS: tl.constexpr,
    DROPS: tl.constexpr, ADDS: tl.constexpr, TOGETHER: tl.constexpr, UNIT: tl.constexpr,
    PLANES: tl.constexpr, LAST: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT
    row, first, column, inside, coefficient = tile(
        rows, columns, channels, inner, per_sample, PLANES, LAST, HEIGHT, WIDTH
    )
    at = row * columns + column
    z = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    if BIAS:
        # equal (<= for < #1): the row after the last is not stored
        exists = row < rows if PLANES else column < columns
        z += widen(tl.load(bias_ptr + coefficient, mask=exists, other=0.0))
    y = apply(FORWARD, z, a, b, STORED) * number(gain, z)
    if CLAMPS:
        y = clamp(y, -number(bound, z), number(bound, z))
    if DROPS:
        kept = keeps(seed_ptr, row, first, columns, threshold, TOGETHER, HEIGHT, WIDTH)
        y = tl.where(kept, y * number(keep, z), 0.0)
    if ADDS:
        y += widen(tl.load(residual_ptr + at, mask=inside, other=0.0))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*SIZES, "threshold"])
def bias_act_backward_kernel(  # equal (other=): sums take a zero where there is no element
    grad_ptr, saved_ptr, bias_ptr, seed_ptr, grad_input_ptr, shares_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, per_sample: tl.int64,
    threshold: tl.int64, a: tl.float64, b: tl.float64, gain: tl.float64, bound: tl.float64,
    keep: tl.float64,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, BY_OUTPUT: tl.constexpr, STORED: tl.constexpr,
    BIAS: tl.constexpr, CLAMPS: tl.constexpr, DROPS: tl.constexpr, SUMS: tl.constexpr,
    TOGETHER: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr, LAST: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT
    row, first, column, inside, coefficient = tile(
        rows, columns, channels, inner, per_sample, PLANES, LAST, HEIGHT, WIDTH
    )
    at = row * columns + column
    z = widen(tl.load(saved_ptr + at, mask=inside, other=0.0))
    factor = number(gain, z) * number(keep, z)  # keep is 1 where nothing is dropped
    g = widen(tl.load(grad_ptr + at, mask=inside, other=0.0)) * factor
    if DROPS:
        kept = keeps(seed_ptr, row, first, columns, threshold, TOGETHER, HEIGHT, WIDTH)
        g = tl.where(kept, g, 0.0)
    if BY_OUTPUT:
        if CLAMPS:
            g = tl.where(tl.abs(z) < number(bound, z) * number(keep, z), g, 0.0)
        z = z * (1.0 / factor)
    else:
        if BIAS:
            exists = row < rows if PLANES else column < columns
            z += widen(tl.load(bias_ptr + coefficient, mask=exists, other=0.0))
        if CLAMPS:
            edge = apply(FORWARD, z, a, b, STORED) * number(gain, z)
            g = tl.where(tl.abs(edge) < number(bound, z), g, 0.0)
    g = differentiate(BACKWARD, g, z, a, b, STORED)
    tl.store(grad_input_ptr + at, g.to(grad_input_ptr.dtype.element_ty), mask=inside)
    if SUMS:
        terms = tl.where(inside, g, 0.0)
        store_sums(shares_ptr, terms, row, column, rows, columns, PLANES, WIDTH)


_launch = Launcher(bias_act_kernel)
_launch_backward = Launcher(bias_act_backward_kernel)


def drawn_together(unit: int, itemsize: int) -> int:
    """Elements of a row whose numbers are drawn together."""
    return 8 if unit == 8 and itemsize == 2 else 4 if unit >= 4 else 1


class _Call:
    """Common part of forward and backward of bias_act."""

    def __init__(
        self, name: str, input: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
        sums: bool, activation: int, a: float, b: float, gain: float, clamp: float, p: float,
    ) -> None:  # fmt: skip
        check_dtype(name, input, "input")
        formula = formula_of(activation, input.dtype)
        self.forward, self.backward, self.by_output, self.stored = formula
        if not 0 <= p < 1:
            raise RuntimeError(f"fusedtrain::{name}: p must be from 0 to below 1")
        if bias is not None and not (
            0 <= dim < input.dim()
            and bias.dim() == 1
            and bias.numel() == input.size(dim)
            and bias.dtype == input.dtype
            and bias.device == input.device
        ):
            raise RuntimeError(
                f"fusedtrain::{name}: bias must have one element for each channel, of the dtype "
                "and on the device of input"
            )
        self.drops = seed is not None and p > 0
        if seed is not None and (seed.dtype is not torch.int64 or seed.numel() != 2):
            raise RuntimeError(f"fusedtrain::{name}: seed must be two int64 numbers")
        channel = dim if bias is not None or sums else -1
        self.x, self.shape = shape_of(name, input, channel, 1, _BLOCK)
        self.bias = self.x if bias is None else bias.contiguous()
        self.seed = self.x if seed is None else seed.contiguous()
        keep = 1 / (1 - p) if self.drops else 1.0
        self.numbers = (*self.shape.numbers, int(p * 2**32), a, b, gain, clamp, keep)
        together = drawn_together(self.shape.unit, input.element_size())
        self.flags = (bias is not None, clamp >= 0, self.drops)
        self.tail = (together, *self.shape.constants)
        self.variant = (activation, *self.flags, sums, *self.tail)


def bias_act(
    input: Tensor, bias: Tensor | None, seed: Tensor | None, residual: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float,
) -> Tensor:  # fmt: skip
    call = _Call(
        "bias_act", input, bias, seed, dim, False, activation, a, b, gain, clamp, p
    )  # fmt: skip
    if residual is not None:
        check_same("bias_act", residual, input, "residual", "input")
    y, adds = torch.empty_like(call.x), residual is not None
    if y.numel():
        constants = (call.forward, call.stored, *call.flags, adds, *call.tail)
        added = call.x if residual is None else dense_like(residual, call.x)
        tensors = (call.x, call.bias, call.seed, added, y)
        _launch((adds, call.variant), call.shape.programs, tensors, call.numbers, constants)
    return y


def bias_act_backward(
    grad: Tensor, saved: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float, needs_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    name = "bias_act_backward"
    check_same(name, grad, saved, "grad", "saved")
    call = _Call(name, saved, bias, seed, dim, needs_bias, activation, a, b, gain, clamp, p)
    grad_input = torch.empty_like(call.x)
    shares = call.shape.new_shares(call.x, needs_bias)
    if call.x.numel():
        constants = (
            call.forward, call.backward, call.by_output, call.stored, *call.flags, needs_bias,
            *call.tail,
        )  # fmt: skip
        tensors = (dense_like(grad, call.x), call.x, call.bias, call.seed, grad_input, shares)
        _launch_backward(call.variant, call.shape.programs, tensors, call.numbers, constants)
    return grad_input, call.shape.sums(shares, needs_bias)
