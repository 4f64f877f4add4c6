"""The scalar parts of the step, on the device: sums of a tensor, decisions about the step, and the
coefficients of each tensor's update.

prepare_kernel has one tensor per lane, spread over the multiprocessors: consumer GPUs have few
float64 units. Every program computes the sums over all tensors itself, in one order.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from ..reference import optimizers as reference
from ._optimizer_memory import ENTRY, GROUP, NUMBERS, NUMEL, SCALAR, TENSOR
from .optimizer_rules import (
    Facts,
    Trial,
    adaptive_clip_coefficient,
    caution_after,
    clip_coefficient,
    unscale,
)

_WIDTH: tl.constexpr = tl.constexpr(reference.WIDTH)
_FINITE: tl.constexpr = tl.constexpr(reference.MEASURE_FINITE)
_MEASURES: tl.constexpr = tl.constexpr(reference.StepOptions._fields.index("measures"))
_MAX_NORM: tl.constexpr = tl.constexpr(reference.StepOptions._fields.index("max_norm"))
_NORM_EPS: tl.constexpr = tl.constexpr(reference.StepOptions._fields.index("norm_eps"))
_UNIT_FACTOR: tl.constexpr = tl.constexpr(reference.StepOptions._fields.index("unit_factor"))
_UNIT_EPS: tl.constexpr = tl.constexpr(reference.StepOptions._fields.index("unit_eps"))
_LR: tl.constexpr = tl.constexpr(reference.GroupOptions.column("lr"))
_WEIGHT_DECAY: tl.constexpr = tl.constexpr(reference.GroupOptions.column("weight_decay"))
_SIGN: tl.constexpr = tl.constexpr(reference.GroupOptions.column("sign"))
_MAX_LR: tl.constexpr = tl.constexpr(reference.GroupOptions.column("max_lr"))
_CAUTIOUS: tl.constexpr = tl.constexpr(reference.GroupOptions.column("cautious"))
_OF_RULE: tl.constexpr = tl.constexpr(reference.GroupOptions.column("option"))


@triton.jit
def added(shares_ptr, begin, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of the columns of `n` rows of `shares`; without a fourth column its sum is 0."""
    row = tl.arange(0, BLOCK)
    a, b = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    c, d = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for i in range(tl.cdiv(n, BLOCK)):
        pointer = shares_ptr + (begin + i * BLOCK + row) * WIDTH
        inside = i * BLOCK + row < n
        a += tl.load(pointer, mask=inside, other=0.0)
        b += tl.load(pointer + 1, mask=inside, other=0.0)
        c += tl.load(pointer + 2, mask=inside, other=0.0)
        if WIDTH == 4:
            d += tl.load(pointer + 3, mask=inside, other=0.0)
    return tl.sum(a), tl.sum(b), tl.sum(c), tl.sum(d)


