"""The kernels of batch norm with activation; batch_norm.py launches them.

    s = (x - mean) invstd weight + bias, times branch_scale of the sample, plus the residual
    y = f(s)

Programs write shares of the sums to separate places. merge_kernel and finish_kernel add the shares
in a fixed order, so results are the same bits every time. Vectors (one value per channel;
branch_scale: per sample) have the dtype of the math.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from ._batch_norm_tiles import (
    along,
    channel_places,
    first_tile,
    of_channels,
    of_samples,
    places,
    places_of_shares,
    spread,
)
from .pointwise import parameter
from .vecmath import at_least, widen

# Kinds of the saved tensor.
SAVED_NOTHING: tl.constexpr = tl.constexpr(0)
SAVED_RESIDUAL: tl.constexpr = tl.constexpr(1)
SAVED_OUTPUT: tl.constexpr = tl.constexpr(2)


# --- forward


@triton.jit(do_not_specialize=["rows", "units", "channels"])
def stats_kernel(
    x_ptr, shares_ptr, rows: tl.int64, units: tl.int64, channels: tl.int64,
    STEPS: tl.constexpr, PLANES: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    INDEX: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Shares: the mean, and the sum of squared deviations from it.

    The program sums deviations from the mean of its first tile (shifted data with a sample mean as
    shift: Chan, Golub, LeVeque, Algorithms for computing the sample variance, 1983). If the shift
    were one element, an outlier, then `squares` would be the remainder of count * outlier^2 after
    cancellation; a tile's mean is off by at most sqrt(squares / its count).
    """
    columns = units * UNIT  # shows Triton whether rows start on 16 bytes
    row, column, begin = first_tile(columns, STEPS, PLANES, INDEX, HEIGHT, WIDTH)
    left = (columns if PLANES else rows) - begin
    at, inside = places(row, column, rows, columns)
    x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    count = tl.minimum(left, WIDTH if PLANES else HEIGHT).to(x.dtype)
    shift = along(x, PLANES) / count
    shift = tl.where(shift - shift == 0.0, shift, 0.0)  # only the sums see an infinity
    shifts = spread(shift, PLANES)
    deviation = tl.where(inside, x - shifts, 0.0)
    total = deviation
    squares = deviation * deviation
    for _ in range(1, STEPS):
        if PLANES:
            column += WIDTH
        else:
            row += HEIGHT
        at, inside = places(row, column, rows, columns)
        x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
        deviation = tl.where(inside, x - shifts, 0.0)
        total += deviation
        squares += deviation * deviation
    count = tl.minimum(left, STEPS * (WIDTH if PLANES else HEIGHT)).to(tl.float64)
    sums = along(total, PLANES).to(tl.float64)
    mean = shift.to(tl.float64) + sums / count
    squares = at_least(along(squares, PLANES).to(tl.float64) - sums * sums / count, 0.0)
    at, there, n = places_of_shares(
        row, column, rows, columns, channels, STEPS, PLANES, HEIGHT, WIDTH
    )
    tl.store(shares_ptr + at, mean, mask=there)
    tl.store(shares_ptr + n + at, squares, mask=there)


