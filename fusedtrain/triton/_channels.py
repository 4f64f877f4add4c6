"""Tensors with channels, as scale_add and bias_act walk them.

A tensor with channels is a matrix, cut into tiles. Either every row is a plane of one sample and
channel (PLANES), or the columns hold all channels and each sample has `per_sample` rows. Shares of
sums are of the rows, or of the columns, of a tile: at places of their own.

The number of columns is given in UNITs, a constant: so Triton sees which of its vectors (16 bytes
at most) lie within a row.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.dtypes import wide_of
from ._layout import cdiv, is_dense, power_of_two, unit_of

# Elements of a tile: 16 bytes of a tensor or twice that in each of 128 threads. So 2,048 threads of
# an sm_90 multiprocessor have 32 KB of one tensor under way or more, where they all fit: up to 32
# registers (computed from ptxas, not measured).
BLOCK = {8: 512, 4: 1024, 2: 1024}
SIZES = ["rows", "units", "channels", "inner", "per_sample"]  # of a kernel: Shape.numbers


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


def sides_of(columns: int, rows: int, block: int) -> tuple[int, int]:
    """Height and width of a tile."""
    width = min(block, max(4, power_of_two(columns)))
    return min(block // width, power_of_two(max(rows, 1))), width


class Shape(NamedTuple):
    """A dense tensor as a matrix, and how it is cut."""

    samples: int
    rows: int  # of a sample
    channels: int
    inner: int
    planes: bool
    height: int
    width: int

    @property
    def matrix(self) -> tuple[int, int]:
        if self.planes:
            return self.samples * self.rows * self.channels, self.inner
        return self.samples * self.rows, self.channels * self.inner

    @property
    def unit(self) -> int:
        return unit_of(self.matrix[1])

    @property
    def numbers(self) -> tuple[int, ...]:
        rows, columns = self.matrix
        return (rows, columns // self.unit, self.channels, self.inner, self.rows)

    @property
    def constants(self) -> tuple[Any, ...]:
        return (
            self.unit,
            self.planes,
            self.inner == 1 and not self.planes,
            self.height,
            self.width,
        )

    @property
    def tiles(self) -> tuple[int, int]:
        """Down and across."""
        rows, columns = self.matrix
        if self.planes:
            return cdiv(rows, self.height), cdiv(columns, self.width)
        return self.samples * cdiv(self.rows, self.height), cdiv(columns, self.width)

    @property
    def programs(self) -> int:
        down, across = self.tiles
        return down * across

    def new_shares(self, model: Tensor, needed: bool) -> Tensor:
        down, across = self.tiles
        rows, columns = self.matrix
        count = rows * across if self.planes else down * columns
        return model.new_empty(count if needed else 0, dtype=wide_of(model))

    def sums(self, shares: Tensor, needed: bool) -> Tensor:
        """Sums of each sample and channel; few numbers, which torch adds up in a fixed order."""
        if not needed:
            return shares
        if self.planes:
            parts = shares.view(self.samples, self.rows, self.channels, self.tiles[1])
        else:
            parts = shares.view(self.samples, -1, self.channels, self.inner)
        return parts.double().sum((1, 3)).to(shares.dtype)


def shape_of(
    name: str, t: Tensor, dim: int, samples: int, blocks: dict[int, int] = BLOCK
) -> tuple[Tensor, Shape]:
    """The tensor in a layout whose channels can be walked, and that."""
    if not -1 <= dim < max(t.dim(), 0):
        raise RuntimeError(f"fusedtrain::{name}: dim is not a dimension of input")
    if samples != 1 and (dim == 0 or t.dim() == 0 or samples != t.size(0)):
        raise RuntimeError(
            f"fusedtrain::{name}: there must be one sample, or as many as in dimension 0"
        )
    if not is_dense(t):
        t = torch.empty_like(t).copy_(t.detach())
    numel = t.numel()
    if samples > 1 and numel and t.stride(0) * t.size(0) != numel:
        t = t.detach().contiguous()
    channels = 1 if dim < 0 else t.size(dim)
    if numel == 0:
        return t, Shape(samples, 0, channels, 1, True, 1, 4)
    inner = numel // samples if channels == 1 else t.stride(dim)
    rows = numel // (samples * channels * inner)
    planes = inner >= 64 or channels == 1
    columns = inner if planes else channels * inner
    height, width = sides_of(
        columns, samples * rows * (channels if planes else 1), blocks[t.itemsize]
    )
    if not planes:
        height = min(height, power_of_two(rows))
    return t, Shape(samples, rows, channels, inner, planes, height, width)


def as_promised(result: Tensor, input: Tensor) -> Tensor:
    """The result in the strides that the op promises."""
    promised = torch.empty_like(input)
    return result if result.stride() == promised.stride() else promised.copy_(result)
