"""The loop over an activation with float parameters: kernels, then launchers."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.pointwise import INDEX
from ._layout import BACKWARD_BLOCK, FORWARD_BLOCK, check_same, dense_like, is_dense
from .formulas import formula_of
from .launch import Launcher, check_dtype
from .vecmath import widen


@triton.jit
def parameter(p, x, STORED: tl.constexpr):
    """The float64 argument in the dtype of `x`, rounded to the dtype STORED on the way."""
    return tl.full((), p, x.dtype).to(STORED).to(x.dtype)


@triton.jit
def apply(FORMULA: tl.constexpr, x, a, b, STORED: tl.constexpr):
    if FORMULA is None:
        return x
    else:
        return FORMULA(x, parameter(a, x, STORED), parameter(b, x, STORED))


@triton.jit
def differentiate(FORMULA: tl.constexpr, g, saved, a, b, STORED: tl.constexpr):
    if FORMULA is None:
        return g
    else:
        return FORMULA(g, saved, parameter(a, g, STORED), parameter(b, g, STORED))


@triton.jit(do_not_specialize=["n"])
def forward_kernel(  # equal (other=): elements beyond the data are not stored
    x_ptr, y_ptr, n: tl.int64, a: tl.float64, b: tl.float64,
    FORMULA: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    x_ptr += start
    y_ptr += start
    at = tl.arange(0, BLOCK)
    # equal (< for <=): a whole last block is masked: slower, same result
    whole = start + BLOCK <= n  # then without a mask: any n has 16-byte accesses
    if whole:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=start + at < n, other=0.0)
    x = widen(x)
    y = FORMULA(x, parameter(a, x, STORED), parameter(b, x, STORED)).to(y_ptr.dtype.element_ty)
    if whole:
        tl.store(y_ptr + at, y)
    else:
        tl.store(y_ptr + at, y, mask=start + at < n)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(  # equal (other=): elements beyond the data are not stored
    g_ptr, saved_ptr, gx_ptr, n: tl.int64, a: tl.float64, b: tl.float64,
    FORMULA: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    g_ptr += start
    saved_ptr += start
    gx_ptr += start
    at = tl.arange(0, BLOCK)
    # equal (< for <=): a whole last block is masked: slower, same result
    whole = start + BLOCK <= n
    if whole:
        g = tl.load(g_ptr + at)
        x = tl.load(saved_ptr + at)
    else:
        g = tl.load(g_ptr + at, mask=start + at < n, other=0.0)
        x = tl.load(saved_ptr + at, mask=start + at < n, other=0.0)
    x = widen(x)
    y = FORMULA(widen(g), x, parameter(a, x, STORED), parameter(b, x, STORED))
    if whole:
        tl.store(gx_ptr + at, y.to(gx_ptr.dtype.element_ty))
    else:
        tl.store(gx_ptr + at, y.to(gx_ptr.dtype.element_ty), mask=start + at < n)


_launch_forward = Launcher(forward_kernel)
_launch_backward = Launcher(backward_kernel)


@functools.cache
def _constants(name: str, direction: str, dtype: torch.dtype) -> tuple[Any, Any, int]:
    formula = formula_of(INDEX[name], dtype)
    if direction == "forward":
        return formula.forward, formula.stored, FORWARD_BLOCK[dtype.itemsize]
    return formula.backward, formula.stored, BACKWARD_BLOCK[dtype.itemsize]


def _run(name: str, x: Tensor, y: Tensor, parameters: tuple[float, ...]) -> None:
    n = x.numel()
    if n:
        constants = _constants(name, "forward", x.dtype)
        numbers = (n, *parameters, 0.0, 0.0)[:3]
        _launch_forward(name, -(-n // constants[-1]), (x, y), numbers, constants)


def forward(name: str, input: Tensor, *parameters: float) -> Tensor:
    check_dtype(name, input, "input")
    output = torch.empty_like(input)
    _run(name, input if is_dense(input) else output.copy_(input.detach()), output, parameters)
    return output


def inplace(name: str, input: Tensor, *parameters: float) -> None:
    check_dtype(name, input, "input")
    if is_dense(input):
        _run(name, input, input, parameters)
    else:  # copy_ refuses to write to memory that several elements share
        input.copy_(forward(name, input, *parameters))


def backward(name: str, grad: Tensor, saved: Tensor, *parameters: float) -> Tensor:
    check_dtype(name, saved, "saved")
    check_same(name, grad, saved, "grad", "saved")
    grad_input = torch.empty_like(saved)
    n = saved.numel()
    if n:
        constants = _constants(name, "backward", saved.dtype)
        tensors = (dense_like(grad, grad_input), dense_like(saved, grad_input), grad_input)
        numbers = (n, *parameters, 0.0, 0.0)[:3]
        _launch_backward(name, -(-n // constants[-1]), tensors, numbers, constants)
    return grad_input
