"""Addresses, reads and writes of a tensor in kernels of many tensors."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from . import _optimizer_tables as _tables
from .split_weights import follow_weights, join_weights
from .state_codes import LANES, SHARED_BY, STATE_STREAM, dequantise, quantise
from .stochastic_rounding import random_bits
from .vecmath import widen

ENTRY: tl.constexpr = tl.constexpr(_tables.ENTRY)
NUMEL: tl.constexpr = tl.constexpr(_tables.NUMEL)
FIRST_CHUNK: tl.constexpr = tl.constexpr(_tables.FIRST_CHUNK)
TENSOR: tl.constexpr = tl.constexpr(_tables.TENSOR)
SCALAR: tl.constexpr = tl.constexpr(_tables.SCALAR)
UNITS: tl.constexpr = tl.constexpr(_tables.UNITS)
INNER: tl.constexpr = tl.constexpr(_tables.INNER)
FIRST_UNIT: tl.constexpr = tl.constexpr(_tables.FIRST_UNIT)
FIRST_PIECE: tl.constexpr = tl.constexpr(_tables.FIRST_PIECE)
GROUP: tl.constexpr = tl.constexpr(_tables.GROUP)
SCALES: tl.constexpr = tl.constexpr(_tables.SCALES)
NUMBERS: tl.constexpr = tl.constexpr(_tables.NUMBERS)


@triton.jit
def memory(entry_ptr, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """One of a tensor's buffers, from its address."""
    pointer = tl.load(entry_ptr + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # equal (branch turned): a hint for the compiler; test_code sees it
        # equal (constant): a hint for the compiler, which takes the power of two in it
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def read(pointer, at, inside, MASKED: tl.constexpr, WIDE: tl.constexpr):
    if MASKED:
        return widen(tl.load(pointer + at, mask=inside, other=0.0)).to(WIDE)
    else:
        return widen(tl.load(pointer + at)).to(WIDE)


@triton.jit
def weights_memory(
    entry_ptr, P: tl.constexpr, MASTER: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Parameter and master; where there is no master, the parameter twice."""
    param = memory(entry_ptr, 0, P, ALIGNED)
    master = param
    if MASTER is not None:
        master = memory(entry_ptr, 5, MASTER, ALIGNED)
    return param, master


@triton.jit
def read_weights(param, master, at, inside, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """The weights that rules compute with: masters, or parameters joined with corrections. Masters
    that follow their parameter are of uint32."""
    E: tl.constexpr = master.dtype.element_ty
    if tl.uint32 == E or tl.int16 == E or tl.int8 == E:
        if MASKED:
            upper = tl.load(param + at, mask=inside, other=0.0)
            correction = tl.load(master + at, mask=inside, other=0)
        else:
            upper = tl.load(param + at)
            correction = tl.load(master + at)
        if tl.uint32 == E:
            return follow_weights(correction, upper)
        else:
            return join_weights(upper, correction, E.primitive_bitwidth)
    else:
        return read(master, at, inside, MASKED, WIDE)


@triton.jit
def write(pointer, at, inside, values, MASKED: tl.constexpr):
    if pointer.dtype.element_ty.primitive_bitwidth == 16 and values.dtype == tl.float64:
        values = values.to(tl.float32)  # there is no direct conversion
    values = values.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + at, values, mask=inside)
    else:
        tl.store(pointer + at, values)


@triton.jit
def state_memory(
    entry_ptr, begin, param, K: tl.constexpr, S: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """State K from element `begin` on, and its scales; what does not exist is `param`."""
    state, scales = param, param
    if S is not None:
        state = memory(entry_ptr, 2 + K, S, ALIGNED) + begin
    if state.dtype.element_ty == tl.int8 or state.dtype.element_ty == tl.uint8:
        scales = memory(entry_ptr, SCALES + K, tl.float32, False) + begin // LANES
    return state, scales


@triton.jit
def read_state(state, scales, start, n, at, inside, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """The elements `at`, which begin with element `start` of `n`."""
    if state.dtype.element_ty == tl.int8 or state.dtype.element_ty == tl.uint8:
        group = start // LANES + tl.arange(0, at.shape[0] // LANES)
        if MASKED:
            # equal (other=): `write_state` takes 0 for elements outside
            codes = tl.load(state + at, mask=inside, other=0)
            scale = tl.load(scales + group, mask=group * LANES < n, other=0.0)
        else:
            codes = tl.load(state + at)
            scale = tl.load(scales + group)
        return dequantise(codes, scale)
    else:
        return read(state, at, inside, MASKED, WIDE)


@triton.jit
def write_state(
    state, scales, begin, start, n, at, inside, values, key, K: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """State K of the elements `at`. Element 0 is element `begin` of the tensor, whose SHARED_BY
    groups at a time count from STATE_STREAM (K + 1) on for their random numbers."""
    if state.dtype.element_ty == tl.int8 or state.dtype.element_ty == tl.uint8:
        group = start // LANES + tl.arange(0, at.shape[0] // LANES)
        random = random_bits((begin // LANES + group) // SHARED_BY + STATE_STREAM * (K + 1), key)
        if MASKED:  # a rule may be nonzero outside
            values = tl.where(inside, values, 0.0)
        codes, scale = quantise(values, random, state.dtype.element_ty == tl.int8)
        if MASKED:
            tl.store(state + at, codes, mask=inside)
            tl.store(scales + group, scale, mask=group * LANES < n)
        else:
            tl.store(state + at, codes)
            tl.store(scales + group, scale)
    else:
        write(state, at, inside, values, MASKED)
