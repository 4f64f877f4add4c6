"""The kernels of the pointwise chains; chains.py launches them.

A tensor with channels is a matrix, cut into tiles. Either every row is a plane of one sample and
channel (PLANES), or the columns hold all channels and each sample has `per_sample` rows. Shares of
sums are of the rows, or of the columns, of a tile: at places of their own.

Lengths of rows and distances between them are given in UNITs, a constant: so Triton sees which of
its vectors (16 bytes at most) lie within a row, and on a multiple of their size.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from .pointwise import parameter
from .vecmath import clamp, widen

_SIZES = ["rows", "units", "channels", "inner", "per_sample"]


@triton.jit
def number(p, x):
    """The float64 argument in the dtype of `x`."""
    return tl.full((), p, x.dtype)


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


@triton.jit
def tile_of_runs(rows, n, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Numbers of rows and columns of a program's tile, and which elements exist."""
    across = tl.cdiv(n, WIDTH)
    program = tl.program_id(0).to(tl.int64)
    row = (program // across * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    column = (program % across * WIDTH + tl.arange(0, WIDTH))[None, :]
    return row, column, (row < rows) & (column < n)


@triton.jit(do_not_specialize=["rows", "units", "gate_units", "value_units"])
def gated_kernel(
    gate_ptr, value_ptr, y_ptr, rows: tl.int64, units: tl.int64, gate_units: tl.int64,
    value_units: tl.int64, a: tl.float64, b: tl.float64,
    FORWARD: tl.constexpr, STORED: tl.constexpr, UNIT: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    n = units * UNIT
    row, column, inside = tile_of_runs(rows, n, HEIGHT, WIDTH)
    at = row * (gate_units * UNIT) + column
    gate = widen(tl.load(gate_ptr + at, mask=inside, other=0.0))
    at = row * (value_units * UNIT) + column
    value = widen(tl.load(value_ptr + at, mask=inside, other=0.0))
    y = apply(FORWARD, gate, a, b, STORED) * value
    tl.store(y_ptr + row * n + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "rows",
        "units",
        "gate_units",
        "value_units",
        "grad_gate_units",
        "grad_value_units",
    ]
)
def gated_backward_kernel(
    grad_ptr, gate_ptr, value_ptr, grad_gate_ptr, grad_value_ptr,
    rows: tl.int64, units: tl.int64, gate_units: tl.int64, value_units: tl.int64,
    grad_gate_units: tl.int64, grad_value_units: tl.int64, a: tl.float64, b: tl.float64,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, BY_OUTPUT: tl.constexpr, STORED: tl.constexpr,
    UNIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    n = units * UNIT
    row, column, inside = tile_of_runs(rows, n, HEIGHT, WIDTH)
    grad = widen(tl.load(grad_ptr + row * n + column, mask=inside, other=0.0))
    at = row * (gate_units * UNIT) + column
    gate = widen(tl.load(gate_ptr + at, mask=inside, other=0.0))
    at = row * (value_units * UNIT) + column
    value = widen(tl.load(value_ptr + at, mask=inside, other=0.0))
    opened = apply(FORWARD, gate, a, b, STORED)
    saved = opened if BY_OUTPUT else gate
    grad_gate = differentiate(BACKWARD, grad * value, saved, a, b, STORED)
    kind = grad_gate_ptr.dtype.element_ty
    at = row * (grad_gate_units * UNIT) + column
    tl.store(grad_gate_ptr + at, grad_gate.to(kind), mask=inside)
    at = row * (grad_value_units * UNIT) + column
    tl.store(grad_value_ptr + at, (grad * opened).to(kind), mask=inside)


# --- tensors with channels


@triton.jit
def tile(rows, columns, channels, inner, per_sample, PLANES: tl.constexpr, LAST: tl.constexpr,
         HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Numbers of rows and columns of a program's tile, which elements exist, and where their
    coefficients are. In columns a tile has rows of one sample; LAST: each is a channel."""
    across = tl.cdiv(columns, WIDTH)
    first = (tl.program_id(0) % across * WIDTH).to(tl.int64)
    column = first + tl.arange(0, WIDTH)[None, :]
    down = tl.program_id(0).to(tl.int64) // across
    if PLANES:
        row = down * HEIGHT + tl.arange(0, HEIGHT)[:, None]
        inside = (row < rows) & (column < columns)
        coefficient = row // channels // per_sample * channels + row % channels
    else:
        of_sample = tl.cdiv(per_sample, HEIGHT)
        sample = down // of_sample
        within = down % of_sample * HEIGHT + tl.arange(0, HEIGHT)[:, None]
        row = sample * per_sample + within
        inside = (within < per_sample) & (column < columns)
        if LAST:
            coefficient = sample * columns + column
        else:
            coefficient = sample * channels + column // inner
    return row, first, column, inside, coefficient


@triton.jit
def store_sums(shares_ptr, terms, row, column, rows, columns, PLANES: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    across = tl.cdiv(columns, WIDTH)
    if PLANES:
        at = row * across + tl.program_id(0) % across
        sums = tl.sum(terms, axis=1)[:, None]
        tl.store(shares_ptr + at, sums, mask=row < rows)
    else:
        at = tl.program_id(0).to(tl.int64) // across * columns + column
        sums = tl.sum(terms, axis=0)[None, :]
        tl.store(shares_ptr + at, sums, mask=column < columns)


@triton.jit(do_not_specialize=_SIZES)
def scale_kernel(
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


@triton.jit(do_not_specialize=_SIZES)
def scale_backward_kernel(
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


@triton.jit
def keeps(seed_ptr, row, first, column, columns, threshold, ALIGNED: tl.constexpr,
          HEIGHT: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Which elements of a tile are not dropped. ALIGNED: rows begin where blocks of the stream do,
    so that every word of a block serves."""
    if ALIGNED:
        block = (row * columns + first) // 4 + tl.arange(0, WIDTH // 4)[None, :]
    else:
        at = row * columns + column
        block = at // 4
    high = tl.load(seed_ptr + 1)
    low = (block & 0xFFFFFFFF).to(tl.uint32)
    zero = low ^ low
    c2 = zero + (high & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + ((high >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), low, c1, c2, c3)
    if ALIGNED:
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (HEIGHT, WIDTH))
    else:
        which = at % 4
        words = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return words >= tl.full((), threshold, tl.int64).to(tl.uint32)


@triton.jit(do_not_specialize=[*_SIZES, "threshold"])
def bias_act_kernel(
    x_ptr, bias_ptr, seed_ptr, y_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, per_sample: tl.int64,
    threshold: tl.int64, a: tl.float64, b: tl.float64, gain: tl.float64, bound: tl.float64,
    keep: tl.float64,
    FORWARD: tl.constexpr, STORED: tl.constexpr, BIAS: tl.constexpr, CLAMPS: tl.constexpr,
    DROPS: tl.constexpr, ALIGNED: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr,
    LAST: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT
    row, first, column, inside, coefficient = tile(
        rows, columns, channels, inner, per_sample, PLANES, LAST, HEIGHT, WIDTH
    )
    at = row * columns + column
    z = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    if BIAS:
        exists = row < rows if PLANES else column < columns
        z += widen(tl.load(bias_ptr + coefficient, mask=exists, other=0.0))
    y = apply(FORWARD, z, a, b, STORED) * number(gain, z)
    if CLAMPS:
        y = clamp(y, -number(bound, z), number(bound, z))
    if DROPS:
        kept = keeps(seed_ptr, row, first, column, columns, threshold, ALIGNED, HEIGHT, WIDTH)
        y = tl.where(kept, y * number(keep, z), 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*_SIZES, "threshold"])
def bias_act_backward_kernel(
    grad_ptr, saved_ptr, bias_ptr, seed_ptr, grad_input_ptr, shares_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, per_sample: tl.int64,
    threshold: tl.int64, a: tl.float64, b: tl.float64, gain: tl.float64, bound: tl.float64,
    keep: tl.float64,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, BY_OUTPUT: tl.constexpr, STORED: tl.constexpr,
    BIAS: tl.constexpr, CLAMPS: tl.constexpr, DROPS: tl.constexpr, SUMS: tl.constexpr,
    ALIGNED: tl.constexpr, UNIT: tl.constexpr, PLANES: tl.constexpr, LAST: tl.constexpr,
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
        kept = keeps(seed_ptr, row, first, column, columns, threshold, ALIGNED, HEIGHT, WIDTH)
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
