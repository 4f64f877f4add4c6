"""The tiles, the places of shares and the vectors of batch norm's kernels.

The data are a matrix, cut into tiles as in channelwise.py.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_tile(
    columns, STEPS: tl.constexpr, PLANES: tl.constexpr, INDEX: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows and columns of a program, and its start on the summed side, along which it takes STEPS
    tiles."""
    height: tl.constexpr = HEIGHT if PLANES else HEIGHT * STEPS
    width: tl.constexpr = WIDTH * STEPS if PLANES else WIDTH
    across = tl.cdiv(columns, width)
    first_row = (tl.program_id(0) // across * height).to(INDEX)
    first_column = (tl.program_id(0) % across * width).to(INDEX)
    row, column = first_row + tl.arange(0, HEIGHT), first_column + tl.arange(0, WIDTH)
    return row, column, first_column if PLANES else first_row


@triton.jit
def places(row, column, rows, columns):
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    return at, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def places_of_shares(
    row, column, rows, columns, channels,
    STEPS: tl.constexpr, PLANES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The places of shares, a channel's side by side; a mask; the number of all shares."""
    if PLANES:
        across = tl.cdiv(columns, WIDTH * STEPS)
        plane = row.to(tl.int64)
        line = plane % channels * (rows // channels) + plane // channels
        return line * across + tl.program_id(0) % across, row < rows, rows * across
    else:
        down = tl.cdiv(rows, HEIGHT * STEPS)
        program_row = tl.program_id(0) // tl.cdiv(columns, WIDTH)
        return column.to(tl.int64) * down + program_row, column < columns, columns * down


@triton.jit
def along(values, PLANES: tl.constexpr):
    """The sums of the tile along the summed side."""
    return tl.sum(values, axis=1) if PLANES else tl.sum(values, axis=0)


@triton.jit
def spread(values, PLANES: tl.constexpr):
    """One value a channel, in a shape that broadcasts over the tile."""
    return values[:, None] if PLANES else values[None, :]


@triton.jit
def channel_places(
    row, column, rows, columns, channels, inner,
    PLANES: tl.constexpr, LAST: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """The channels of a tile, one-dimensional: Triton 3.6 would load a column of pointers once for
    every element. LAST: the columns are the channels, which load by 16 bytes."""
    if PLANES:
        # equal (<= for <): the row after the last is not stored
        return row % channels.to(INDEX), row < rows
    elif LAST:
        return column, column < columns
    else:
        return column // inner.to(INDEX), column < columns


@triton.jit
def of_channels(  # equal (other=): elements beyond the data are neither stored nor added
    mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, there,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Mean, invstd, and the factor and the offset of (x - mean)."""
    mean = tl.load(mean_ptr + channel, mask=there, other=0.0)
    invstd = tl.load(invstd_ptr + channel, mask=there, other=0.0)
    scale, offset = invstd, tl.zeros_like(mean)
    if WEIGHT:
        scale = invstd * tl.load(weight_ptr + channel, mask=there, other=0.0)
    if BIAS:
        offset = tl.load(bias_ptr + channel, mask=there, other=0.0)
    return (
        spread(mean, PLANES), spread(invstd, PLANES), spread(scale, PLANES), spread(offset, PLANES)
    )  # fmt: skip


@triton.jit
# equal (other=): elements beyond the data are neither stored nor added
def of_samples(branch_ptr, row, rows, channels, rows_a_sample, PLANES: tl.constexpr):
    sample = (row // channels if PLANES else row) // rows_a_sample
    return tl.load(branch_ptr + sample, mask=row < rows, other=0.0)[:, None]
