"""Norms of rows: kernels, then launchers.

The tensor is [rows, n, inner] in memory; a tile has so many blocks (of n elements, `inner` apart)
and so many of their elements. ONCE: the tile has whole blocks, which stay in registers.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.dtypes import wide_of
from ..reference.row_norm import new_statistics
from ._layout import cdiv, check_same, dense_like, is_dense, power_of_two, unit_of
from .launch import Launcher, check_dtype
from .vecmath import reciprocal, sqrt, widen

_NUMBERS = ["blocks", "units", "inner"]
_SUM_NUMBERS = ["blocks", "n", "inner", "per_share"]


@triton.jit
def tile(block, k0, blocks, n, inner, LAST: tl.constexpr, WIDTH: tl.constexpr):
    """Places of the elements from k0 on of these blocks, their numbers, and which exist."""
    k = k0 + tl.arange(0, WIDTH)[None, :]
    inside = (block < blocks) & (k < n)
    if LAST:
        at = block * n + k
    else:
        at = (block // inner * n + k) * inner + block % inner
    return at, k, inside


@triton.jit
def loaded(  # equal (other=): elements beyond the data are masked, or not stored
    x_ptr, residual_ptr, at, inside, RESIDUAL: tl.constexpr
):  # fmt: skip
    """The input, or its sum with the residual as it is stored."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if RESIDUAL:
        other = tl.load(residual_ptr + at, mask=inside, other=0.0)
        x = (widen(x) + widen(other)).to(x_ptr.dtype.element_ty)
    return x


@triton.jit
def affine(p, k, n, otherwise, EXISTS: tl.constexpr, dtype: tl.constexpr):
    if EXISTS:
        return widen(tl.load(p + k, mask=k < n, other=0.0))
    else:
        return tl.full(k.shape, otherwise, dtype)


@triton.jit(do_not_specialize=[*_NUMBERS, "eps"])
def forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, sum_ptr, y_ptr, mean_ptr, rstd_ptr,
    blocks: tl.int64, units: tl.int64, inner: tl.int64, eps: tl.float64,
    RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CENTERED: tl.constexpr,
    UNIT: tl.constexpr, LAST: tl.constexpr, ONCE: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    n = units * UNIT
    wide: tl.constexpr = rstd_ptr.dtype.element_ty
    block = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    exists = block < blocks
    totals = tl.zeros([HEIGHT, WIDTH], wide)
    last = WIDTH if ONCE else n
    kept = totals
    for k0 in range(0, last, WIDTH):
        at, _, inside = tile(block, k0, blocks, n, inner, LAST, WIDTH)
        stored = loaded(x_ptr, residual_ptr, at, inside, RESIDUAL)
        if RESIDUAL:
            tl.store(sum_ptr + at, stored, mask=inside)
        x = widen(stored)
        totals += x
        kept = x
    mean = tl.zeros([HEIGHT, 1], wide)
    if CENTERED:
        mean = tl.sum(totals, axis=1)[:, None] / n
    distances = tl.zeros([HEIGHT, WIDTH], wide)
    squares = distances
    for k0 in range(0, last, WIDTH):
        at, _, inside = tile(block, k0, blocks, n, inner, LAST, WIDTH)
        x = kept
        if not ONCE:
            x = widen(loaded(x_ptr, residual_ptr, at, inside, RESIDUAL))
        distance = tl.where(inside, x - mean, 0.0)
        distances += distance
        squares += distance * distance
    off = tl.zeros([HEIGHT, 1], wide)
    variance = tl.sum(squares, axis=1)[:, None] / n
    if CENTERED:
        off = tl.sum(distances, axis=1)[:, None] / n
        variance -= off * off
        variance = tl.where(variance < 0.0, 0.0, variance)
        tl.store(mean_ptr + block, mean + off, mask=exists)
    rstd = reciprocal(sqrt(variance + (tl.zeros([1, 1], tl.float64) + eps).to(wide)))
    tl.store(rstd_ptr + block, rstd, mask=exists)
    for k0 in range(0, last, WIDTH):
        at, k, inside = tile(block, k0, blocks, n, inner, LAST, WIDTH)
        x = kept
        if not ONCE:
            x = widen(loaded(x_ptr, residual_ptr, at, inside, RESIDUAL))
        y = (x - mean - off) * rstd * affine(weight_ptr, k, n, 1.0, WEIGHT, wide)
        y += affine(bias_ptr, k, n, 0.0, BIAS, wide)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS)
