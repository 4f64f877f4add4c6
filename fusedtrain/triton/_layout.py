"""What the launchers ask of a tensor's strides (csrc/checks.h, in Python), and how it is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor


def is_dense(t: Tensor) -> bool:
    """Every element once, no gaps: the data can be walked as one flat array."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.size(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def dense_like(t: Tensor, model: Tensor) -> Tensor:
    """`t` with the layout of `model`, a dense tensor of the same sizes; copied where it differs."""
    strides, wanted = t.stride(), model.stride()
    if strides == wanted:
        return t
    if all(s == w or n == 1 for s, w, n in zip(strides, wanted, t.size(), strict=True)):
        return t
    return torch.empty_like(model).copy_(t.detach())


def channel_view(t: Tensor) -> tuple[int, int, int]:
    """A dense tensor as rows x channels x inner in memory order, channels being dimension 1."""
    numel = t.numel()
    if t.dim() < 2 or t.size(1) == 1 or numel == 0:
        return 1, 1, numel
    channels, inner = t.size(1), t.stride(1)
    # Dense: the dimensions of smaller stride fill `inner` elements, the others are the rows.
    return numel // (channels * inner), channels, inner


def cdiv(a: int, b: int) -> int:
    """Triton's own takes 1 us, and the next one 2."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest one that is not below `n`."""
    return 1 << (n - 1).bit_length()


# Elements of a program, by the bytes of one. Up to four loads of 16 bytes in flight in each of 128
# threads, and 16 elements: 32 registers on sm_90 for most formulas, with which a multiprocessor
# holds all its threads.
FORWARD_BLOCK = {8: 1024, 4: 2048, 2: 2048}
BACKWARD_BLOCK = {8: 512, 4: 1024, 2: 2048}
# Enough for the multiprocessors of a large GPU; beyond that, programs take several blocks each.
_PROGRAMS = 1024


def steps_of(blocks: int, programs: int) -> int:
    """How many of the `blocks` that are summed up one of `programs` takes: a power of two."""
    wanted = min(16, blocks, programs // _PROGRAMS)
    return 1 << max(0, wanted.bit_length() - 1)


class Tiles(NamedTuple):
    """How a tensor of rows x channels x inner is cut: a matrix, and the sides of its tiles."""

    rows: int
    columns: int
    planes: bool  # a row is one channel's plane; else it goes through all channels
    unit: int  # what divides the columns: unit_of()
    height: int
    width: int


def unit_of(*lengths: int) -> int:
    """The largest power of two that divides all of them, 8 at most, which is 16 bytes of the
    smallest dtype: kernels are compiled for it, and their vectors are no longer."""
    together = 8
    for length in lengths:
        together |= length
    return together & -together


def tiles_of(rows: int, channels: int, inner: int, block: int) -> Tiles:
    columns = channels * inner
    # Planes where they are long, unless only whole rows start on 16 bytes.
    planes = inner >= 256 and (inner % 16 == 0 or columns % 16 != 0 or rows < 16)
    if planes:
        rows, columns = rows * channels, inner
    width = min(256 if planes else 128, power_of_two(columns))
    height = min(block // width, power_of_two(rows))
    width = min(block // height, power_of_two(columns))
    return Tiles(rows, columns, planes, unit_of(columns), height, width)


def check_same(name: str, a: Tensor, b: Tensor, name_a: str, name_b: str) -> None:
    for what, same in (
        ("have the same shape", a.size() == b.size()),
        ("have the same dtype", a.dtype == b.dtype),
        ("be on the same device", a.device == b.device),
    ):
        if not same:
            raise RuntimeError(f"fusedtrain::{name}: {name_a} and {name_b} must {what}")


def index_of(tiles: Tiles) -> Any:
    """The dtype of row and column numbers."""
    return tl.int32 if max(tiles.rows, tiles.columns) < 2**30 else tl.int64
