"""Scaled sums: kernels, then launchers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._channels import SIZES, as_promised, shape_of, store_sums, tile
from ._layout import check_same, dense_like
from .launch import Launcher, check_dtype
from .vecmath import widen


@triton.jit(do_not_specialize=SIZES)
def scale_kernel(  # equal (other=): elements beyond the data are not stored
    x_ptr, scale_ptr, residual_ptr, y_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, per_sample: tl.int64,
    RESIDUAL: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr, LAST: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT
    row, _, column, inside, coefficient = tile(
        rows, columns, channels, inner, per_sample, PLANES, LAST, HEIGHT, WIDTH
    )
    at = row * columns + column
    exists = row < rows if PLANES else column < columns
    scale = widen(tl.load(scale_ptr + coefficient, mask=exists, other=0.0))
    y = widen(tl.load(x_ptr + at, mask=inside, other=0.0)) * scale
    if RESIDUAL:
        y += widen(tl.load(residual_ptr + at, mask=inside, other=0.0))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def scale_backward_kernel(  # equal (other=): sums are of products: the other factor is 0
    grad_ptr, x_ptr, scale_ptr, grad_input_ptr, shares_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, per_sample: tl.int64,
    INPUT: tl.constexpr, SUMS: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr,
    LAST: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT
    row, _, column, inside, coefficient = tile(
        rows, columns, channels, inner, per_sample, PLANES, LAST, HEIGHT, WIDTH
    )
    at = row * columns + column
    grad = widen(tl.load(grad_ptr + at, mask=inside, other=0.0))
    if SUMS:
        terms = grad * widen(tl.load(x_ptr + at, mask=inside, other=0.0))
        store_sums(shares_ptr, terms, row, column, rows, columns, PLANES, WIDTH)
    if INPUT:
        exists = row < rows if PLANES else column < columns
        scale = widen(tl.load(scale_ptr + coefficient, mask=exists, other=0.0))
        kind = grad_input_ptr.dtype.element_ty
        tl.store(grad_input_ptr + at, (grad * scale).to(kind), mask=inside)


_launch = Launcher(scale_kernel)
_launch_backward = Launcher(scale_backward_kernel)


def _check_scale(name: str, scale: Tensor, input: Tensor, dim: int) -> None:
    channels = 1 if not 0 <= dim < input.dim() else input.size(dim)
    if scale.dim() != 2 or scale.size(1) != channels:
        raise RuntimeError(f"fusedtrain::{name}: scale must be [samples, {channels}]")
    if scale.dtype != input.dtype or scale.device != input.device:
        raise RuntimeError(f"fusedtrain::{name}: scale must have the dtype and device of input")


def scale_add(input: Tensor, scale: Tensor, residual: Tensor | None, dim: int) -> Tensor:
    check_dtype("scale_add", input, "input")
    _check_scale("scale_add", scale, input, dim)
    if residual is not None:
        check_same("scale_add", residual, input, "residual", "input")
    x, shape = shape_of("scale_add", input, dim, scale.size(0))
    y = torch.empty_like(x)
    if x.numel():
        added = x if residual is None else dense_like(residual, x)
        constants = (residual is not None, *shape.constants)
        tensors = (x, scale.contiguous(), added, y)
        _launch(constants, shape.programs, tensors, shape.numbers, constants)
    return as_promised(y, input)


def scale_add_backward(
    grad: Tensor, input: Tensor | None, scale: Tensor, dim: int, needs_input: bool
) -> tuple[Tensor, Tensor]:
    name = "scale_add_backward"
    check_dtype(name, grad, "grad")
    model = grad if input is None else input
    check_same(name, grad, model, "grad", "input")
    _check_scale(name, scale, grad, dim)
    x, shape = shape_of(name, model, dim, scale.size(0))
    sums = input is not None
    grad_input = torch.empty_like(x) if needs_input else grad.new_empty(0)
    shares = shape.new_shares(x, sums)
    if x.numel():
        constants = (needs_input, sums, *shape.constants)
        tensors = (dense_like(grad, x), x, scale.contiguous(), grad_input, shares)
        _launch_backward(constants, shape.programs, tensors, shape.numbers, constants)
    if needs_input:
        grad_input = as_promised(grad_input, model)
    return grad_input, shape.sums(shares, sums)