def backward_kernel(  # equal (other=): a product with the gradient is 0, or nothing is stored
    grad_ptr, grad_sum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, grad_input_ptr,
    blocks: tl.int64, units: tl.int64, inner: tl.int64,
    ADDED: tl.constexpr, WEIGHT: tl.constexpr, CENTERED: tl.constexpr, UNIT: tl.constexpr,
    LAST: tl.constexpr, ONCE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    n = units * UNIT
    wide: tl.constexpr = rstd_ptr.dtype.element_ty
    block = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    exists = block < blocks
    rstd = tl.load(rstd_ptr + block, mask=exists, other=0.0)
    mean = tl.zeros([HEIGHT, 1], wide)
    if CENTERED:
        mean = tl.load(mean_ptr + block, mask=exists, other=0.0)
    terms = tl.zeros([HEIGHT, WIDTH], wide)
    products = terms
    kept, kept_norm = terms, terms
    last = WIDTH if ONCE else n
    for k0 in range(0, last, WIDTH):
        at, k, inside = tile(block, k0, blocks, n, inner, LAST, WIDTH)
        grad = widen(tl.load(grad_ptr + at, mask=inside, other=0.0))
        norm = (widen(tl.load(x_ptr + at, mask=inside, other=0.0)) - mean) * rstd
        grad *= affine(weight_ptr, k, n, 1.0, WEIGHT, wide)
        terms += grad
        products += tl.where(inside, grad * norm, 0.0)
        kept, kept_norm = grad, norm
    of_norm = tl.sum(products, axis=1)[:, None] / n
    of_mean = tl.zeros([HEIGHT, 1], wide)
    if CENTERED:
        of_mean = tl.sum(terms, axis=1)[:, None] / n
    for k0 in range(0, last, WIDTH):
        at, k, inside = tile(block, k0, blocks, n, inner, LAST, WIDTH)
        grad, norm = kept, kept_norm
        if not ONCE:
            grad = widen(tl.load(grad_ptr + at, mask=inside, other=0.0))
            grad *= affine(weight_ptr, k, n, 1.0, WEIGHT, wide)
            norm = (widen(tl.load(x_ptr + at, mask=inside, other=0.0)) - mean) * rstd
        out = (grad - of_mean - norm * of_norm) * rstd
        if ADDED:
            out += widen(tl.load(grad_sum_ptr + at, mask=inside, other=0.0))
        tl.store(grad_input_ptr + at, out.to(grad_input_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_SUM_NUMBERS)
def sums_kernel(  # equal (other=): a product with the gradient is 0
    grad_ptr, x_ptr, mean_ptr, rstd_ptr, shares_ptr,
    blocks: tl.int64, n: tl.int64, inner: tl.int64, per_share: tl.int64,
    CENTERED: tl.constexpr, LAST: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Shares [programs, 2, n] of the gradients of weight and bias: each of `per_share` blocks."""
    wide: tl.constexpr = rstd_ptr.dtype.element_ty
    across = tl.cdiv(n, WIDTH)
    k0 = tl.program_id(0) % across * WIDTH
    share = tl.program_id(0).to(tl.int64) // across
    of_weight = tl.zeros([HEIGHT, WIDTH], wide)
    of_bias = of_weight
    for first in range(share * per_share, (share + 1) * per_share, HEIGHT):
        block = first + tl.arange(0, HEIGHT)[:, None]
        at, _, inside = tile(block, k0, blocks, n, inner, LAST, WIDTH)
        grad = widen(tl.load(grad_ptr + at, mask=inside, other=0.0))
        x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
        if CENTERED:
            x -= tl.load(mean_ptr + block, mask=block < blocks, other=0.0)
        x *= tl.load(rstd_ptr + block, mask=block < blocks, other=0.0)
        of_weight += tl.where(inside, grad * x, 0.0)
        of_bias += grad
    k = k0 + tl.arange(0, WIDTH)
    to = shares_ptr + share * 2 * n + k
    tl.store(to, tl.sum(of_weight, axis=0), mask=k < n)
    tl.store(to + n, tl.sum(of_bias, axis=0), mask=k < n)


_launch, _launch_backward = Launcher(forward_kernel), Launcher(backward_kernel)
_launch_sums = Launcher(sums_kernel)

# Elements of a tile, where whole rows do not ask for more, and of a row that stays in registers:
# with twice as many backward spills on sm_90 (but of 16 bits).
_BLOCK = {8: 512, 4: 1024, 2: 1024}
_MOST = {8: 2048, 4: 4096, 2: 8192}
_SHARES = 256  # at most


class Shape(NamedTuple):
    """A dense tensor as blocks of n elements, and how these are cut."""

    blocks: int
    n: int
    inner: int
    height: int
    width: int

    @property
    def constants(self) -> tuple[int | bool, ...]:
        """UNIT, LAST, ONCE, HEIGHT, WIDTH."""
        unit = unit_of(self.n) if self.inner == 1 else 1
        return unit, self.inner == 1, self.width >= self.n, self.height, self.width

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.blocks, self.n // int(self.constants[0]), self.inner

    @property
    def programs(self) -> int:
        return cdiv(self.blocks, self.height)


def _shape_of(name: str, x: Tensor, start: int, end: int) -> Shape:
    check_dtype(name, x, "input")
    if not 0 <= start <= end < x.dim():
        raise RuntimeError(f"fusedtrain::{name}: start_dim and end_dim must be dimensions of input")
    if not is_dense(x):
        raise RuntimeError(f"fusedtrain::{name}: input must be dense")
    n, inner = 1, 1
    for d in range(end, start - 1, -1):
        if x.size(d) != 1:
            inner = x.stride(d) if n == 1 else inner
            if x.numel() and x.stride(d) != inner * n:
                raise RuntimeError(
                    f"fusedtrain::{name}: the normalised dimensions must lie one in another"
                )
        n *= x.size(d)
    if not x.numel():
        return Shape(0, n, 1, 1, 1)
    blocks, block = x.numel() // n, _BLOCK[x.itemsize]
    width = power_of_two(n)
    if inner == 1:
        width = width if width <= _MOST[x.itemsize] else block
    else:
        width = min(width, block // 64)
    height = max(1, min(block // width, power_of_two(blocks)))
    return Shape(blocks, n, inner, height, width)


def _check_affine(name: str, what: str, t: Tensor | None, x: Tensor, n: int) -> None:
    if t is None:
        return
    if t.device != x.device:
        raise RuntimeError(f"fusedtrain::{name}: {what} is on another device")
    if t.dtype not in (x.dtype, wide_of(x)):
        raise RuntimeError(
            f"fusedtrain::{name}: {what} must have the dtype of input, or that of its math"
        )
    if t.numel() != n:
        raise RuntimeError(f"fusedtrain::{name}: {what} must have {n} elements")


def row_norm(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    start_dim: int, end_dim: int, eps: float, centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    name, x = "row_norm", input
    shape = _shape_of(name, x, start_dim, end_dim)
    _check_affine(name, "weight", weight, x, shape.n)
    _check_affine(name, "bias", bias, x, shape.n)
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise RuntimeError(f"fusedtrain::{name}: weight and bias must have one dtype")
    if bias is not None and not centered:
        raise RuntimeError(f"fusedtrain::{name}: only a centered norm has a bias")
    total = x.new_empty(0)
    if residual is not None:
        check_same(name, residual, x, "residual", "input")
        total = torch.empty_like(x)
    y, rstd = torch.empty_like(x), new_statistics(x, start_dim, end_dim)
    mean = torch.empty_like(rstd) if centered else rstd.new_empty(0)
    if not x.numel():
        return y, mean.zero_(), rstd.zero_(), total
    added = x if residual is None else dense_like(residual, x)
    vectors = [x if t is None else t.contiguous() for t in (weight, bias)]
    flags = (residual is not None, weight is not None, bias is not None, centered)
    constants = (*flags, *shape.constants)
    wide = any(t is not None and t.dtype != x.dtype for t in (weight, bias))
    tensors = (x, added, *vectors, total, y, mean, rstd)
    _launch((wide, constants), shape.programs, tensors, (*shape.numbers, eps), constants)
    return y, mean, rstd, total


def row_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, mean: Tensor,
    rstd: Tensor, start_dim: int, end_dim: int, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    name, x = "row_norm_backward", input
    shape = _shape_of(name, x, start_dim, end_dim)
    check_same(name, grad, x, "grad", "input")
    _check_affine(name, "weight", weight, x, shape.n)
    model = new_statistics(x, start_dim, end_dim)
    centered = mean.numel() > 0
    for what, t in (("mean", mean), ("rstd", rstd)):
        if t.device != x.device:
            raise RuntimeError(f"fusedtrain::{name}: {what} is on another device")
        if t is mean and not centered:
            continue
        if t.dtype != model.dtype or t.numel() != model.numel():
            raise RuntimeError(f"fusedtrain::{name}: {what} must have a number for each block")
        if t.shape != model.shape or dense_like(t, model) is not t:
            raise RuntimeError(
                f"fusedtrain::{name}: {what} must have the layout that row_norm returns"
            )
    if grad_sum is not None:
        check_same(name, grad_sum, x, "grad_sum", "input")
    grad_input = torch.empty_like(x)
    needs = (needs_weight, needs_bias)
    if not x.numel():
        sums = [rstd.new_zeros(shape.n if needed else 0) for needed in needs]
        return grad_input, sums[0], sums[1]
    g = dense_like(grad, x)
    added = g if grad_sum is None else dense_like(grad_sum, x)
    scale = x if weight is None else weight.contiguous()
    constants = (grad_sum is not None, weight is not None, centered, *shape.constants)
    tensors = (g, added, x, scale, mean, rstd, grad_input)
    variant = (scale.dtype == x.dtype, constants)
    _launch_backward(variant, shape.programs, tensors, shape.numbers, constants)
    sums = [rstd.new_empty(0), rstd.new_empty(0)]
    if needs_weight or needs_bias:
        width = min(128, power_of_two(shape.n)) if shape.inner == 1 else min(16, shape.width)
        height = max(1, min(1024 // width, power_of_two(shape.blocks)))
        tiles = cdiv(shape.blocks, height)
        per_share = cdiv(tiles, min(_SHARES, tiles)) * height
        count = cdiv(shape.blocks, per_share)
        shares = rstd.new_empty(count, 2, shape.n)
        flags = (centered, shape.inner == 1, height, width)
        numbers = (shape.blocks, shape.n, shape.inner, per_share)
        programs = count * cdiv(shape.n, width)
        _launch_sums(flags, programs, (g, x, mean, rstd, shares), numbers, flags)
        both = shares.double().sum(0).to(rstd.dtype)  # few numbers, in a fixed order
        sums = [t if needed else none for t, needed, none in zip(both, needs, sums, strict=True)]
    return grad_input, sums[0], sums[1]
