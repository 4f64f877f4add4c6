"""Activations whose derivative is kept in few bits: kernels, then the ops."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.bits import BLOCK, STEP, packed_bytes
from ..reference.few_bit import table_of
from ..reference.pointwise import POINTWISE
from . import formulas
from ._layout import cdiv, dense_like, is_dense
from .launch import Launcher, check_dtype
from .vecmath import widen


@triton.jit
def code_of(slope, THRESHOLDS: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr):
    """The code of the level nearest to the slope in whole units; 0 for nan."""
    counted = slope * UNIT + (ZERO + 0.5)
    counted = tl.where(counted >= 0.0, counted, 0.0)  # equal (> for >=): 0 stays 0
    code = tl.where(counted >= 255.0, 255.0, counted).to(tl.int32)
    if len(THRESHOLDS) > 0:
        units = code
        code = tl.zeros(slope.shape, tl.int32)
        for k in tl.static_range(len(THRESHOLDS)):
            code += (units >= THRESHOLDS[k]).to(tl.int32)
    return code


@triton.jit
def level_of(code, g, LEVELS: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr):
    """The level of the code, in the dtype of `g`."""
    if len(LEVELS) > 0:  # equal (constant): no table has a single level
        level = tl.full(g.shape, LEVELS[0], g.dtype)
        for k in tl.static_range(1, len(LEVELS)):
            level = tl.where(code >= k, LEVELS[k], level)
    else:
        level = (code - ZERO).to(g.dtype) * (1.0 / UNIT)
    return level


@triton.jit
# equal (other=): elements beyond the data have code 0, not stored
def load(ptr, at, left, WHOLE: tl.constexpr):
    """A WHOLE tile loads without a mask, by 16 bytes."""
    if WHOLE:
        return widen(tl.load(ptr + at))
    else:
        return widen(tl.load(ptr + at, mask=at < left, other=0.0))


@triton.jit
def store(ptr, at, left, values, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(ptr + at, values.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=at < left)


# A program has BLOCKS blocks of codes (csrc/bits.h), and handles each step of them as a tile
# [BLOCKS, 32]. `left` is the number of elements from the program's first one on.
@triton.jit
def forward_tile(
    x_ptr, y_ptr, codes_ptr, left, WHOLE: tl.constexpr,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, BY_OUTPUT: tl.constexpr, BITS: tl.constexpr,
    THRESHOLDS: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    block, lane = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 32)[None, :]
    packed_at = block * (32 * BITS) + lane
    there = block * 256 < left
    top = tl.zeros((BLOCKS, 32), tl.int32)
    for run in tl.static_range(LOW):
        packed = tl.zeros((BLOCKS, 32), tl.int32)
        for part in tl.static_range(8 // LOW):
            at = block * 256 + ((run + part * LOW) * 32 + lane)
            x = load(x_ptr, at, left, WHOLE)
            y = FORWARD(x, 0.0, 0.0)
            store(y_ptr, at, left, y, WHOLE)
            saved = y if BY_OUTPUT else x
            slope = BACKWARD(tl.full(x.shape, 1.0, x.dtype), saved, 0.0, 0.0)
            code = code_of(slope, THRESHOLDS, UNIT, ZERO)
            if not WHOLE:
                code = tl.where(at < left, code, 0)
            packed |= (code & ((1 << LOW) - 1)) << (part * LOW)
            if BITS == 3:
                top |= (code >> 2) << (run + part * LOW)
        tl.store(codes_ptr + (packed_at + run * 32), packed.to(tl.uint8), mask=there)
    if BITS == 3:
        tl.store(codes_ptr + (packed_at + 2 * 32), top.to(tl.uint8), mask=there)


@triton.jit(do_not_specialize=["n"])
def forward_kernel(
    x_ptr, y_ptr, codes_ptr, n: tl.int64,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, BY_OUTPUT: tl.constexpr, BITS: tl.constexpr,
    THRESHOLDS: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    x_ptr += first * 256
    y_ptr += first * 256
    codes_ptr += first * (32 * BITS)
    left = tl.minimum(n - first * 256, BLOCKS * 256).to(tl.int32)
    if left == BLOCKS * 256:
        forward_tile(
            x_ptr, y_ptr, codes_ptr, left, True,
            FORWARD, BACKWARD, BY_OUTPUT, BITS, THRESHOLDS, UNIT, ZERO, BLOCKS,
        )  # fmt: skip
    else:
        forward_tile(
            x_ptr, y_ptr, codes_ptr, left, False,
            FORWARD, BACKWARD, BY_OUTPUT, BITS, THRESHOLDS, UNIT, ZERO, BLOCKS,
        )  # fmt: skip


@triton.jit
def backward_tile(  # equal (other=): elements beyond the data are not stored
    g_ptr, codes_ptr, gx_ptr, left, WHOLE: tl.constexpr, BITS: tl.constexpr,
    LEVELS: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    block, lane = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 32)[None, :]
    packed_at = block * (32 * BITS) + lane
    there = block * 256 < left
    if BITS == 3:
        top = tl.load(codes_ptr + (packed_at + 2 * 32), mask=there, other=0).to(tl.int32)
    for run in tl.static_range(LOW):
        packed = tl.load(codes_ptr + (packed_at + run * 32), mask=there, other=0).to(tl.int32)
        for part in tl.static_range(8 // LOW):
            at = block * 256 + ((run + part * LOW) * 32 + lane)
            g = load(g_ptr, at, left, WHOLE)
            code = (packed >> (part * LOW)) & ((1 << LOW) - 1)
            if BITS == 3:
                code |= ((top >> (run + part * LOW)) & 1) << 2
            store(gx_ptr, at, left, g * level_of(code, g, LEVELS, UNIT, ZERO), WHOLE)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(
    g_ptr, codes_ptr, gx_ptr, n: tl.int64, BITS: tl.constexpr,
    LEVELS: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    g_ptr += first * 256
    gx_ptr += first * 256
    codes_ptr += first * (32 * BITS)
    left = tl.minimum(n - first * 256, BLOCKS * 256).to(tl.int32)
    if left == BLOCKS * 256:
        backward_tile(
            g_ptr, codes_ptr, gx_ptr, left, True, BITS, LEVELS, UNIT, ZERO, BLOCKS
        )  # fmt: skip
    else:
        backward_tile(
            g_ptr, codes_ptr, gx_ptr, left, False, BITS, LEVELS, UNIT, ZERO, BLOCKS
        )  # fmt: skip


# Blocks of codes per program: each of 128 threads loads 16 bytes; forward with 16-bit numbers 8
# bytes, since more would spill.
_FORWARD_BLOCKS = {8: 8, 4: 16, 2: 16}
_BACKWARD_BLOCKS = {8: 16, 4: 16, 2: 32}
assert (BLOCK, STEP) == (256, 32)

_launch_forward = Launcher(forward_kernel)
_launch_backward = Launcher(backward_kernel)


@functools.cache
def _constants(activation: int, bits: int, itemsize: int) -> tuple[Any, ...]:
    """The constants of the forward and of the backward kernel."""
    table = table_of(activation, bits)
    levels = table.levels.get(bits, ())
    thresholds = tuple(table.thresholds(bits)) if levels else ()
    row, unit, zero = POINTWISE[activation], table.unit, table.zero
    formula = (getattr(formulas, f"{row.name}_{part}") for part in ("forward", "backward"))
    return (
        (*formula, row.saves == "output", bits, thresholds, unit, zero, _FORWARD_BLOCKS[itemsize]),
        (bits, levels, unit, zero, _BACKWARD_BLOCKS[itemsize]),
    )


def _programs(n: int, constants: tuple[Any, ...]) -> int:
    return cdiv(n, BLOCK * constants[-1])


def _run(x: Tensor, y: Tensor, activation: int, bits: int) -> Tensor:
    n = x.numel()
    constants, _ = _constants(activation, bits, x.itemsize)
    codes = x.new_empty(packed_bytes(n, bits), dtype=torch.uint8)
    if n:
        variant = (activation, bits)
        _launch_forward(variant, _programs(n, constants), (x, y, codes), (n,), constants)
    return codes


def few_bit(input: Tensor, activation: int, bits: int) -> tuple[Tensor, Tensor]:
    check_dtype("few_bit", input, "input")
    output = torch.empty_like(input)
    x = input if is_dense(input) else output.copy_(input.detach())
    return output, _run(x, output, activation, bits)


def few_bit_(input: Tensor, activation: int, bits: int) -> Tensor:
    check_dtype("few_bit_", input, "input")
    if is_dense(input):
        return _run(input, input, activation, bits)
    output, codes = few_bit(input, activation, bits)
    input.copy_(output)
    return codes


def few_bit_backward(grad: Tensor, codes: Tensor, activation: int, bits: int) -> Tensor:
    check_dtype("few_bit_backward", grad, "grad")
    _, constants = _constants(activation, bits, grad.itemsize)
    n = grad.numel()
    if codes.dtype is not torch.uint8 or codes.shape != (packed_bytes(n, bits),):
        raise RuntimeError(
            f"fusedtrain::few_bit_backward: codes must be {packed_bytes(n, bits)} numbers of "
            "uint8, those of a tensor as large as grad"
        )
    grad_input = torch.empty_like(grad)
    if n:
        tensors = (dense_like(grad, grad_input), codes.contiguous(), grad_input)
        variant = (activation, bits)
        _launch_backward(variant, _programs(n, constants), tensors, (n,), constants)
    return grad_input
