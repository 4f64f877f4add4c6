"""The sweep over gradients: shares of the sums of each tensor."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from ._optimizer_memory import (
    ENTRY,
    FIRST_CHUNK,
    FIRST_PIECE,
    INNER,
    NUMEL,
    UNITS,
    memory,
    read,
    read_weights,
    weights_memory,
)
from .optimizer_rules import unscale


@triton.jit
def measured(
    grad, param, master, at, inside, factor,
    PARAMETERS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Numbers of each element: 1 if the gradient is not finite, g^2, p^2."""
    g = read(grad, at, inside, MASKED, WIDE) * factor
    wide = g.to(tl.float64)
    weight = tl.zeros_like(wide)
    if PARAMETERS:
        weight = read_weights(param, master, at, inside, MASKED, WIDE).to(tl.float64)
    return tl.where(g - g != 0.0, 1, 0), wide * wide, weight * weight


@triton.jit(do_not_specialize=["first"])
def measure_kernel(
    table_ptr, part_ptr, scale_ptr, shares_ptr, first: tl.int64,
    WIDE: tl.constexpr, G: tl.constexpr, P: tl.constexpr, MASTER: tl.constexpr,
    ALIGNED: tl.constexpr, INDEX: tl.constexpr, PARAMETERS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Shares of chunks; or, if INDEX is a dtype (of element numbers), of pieces of units."""
    part = first + tl.program_id(0)
    entry_ptr = table_ptr + tl.load(part_ptr + part) * ENTRY
    factor = unscale(tl.load(scale_ptr)).to(WIDE)
    grad = memory(entry_ptr, 1, G, ALIGNED)
    param, master = weights_memory(entry_ptr, P, MASTER, ALIGNED)
    numel = tl.load(entry_ptr + NUMEL)
    at = tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.float64)
    weights = tl.zeros((BLOCK,), tl.float64)
    if INDEX is None:
        begin = (part - tl.load(entry_ptr + FIRST_CHUNK)) * CHUNK
        n = tl.minimum(numel - begin, CHUNK).to(tl.int32)
        grad += begin
        param += begin
        master += begin
        for i in range(n // BLOCK):
            b, g2, p2 = measured(
                grad, param, master, i * BLOCK + at, None, factor, PARAMETERS, False, WIDE
            )
            bad += b
            squares += g2
            weights += p2
        if n % BLOCK != 0:
            place = n // BLOCK * BLOCK + at
            b, g2, p2 = measured(
                grad, param, master, place, place < n, factor, PARAMETERS, True, WIDE
            )
            bad += b
            squares += g2
            weights += p2
    else:
        units = tl.load(entry_ptr + UNITS).to(INDEX)
        inner = tl.load(entry_ptr + INNER).to(INDEX)
        of_unit = numel.to(INDEX) // units
        local = (part - tl.load(entry_ptr + FIRST_PIECE)).to(INDEX)
        pieces = tl.cdiv(of_unit, CHUNK)
        unit = local // pieces
        begin = local % pieces * CHUNK
        n = tl.minimum(of_unit - begin, CHUNK)
        for i in range(tl.cdiv(n, BLOCK)):
            local_at = (i * BLOCK + at).to(INDEX)
            within = begin + local_at
            # Element `within` of the unit, which has every `units`-th stretch of `inner` elements.
            place = (within // inner * units + unit) * inner + within % inner
            b, g2, p2 = measured(
                grad, param, master, place, local_at < n, factor, PARAMETERS, True, WIDE
            )
            bad += b
            squares += g2
            weights += p2
    tl.store(shares_ptr + part * 3, tl.sum(bad).to(tl.float64))
    tl.store(shares_ptr + part * 3 + 1, tl.sum(squares))
    tl.store(shares_ptr + part * 3 + 2, tl.sum(weights))