@triton.jit(do_not_specialize=["channels", "n", "pieces", "span", "length", "count"])
def merge_kernel(
    mean_ptr, variance_ptr, running_mean_ptr, running_var_ptr, shares_ptr,
    channels: tl.int64, n: tl.int64, pieces: tl.int64, span: tl.int64, length: tl.int64,
    count: tl.int64, momentum: tl.float64, eps: tl.float64,
    INVERT: tl.constexpr, RUNNING: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The statistics of HEIGHT channels from `n` shares each, in float64.

    A share covers a stretch of `span` elements; `pieces` stretches make up `length`, and the last
    may be shorter. INVERT: invstd is stored in place of the variance.
    """
    channel = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    share = tl.arange(0, WIDTH)
    sums = tl.zeros((HEIGHT, WIDTH), tl.float64)
    for step in range(tl.cdiv(n, WIDTH)):
        j = step * WIDTH + share
        # equal (<= for < #1): the channel after the last is not stored
        inside = (channel < channels)[:, None] & (j < n)[None, :]
        of_share = tl.minimum(span, length - j % pieces * span).to(tl.float64)[None, :]
        mean = tl.load(shares_ptr + channel[:, None] * n + j[None, :], mask=inside, other=0.0)
        sums += mean * of_share
    elements = count.to(tl.float64)
    mean = tl.sum(sums, axis=1) / elements
    squares = tl.zeros((HEIGHT, WIDTH), tl.float64)
    for step in range(tl.cdiv(n, WIDTH)):
        j = step * WIDTH + share
        at = channel[:, None] * n + j[None, :]
        # equal (<= for < #1): the channel after the last is not stored
        inside = (channel < channels)[:, None] & (j < n)[None, :]
        of_share = tl.minimum(span, length - j % pieces * span).to(tl.float64)[None, :]
        deviation = tl.load(shares_ptr + at, mask=inside, other=0.0) - mean[:, None]
        within = tl.load(shares_ptr + channels * n + at, mask=inside, other=0.0)
        squares += tl.where(inside, within + of_share * deviation * deviation, 0.0)
    variance = tl.sum(squares, axis=1) / elements
    inside = channel < channels
    wide = mean_ptr.dtype.element_ty
    tl.store(mean_ptr + channel, mean.to(wide), mask=inside)
    if INVERT:
        tl.store(variance_ptr + channel, (1.0 / tl.sqrt(variance + eps)).to(wide), mask=inside)
    else:
        tl.store(variance_ptr + channel, variance.to(wide), mask=inside)
    if RUNNING:
        unbiased = variance * (elements / (elements - 1.0))
        move(running_mean_ptr + channel, mean, momentum, inside)
        move(running_var_ptr + channel, unbiased, momentum, inside)


@triton.jit
# equal (other=): channels beyond the last are not stored
def move(pointers, value, momentum, inside):
    """torch.lerp, with its two forms: a momentum of 1 gives the value to the bit."""
    old = tl.load(pointers, mask=inside, other=0.0).to(tl.float64)
    difference = value - old
    near = old + momentum * difference
    far = value - difference * (1.0 - momentum)
    # equal (<= for <): at a half both forms are old / 2 + value / 2, but for rounding in float64
    moved = tl.where(momentum < 0.5, near, far)
    tl.store(pointers, moved.to(pointers.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["channels"])
def invert_kernel(  # equal (other=): channels beyond the last are not stored
    mean_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, channels: tl.int64, eps: tl.float64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    tl.store(mean_ptr + at, tl.load(running_mean_ptr + at, mask=inside), mask=inside)
    variance = tl.load(running_var_ptr + at, mask=inside, other=1.0).to(tl.float64)
    invstd = (1.0 / tl.sqrt(variance + eps)).to(invstd_ptr.dtype.element_ty)
    tl.store(invstd_ptr + at, invstd, mask=inside)


@triton.jit(do_not_specialize=["rows", "units", "channels", "inner", "rows_a_sample"])
def normalise_kernel(  # equal (other=): elements beyond the data are not stored
    x_ptr, residual_ptr, y_ptr, branch_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, rows_a_sample: tl.int64,
    a: tl.float64, b: tl.float64,
    FORMULA: tl.constexpr, STORED: tl.constexpr, RESIDUAL: tl.constexpr, BRANCH: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PLANES: tl.constexpr, LAST: tl.constexpr,
    UNIT: tl.constexpr, INDEX: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT
    row, column, _ = first_tile(columns, 1, PLANES, INDEX, HEIGHT, WIDTH)
    at, inside = places(row, column, rows, columns)
    channel, there = channel_places(
        row, column, rows, columns, channels, inner, PLANES, LAST, INDEX
    )
    mean, _, scale, offset = of_channels(
        mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, there, WEIGHT, BIAS, PLANES
    )
    x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    s = (x - mean) * scale + offset
    if BRANCH:
        s *= of_samples(branch_ptr, row, rows, channels.to(INDEX), rows_a_sample.to(INDEX), PLANES)
    if RESIDUAL:
        s += widen(tl.load(residual_ptr + at, mask=inside, other=0.0))
    if FORMULA is not None:
        s = FORMULA(s, parameter(a, s, STORED), parameter(b, s, STORED))
    tl.store(y_ptr + at, s.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "units", "channels", "inner"])
def restore_kernel(  # equal (other=): elements beyond the data are not stored
    y_ptr, x_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, below: tl.float64,
    largest: tl.float64,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PLANES: tl.constexpr, LAST: tl.constexpr,
    UNIT: tl.constexpr, INDEX: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Recomputes the input x from the output y."""
    columns = units * UNIT
    row, column, _ = first_tile(columns, 1, PLANES, INDEX, HEIGHT, WIDTH)
    at, inside = places(row, column, rows, columns)
    channel, there = channel_places(
        row, column, rows, columns, channels, inner, PLANES, LAST, INDEX
    )
    mean, _, scale, offset = of_channels(
        mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, there, WEIGHT, BIAS, PLANES
    )
    y = widen(tl.load(y_ptr + at, mask=inside, other=0.0))
    # equal (>= for >): 0 times what is finite is 0
    s = tl.where(y > 0, y, y * tl.full((), below, y.dtype))
    x = (s - offset) * (1.0 / scale) + mean
    most = tl.full((), largest, y.dtype)
    # equal (<= for <): a number that is the bound becomes the bound
    x = tl.where(x > most, most, tl.where(x < -most, -most, x))
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=inside)


