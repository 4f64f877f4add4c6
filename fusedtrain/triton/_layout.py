"""Demands of the launchers on a tensor's strides (as csrc/bindings/checks.h), and how it is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor


def is_dense(t: Tensor) -> bool:
    """Whether the memory has each element once and no gaps, like one flat array."""
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
    """`t` with the layout of `model`, a dense tensor of the same sizes; a copy if it differs."""
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
    # In a dense tensor dimensions of smaller stride fill `inner` elements; the others are rows.
    return numel // (channels * inner), channels, inner


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's cdiv takes 1 us, and its next_power_of_2 takes 2."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


# Elements of a program, by the bytes of an element. Each of 128 threads has up to four loads of 16
# bytes in flight, and 16 elements: on sm_90 most formulas then need 32 registers, with which a
# multiprocessor holds all its threads.
FORWARD_BLOCK = {8: 1024, 4: 2048, 2: 2048}
BACKWARD_BLOCK = {8: 512, 4: 1024, 2: 2048}
# Enough for the multiprocessors of a large GPU; for more blocks each program takes several.
_PROGRAMS = 1024


def steps_of(blocks: int, programs: int) -> int:
    """Number of summed `blocks` that each of `programs` takes: a power of two."""
    wanted = min(16, blocks, programs // _PROGRAMS)
    return 1 << max(0, wanted.bit_length() - 1)


class Tiles(NamedTuple):
    """A tensor of rows x channels x inner as a matrix, and the sides of its tiles."""

    rows: int
    columns: int
    planes: bool  # whether a row is one channel's plane; else a row has all channels
    unit: int  # divides the columns: unit_of()
    height: int
    width: int


def unit_of(*lengths: int) -> int:
    """The largest power of two, at most 8, that divides all lengths. Kernels are compiled for it;
    8 elements of the smallest dtype are 16 bytes, the longest vector."""
    together = 8
    for length in lengths:
        together |= length
    return together & -together


def tiles_of(rows: int, channels: int, inner: int, block: int) -> Tiles:
    columns = channels * inner
    # Long planes are rows, unless only whole rows start on 16 bytes.
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