@triton.jit
def add_kernel(
    sums_ptr, clipped_ptr, shares_ptr, table_ptr, first_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of a tensor; the fourth column has the squares after clipping its units."""
    line = tl.program_id(0)
    begin = tl.load(first_ptr + line)
    n = tl.load(first_ptr + line + 1) - begin
    a, b, c, d = added(shares_ptr, begin, n, WIDTH, BLOCK)
    tensor = tl.load(table_ptr + line.to(tl.int64) * ENTRY + TENSOR)
    tl.store(sums_ptr + tensor * 3, a)
    tl.store(sums_ptr + tensor * 3 + 1, b)
    tl.store(sums_ptr + tensor * 3 + 2, c)
    if WIDTH == 4:
        tl.store(clipped_ptr + tensor, d)


@triton.jit
def clip_units_kernel(
    factors_ptr, units_ptr, shares_ptr, first_ptr, options_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sums of a unit, and its clip factor."""
    unit = tl.program_id(0).to(tl.int64)
    begin = tl.load(first_ptr + unit)
    n = tl.load(first_ptr + unit + 1) - begin
    bad, squares, weights, _ = added(shares_ptr, begin, n, 3, BLOCK)
    factor = adaptive_clip_coefficient(
        tl.sqrt(squares), tl.sqrt(weights),
        tl.load(options_ptr + _UNIT_FACTOR), tl.load(options_ptr + _UNIT_EPS),
    )  # fmt: skip
    tl.store(factors_ptr + unit, factor)
    tl.store(units_ptr + unit * 4, bad)
    tl.store(units_ptr + unit * 4 + 1, squares)
    tl.store(units_ptr + unit * 4 + 2, weights)
    tl.store(units_ptr + unit * 4 + 3, squares * factor * factor)


@triton.jit
def judge(
    sums_ptr, options_ptr, found_inf_ptr, count, MEASURED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Verdict over all tensors: whether to skip, number of bad elements, norm, clip coefficient."""
    bad, squares = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    if MEASURED:
        for i in range(tl.cdiv(count, BLOCK)):
            at = i * BLOCK + tl.arange(0, BLOCK)
            bad += tl.load(sums_ptr + at * 3, mask=at < count, other=0.0)
            squares += tl.load(sums_ptr + at * 3 + 1, mask=at < count, other=0.0)
    all_bad, norm = tl.sum(bad), tl.sqrt(tl.sum(squares))
    clip = clip_coefficient(
        norm, tl.load(options_ptr + _MAX_NORM), tl.load(options_ptr + _NORM_EPS)
    )
    measures = tl.load(options_ptr + _MEASURES).to(tl.int32)
    overflows = (measures & _FINITE != 0) & (all_bad != 0.0)
    found_inf = tl.load(found_inf_ptr) != 0.0  # nan, too
    return found_inf | overflows, all_bad, norm, clip


@triton.jit
def learning_rate(in_table, rate_ptr):  # equal (other=): rates not loaded are not chosen
    """The rate of each lane: from a tensor on the device if there is one, else from the table."""
    address, wide = tl.load(rate_ptr), tl.load(rate_ptr + 1)
    in_double, in_float = (address != 0) & (wide != 0), (address != 0) & (wide == 0)
    doubles = tl.load(address.to(tl.pointer_type(tl.float64)), mask=in_double, other=0.0)
    floats = tl.load(address.to(tl.pointer_type(tl.float32)), mask=in_float, other=0.0)
    return tl.where(in_double, doubles, tl.where(in_float, floats.to(tl.float64), in_table))


@triton.jit(do_not_specialize=["count", "columns"])
def prepare_kernel(
    k_ptr, table_ptr, sums_ptr, clipped_ptr, tried_ptr, options_ptr, rates_ptr,
    scalars_ptr, control_ptr, scale_ptr, found_inf_ptr, count: tl.int64, columns: tl.int64,
    PREPARE: tl.constexpr, FINISH: tl.constexpr, MEASURED: tl.constexpr, CLIPPED: tl.constexpr,
    TRIED: tl.constexpr, COMMITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes rows of NUMBERS float64 for the update: for the step, whether to skip, the number of
    applied steps, and the inverse scale; then for each tensor its coefficients. Before a trial of
    the update it commits nothing. Sums that were not measured are written as zeros.
    """
    skip, bad, norm, clip = judge(sums_ptr, options_ptr, found_inf_ptr, count, MEASURED, BLOCK)
    if tl.program_id(0) == 0:
        skipped, applied = skip.to(tl.float32), tl.load(control_ptr + 5)
        tl.store(k_ptr, skipped)
        tl.store(k_ptr + 1, applied)
        tl.store(k_ptr + 2, unscale(tl.load(scale_ptr)).to(tl.float64))
        if COMMITS:
            measured = tl.load(options_ptr + _MEASURES) != 0.0
            tl.store(control_ptr, skipped)
            tl.store(control_ptr + 1, tl.load(control_ptr + 1) + skipped)
            tl.store(control_ptr + 2, tl.where(measured, norm, float("nan")))
            tl.store(control_ptr + 3, tl.where(measured, clip, 1.0))
            tl.store(control_ptr + 4, tl.where(measured, bad, 0.0))
            tl.store(control_ptr + 5, applied + 1.0 - skipped)

    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = line < count  # equal (<= for <): the lane after the last stores the same line
    entry_ptr = table_ptr + tl.minimum(line, count - 1) * ENTRY
    tensor, group = tl.load(entry_ptr + TENSOR), tl.load(entry_ptr + GROUP)
    group_ptr = options_ptr + (1 + group) * _WIDTH
    o_ptr = group_ptr + _OF_RULE
    scalar_ptr = scalars_ptr + tl.load(entry_ptr + SCALAR)
    steps = tl.load(scalar_ptr)
    squares, weights = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    sums_ptr += tensor * 3
    if MEASURED:
        squares = tl.load(clipped_ptr + tensor) if CLIPPED else tl.load(sums_ptr + 1)
        weights = tl.load(sums_ptr + 2)
    else:
        for i in tl.static_range(3):
            # equal (store: mask dropped): lanes after the last store the same line
            tl.store(sums_ptr + i, squares, mask=inside)
    facts = Facts(
        lr=learning_rate(tl.load(group_ptr + _LR), rates_ptr + group * 2),
        weight_decay=tl.load(group_ptr + _WEIGHT_DECAY),
        max_lr=tl.load(group_ptr + _MAX_LR),
        cautious=tl.load(group_ptr + _CAUTIOUS),
        option=(
            tl.load(o_ptr), tl.load(o_ptr + 1), tl.load(o_ptr + 2), tl.load(o_ptr + 3),
            tl.load(o_ptr + 4), tl.load(o_ptr + 5), tl.load(o_ptr + 6), tl.load(o_ptr + 7),
        ),
        step=steps.to(tl.float64) + 1.0,
        grad_norm=tl.sqrt(squares) * clip,
        param_norm=tl.sqrt(weights),
        moments=(tl.load(scalar_ptr + columns), tl.load(scalar_ptr + 2 * columns)),
    )  # fmt: skip
    k = PREPARE(facts)
    size, caution = k.size, 1.0
    if TRIED:
        tried_ptr += tensor * 3
        trial = Trial(
            tl.load(tried_ptr), tl.load(tried_ptr + 1), tl.load(tried_ptr + 2),
            tl.load(entry_ptr + NUMEL).to(tl.float64),
        )  # fmt: skip
        caution = caution_after(k, trial)
        if FINISH is not None:
            size *= FINISH(facts, k, caution, trial)
    row_ptr = k_ptr + (1 + tensor) * NUMBERS
    gradient = unscale(tl.load(scale_ptr)).to(tl.float64) * clip * tl.load(group_ptr + _SIGN)
    tl.store(row_ptr, gradient, mask=inside)
    tl.store(row_ptr + 1, k.keep, mask=inside)
    tl.store(row_ptr + 2, size, mask=inside)
    tl.store(row_ptr + 3, k.late_decay, mask=inside)
    tl.store(row_ptr + 4, caution, mask=inside)
    tl.store(row_ptr + 5, k.cautious, mask=inside)
    for i in tl.static_range(len(k.c)):
        tl.store(row_ptr + 8 + i, k.c[i], mask=inside)
    if COMMITS:
        commits = inside & (skip == 0)
        tl.store(scalar_ptr, steps + 1.0, mask=commits)
        tl.store(scalar_ptr + columns, k.moments[0], mask=commits)
        tl.store(scalar_ptr + 2 * columns, k.moments[1], mask=commits)