# --- backward


@triton.jit
def gradient_of_sum(
    g, x, saved, branch, mean, scale, offset, a, b,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, STORED: tl.constexpr,
    SAVED: tl.constexpr, BRANCH: tl.constexpr,
):  # fmt: skip
    """g f'(s). FORWARD recomputes the output, if BACKWARD takes the output and it is not saved."""
    if BACKWARD is not None:
        s = saved
        if SAVED != SAVED_OUTPUT:
            s = (x - mean) * scale + offset
            if BRANCH:
                s *= branch
            if SAVED == SAVED_RESIDUAL:
                s += saved
            if FORWARD is not None:
                s = FORWARD(s, parameter(a, s, STORED), parameter(b, s, STORED))
        g = BACKWARD(g, s, parameter(a, s, STORED), parameter(b, s, STORED))
    return g


@triton.jit(do_not_specialize=["rows", "units", "channels", "inner", "rows_a_sample"])
def reduce_kernel(  # equal (other=): sums take a zero where there is no element
    g_ptr, x_ptr, saved_ptr, gr_ptr, branch_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr,
    shares_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, rows_a_sample: tl.int64,
    a: tl.float64, b: tl.float64,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, STORED: tl.constexpr, SAVED: tl.constexpr,
    BRANCH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    STEPS: tl.constexpr, PLANES: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr,
    INDEX: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Shares of the sums of d and of d (x - mean) invstd; the residual's gradient."""
    columns = units * UNIT
    row, column, _ = first_tile(columns, STEPS, PLANES, INDEX, HEIGHT, WIDTH)
    channel, there = channel_places(
        row, column, rows, columns, channels, inner, PLANES, LAST, INDEX
    )
    mean, invstd, scale, offset = of_channels(
        mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, there, WEIGHT, BIAS, PLANES
    )
    sums = tl.zeros((HEIGHT, WIDTH), shares_ptr.dtype.element_ty)
    products = tl.zeros((HEIGHT, WIDTH), shares_ptr.dtype.element_ty)
    for _ in range(STEPS):
        at, inside = places(row, column, rows, columns)
        g = widen(tl.load(g_ptr + at, mask=inside, other=0.0))
        x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
        saved, branch = x, x
        if SAVED != SAVED_NOTHING:
            saved = widen(tl.load(saved_ptr + at, mask=inside, other=0.0))
        if BRANCH:
            branch = of_samples(
                branch_ptr, row, rows, channels.to(INDEX), rows_a_sample.to(INDEX), PLANES
            )
        d = gradient_of_sum(
            g, x, saved, branch, mean, scale, offset, a, b, FORWARD, BACKWARD, STORED, SAVED, BRANCH
        )
        if RESIDUAL:
            tl.store(gr_ptr + at, d.to(gr_ptr.dtype.element_ty), mask=inside)
        if BRANCH:
            d *= branch
        d = tl.where(inside, d, 0.0)  # outside, a formula may have made NaN
        sums += d
        products += d * ((x - mean) * invstd)
        if PLANES:
            column += WIDTH
        else:
            row += HEIGHT
    at, there, n = places_of_shares(
        row, column, rows, columns, channels, STEPS, PLANES, HEIGHT, WIDTH
    )
    tl.store(shares_ptr + at, along(sums, PLANES), mask=there)
    tl.store(shares_ptr + n + at, along(products, PLANES), mask=there)


@triton.jit(do_not_specialize=["channels", "n", "count"])
def finish_kernel(
    sums_ptr, gw_ptr, gb_ptr, shares_ptr, channels: tl.int64, n: tl.int64, count: tl.int64,
    AFFINE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Both sums of HEIGHT channels, in float64, divided by `count`. The undivided sums are the
    gradients of weight and bias."""
    channel = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    share = tl.arange(0, WIDTH)
    sums = tl.zeros((HEIGHT, WIDTH), tl.float64)
    products = tl.zeros((HEIGHT, WIDTH), tl.float64)
    for step in range(tl.cdiv(n, WIDTH)):
        j = step * WIDTH + share
        at = channel[:, None] * n + j[None, :]
        inside = (channel < channels)[:, None] & (j < n)[None, :]
        sums += tl.load(shares_ptr + at, mask=inside, other=0.0).to(tl.float64)
        at += channels * n
        products += tl.load(shares_ptr + at, mask=inside, other=0.0).to(tl.float64)
    inside = channel < channels
    of_d, of_products = tl.sum(sums, axis=1), tl.sum(products, axis=1)
    tl.store(sums_ptr + channel, of_d / count.to(tl.float64), mask=inside)
    tl.store(sums_ptr + channels + channel, of_products / count.to(tl.float64), mask=inside)
    if AFFINE:
        tl.store(gb_ptr + channel, of_d.to(gb_ptr.dtype.element_ty), mask=inside)
        tl.store(gw_ptr + channel, of_products.to(gw_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "units", "channels", "inner", "rows_a_sample"])
def apply_kernel(  # equal (other=): elements beyond the data are not stored
    g_ptr, x_ptr, saved_ptr, gx_ptr, gr_ptr, branch_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr,
    averages_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64, rows_a_sample: tl.int64,
    a: tl.float64, b: tl.float64,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, STORED: tl.constexpr, SAVED: tl.constexpr,
    BRANCH: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    INPUT: tl.constexpr, AVERAGES: tl.constexpr, PLANES: tl.constexpr, LAST: tl.constexpr,
    UNIT: tl.constexpr, INDEX: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of input (if INPUT) and residual (if RESIDUAL)."""
    columns = units * UNIT
    row, column, _ = first_tile(columns, 1, PLANES, INDEX, HEIGHT, WIDTH)
    at, inside = places(row, column, rows, columns)
    channel, there = channel_places(
        row, column, rows, columns, channels, inner, PLANES, LAST, INDEX
    )
    mean, invstd, scale, offset = of_channels(
        mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, there, WEIGHT, BIAS, PLANES
    )
    g = widen(tl.load(g_ptr + at, mask=inside, other=0.0))
    x, saved, branch = g, g, g
    if AVERAGES or (BACKWARD is not None and SAVED != SAVED_OUTPUT):
        x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    if SAVED != SAVED_NOTHING:
        saved = widen(tl.load(saved_ptr + at, mask=inside, other=0.0))
    if BRANCH:
        branch = of_samples(
            branch_ptr, row, rows, channels.to(INDEX), rows_a_sample.to(INDEX), PLANES
        )
    d = gradient_of_sum(
        g, x, saved, branch, mean, scale, offset, a, b, FORWARD, BACKWARD, STORED, SAVED, BRANCH
    )
    if RESIDUAL:
        tl.store(gr_ptr + at, d.to(gr_ptr.dtype.element_ty), mask=inside)
    if INPUT:
        if BRANCH:
            d *= branch
        d *= scale
        if AVERAGES:  # a channel's factors are multiplied first, which takes fewer registers
            average = tl.load(averages_ptr + channel, mask=there, other=0.0).to(d.dtype)
            averages_ptr += channels
            slope = tl.load(averages_ptr + channel, mask=there, other=0.0).to(d.dtype)
            d -= spread(average, PLANES) * scale
            d -= (x - mean) * (spread(slope, PLANES) * invstd * scale)
        tl.store(gx_ptr + at, d.to(gx_ptr.dtype.element_ty), mask=inside)
