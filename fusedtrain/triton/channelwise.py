"""The loops over an activation whose parameters are tensors: one value in all, or one per channel.

With one value the data are a flat array. With one per channel they are a matrix, cut into tiles
that are summed along one side: either its columns hold all channels (and columns are summed), or
each row is one plane of one channel (and rows are summed). Every program writes its shares of the
parameters' gradients to separate places; finish_kernel adds the shares in a fixed order, so results
are the same bits every time.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import formulas
from ._layout import (
    BACKWARD_BLOCK,
    FORWARD_BLOCK,
    cdiv,
    channel_view,
    check_same,
    dense_like,
    index_of,
    is_dense,
    power_of_two,
    steps_of,
    tiles_of,
)
from .launch import Launcher, check_dtype
from .vecmath import widen


@triton.jit(do_not_specialize=["n"])
def flat_forward_kernel(  # equal (other=): elements beyond the data are not stored
    x_ptr, y_ptr, a_ptr, b_ptr, n: tl.int64, FORMULA: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    x_ptr += start
    y_ptr += start
    at = tl.arange(0, BLOCK)
    # equal (< for <=): a whole last block is masked: slower, same result
    whole = start + BLOCK <= n
    if whole:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=start + at < n, other=0.0)
    y = FORMULA(widen(x), widen(tl.load(a_ptr)), widen(tl.load(b_ptr))).to(y_ptr.dtype.element_ty)
    if whole:
        tl.store(y_ptr + at, y)
    else:
        tl.store(y_ptr + at, y, mask=start + at < n)


@triton.jit(do_not_specialize=["n"])
def flat_backward_kernel(
    g_ptr, x_ptr, gx_ptr, a_ptr, b_ptr, shares_ptr, n: tl.int64,
    FORMULA: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    a, b = widen(tl.load(a_ptr)), widen(tl.load(b_ptr))
    at = tl.arange(0, BLOCK)
    sum_a = tl.zeros((BLOCK,), shares_ptr.dtype.element_ty)
    sum_b = tl.zeros((BLOCK,), shares_ptr.dtype.element_ty)
    first = tl.program_id(0).to(tl.int64) * (STEPS * BLOCK)
    for step in range(STEPS):
        start = first + step * BLOCK
        # equal (< for <=): a whole last block is masked: slower, same result
        whole = start + BLOCK <= n
        if whole:
            g = tl.load(g_ptr + start + at)
            x = tl.load(x_ptr + start + at)
        else:  # zeros add nothing to the sums
            g = tl.load(g_ptr + start + at, mask=start + at < n, other=0.0)
            x = tl.load(x_ptr + start + at, mask=start + at < n, other=0.0)
        gx, share_a, share_b = FORMULA(widen(g), widen(x), a, b)
        gx = gx.to(gx_ptr.dtype.element_ty)
        if whole:
            tl.store(gx_ptr + start + at, gx)
        else:
            tl.store(gx_ptr + start + at, gx, mask=start + at < n)
        sum_a += share_a
        if COUNT > 1:  # equal (>= for >): the sum is not stored
            sum_b += share_b
    tl.store(shares_ptr + tl.program_id(0), tl.sum(sum_a))
    if COUNT > 1:  # equal (>= for >): the sum is not stored
        tl.store(shares_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(sum_b))


@triton.jit
def channel_of(row, column, channels, inner, PLANES: tl.constexpr):
    """The channels of a tile with these rows and columns, as a column or as a row."""
    if PLANES:
        return (row % channels)[:, None]
    else:  # columns outside read the last channel
        return tl.minimum(column // inner, channels - 1)[None, :]


@triton.jit(do_not_specialize=["rows", "units", "channels", "inner"])
def tile_forward_kernel(  # equal (other=): elements beyond the data are not stored
    x_ptr, y_ptr, a_ptr, b_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64,
    FORMULA: tl.constexpr, PLANES: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT  # shows Triton whether rows start on 16 bytes
    across = tl.cdiv(columns, WIDTH)
    row = (tl.program_id(0) // across * HEIGHT).to(INDEX) + tl.arange(0, HEIGHT)
    column = (tl.program_id(0) % across * WIDTH).to(INDEX) + tl.arange(0, WIDTH)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    channel = channel_of(row, column, channels.to(INDEX), inner.to(INDEX), PLANES)
    a, b = widen(tl.load(a_ptr + channel)), widen(tl.load(b_ptr + channel))
    x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    tl.store(y_ptr + at, FORMULA(x, a, b).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "units", "channels", "inner"])
def tile_backward_kernel(
    g_ptr, x_ptr, gx_ptr, a_ptr, b_ptr, shares_ptr,
    rows: tl.int64, units: tl.int64, channels: tl.int64, inner: tl.int64,
    FORMULA: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr,
    PLANES: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    columns = units * UNIT
    # A program takes STEPS tiles along the summed side.
    height = HEIGHT if PLANES else HEIGHT * STEPS
    width = WIDTH * STEPS if PLANES else WIDTH
    across = tl.cdiv(columns, width)
    program_row = tl.program_id(0) // across
    program_column = tl.program_id(0) % across
    row = (program_row * height).to(INDEX) + tl.arange(0, HEIGHT)
    column = (program_column * width).to(INDEX) + tl.arange(0, WIDTH)
    channel = channel_of(row, column, channels.to(INDEX), inner.to(INDEX), PLANES)
    a, b = widen(tl.load(a_ptr + channel)), widen(tl.load(b_ptr + channel))
    sum_a = tl.zeros((HEIGHT, WIDTH), shares_ptr.dtype.element_ty)
    sum_b = tl.zeros((HEIGHT, WIDTH), shares_ptr.dtype.element_ty)
    for _ in range(STEPS):
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        g = widen(tl.load(g_ptr + at, mask=inside, other=0.0))
        x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
        gx, share_a, share_b = FORMULA(g, x, a, b)
        tl.store(gx_ptr + at, gx.to(gx_ptr.dtype.element_ty), mask=inside)
        sum_a += share_a
        if COUNT > 1:  # equal (>= for >): the sum is not stored
            sum_b += share_b
        if PLANES:
            column += WIDTH
        else:
            row += HEIGHT
    # The places of shares: a channel's side by side, in the order of its planes or columns.
    if PLANES:
        plane = row.to(tl.int64)
        line = plane % channels * (rows // channels) + plane // channels
        at = line * across + program_column
        inside = row < rows
        count = rows * across
        sum_a, sum_b = tl.sum(sum_a, axis=1), tl.sum(sum_b, axis=1)
    else:
        down = tl.cdiv(rows, height)
        at = column.to(tl.int64) * down + program_row
        inside = column < columns
        count = columns * down
        sum_a, sum_b = tl.sum(sum_a, axis=0), tl.sum(sum_b, axis=0)
    tl.store(shares_ptr + at, sum_a, mask=inside)
    if COUNT > 1:  # equal (>= for >): the sum is not stored
        tl.store(shares_ptr + count + at, sum_b, mask=inside)


@triton.jit(do_not_specialize=["channels", "n"])
def finish_kernel(
    ga_ptr, gb_ptr, shares_ptr, channels: tl.int64, n: tl.int64,
    COUNT: tl.constexpr, STEPS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of the parameters of HEIGHT channels: sums of `n` shares each, in float64."""
    channel = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    share = tl.arange(0, WIDTH)
    sum_a = tl.zeros((HEIGHT, WIDTH), tl.float64)
    sum_b = tl.zeros((HEIGHT, WIDTH), tl.float64)
    for step in range(STEPS):
        at = channel[:, None] * n + (step * WIDTH + share)[None, :]
        inside = (channel < channels)[:, None] & (step * WIDTH + share < n)[None, :]
        sum_a += tl.load(shares_ptr + at, mask=inside, other=0.0).to(tl.float64)
        if COUNT > 1:
            at += channels * n
            sum_b += tl.load(shares_ptr + at, mask=inside, other=0.0).to(tl.float64)
    inside = channel < channels
    total = tl.sum(sum_a, axis=1).to(shares_ptr.dtype.element_ty)
    tl.store(ga_ptr + channel, total, mask=inside)
    if COUNT > 1:
        total = tl.sum(sum_b, axis=1).to(shares_ptr.dtype.element_ty)
        tl.store(gb_ptr + channel, total, mask=inside)


_FINISH_BLOCK = 1024

_launch_flat_forward = Launcher(flat_forward_kernel)
_launch_flat_backward = Launcher(flat_backward_kernel)
_launch_tile_forward = Launcher(tile_forward_kernel)
_launch_tile_backward = Launcher(tile_backward_kernel)
_launch_finish = Launcher(finish_kernel)


class LaunchConfig(NamedTuple):
    """One launch without its tensors."""

    launch: Launcher
    variant: tuple[Any, ...]
    programs: int
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]

    def run(self, *tensors: Tensor) -> None:
        self.launch(self.variant, self.programs, tensors, self.numbers, self.constants)


@functools.lru_cache(maxsize=1024)
def finish_plan(channels: int, per_channel: int, count: int) -> LaunchConfig:
    """Adds up the shares of each channel, `per_channel` side by side, of `count` parameters."""
    width = min(_FINISH_BLOCK, power_of_two(per_channel))
    height = min(_FINISH_BLOCK // width, power_of_two(channels))
    constants = (count, power_of_two(cdiv(per_channel, width)), height, width)
    return LaunchConfig(
        _launch_finish, constants, cdiv(channels, height), (channels, per_channel), constants
    )


@functools.lru_cache(maxsize=1024)
def _forward_plan(name: str, itemsize: int, one: bool, view: tuple[int, int, int]) -> LaunchConfig:
    formula, block = getattr(formulas, f"{name}_forward"), FORWARD_BLOCK[itemsize]
    rows, channels, inner = view
    if one:
        n = rows * channels * inner
        return LaunchConfig(_launch_flat_forward, (name,), cdiv(n, block), (n,), (formula, block))
    t = tiles_of(rows, channels, inner, block)
    programs = cdiv(t.rows, t.height) * cdiv(t.columns, t.width)
    numbers = (t.rows, t.columns // t.unit, channels, inner)
    constants = (t.planes, t.unit, index_of(t), t.height, t.width)
    return LaunchConfig(
        _launch_tile_forward, (name, *constants), programs, numbers, (formula, *constants)
    )


@functools.lru_cache(maxsize=1024)
def _backward_plan(
    name: str, itemsize: int, one: bool, view: tuple[int, int, int], count: int
) -> tuple[LaunchConfig, LaunchConfig, int]:
    """The backward kernel, the kernel that adds the shares, and the number of shares."""
    formula, block = getattr(formulas, f"{name}_backward"), BACKWARD_BLOCK[itemsize]
    rows, channels, inner = view
    if one:
        n, channels = rows * channels * inner, 1
        blocks = cdiv(n, block)
        steps = steps_of(blocks, blocks)
        programs = per_channel = cdiv(blocks, steps)
        constants: tuple[Any, ...] = (count, steps, block)
        launch = _launch_flat_backward
        numbers: tuple[int, ...] = (n,)
    else:
        t = tiles_of(rows, channels, inner, block)
        down, across = cdiv(t.rows, t.height), cdiv(t.columns, t.width)
        steps = steps_of(across if t.planes else down, down * across)
        if t.planes:
            across = cdiv(across, steps)
            per_channel = rows * across
        else:
            down = cdiv(down, steps)
            per_channel = inner * down
        programs = down * across
        constants = (count, steps, t.planes, t.unit, index_of(t), t.height, t.width)
        launch = _launch_tile_backward
        numbers = (t.rows, t.columns // t.unit, channels, inner)
    plan = LaunchConfig(launch, (name, *constants), programs, numbers, (formula, *constants))
    return plan, finish_plan(channels, per_channel, count), count * channels * per_channel


def _check(name: str, input: Tensor, parameters: tuple[Tensor, ...]) -> list[Tensor]:
    check_dtype(name, input, "input")
    n = parameters[0].numel()
    channels = input.size(1) if input.dim() > 1 else 1
    if n not in (1, channels):
        raise RuntimeError(
            f"fusedtrain::{name}: the parameter must have one element or one for each of the "
            f"{channels} channels, not {n}"
        )
    for parameter in parameters:
        if parameter.numel() != n:
            raise RuntimeError(f"fusedtrain::{name}: parameters must have the same size")
        if parameter.dtype != input.dtype:
            raise RuntimeError(f"fusedtrain::{name}: parameters must have the dtype of the input")
        if parameter.device != input.device:
            raise RuntimeError(f"fusedtrain::{name}: parameters must be on the device of the input")
    return [p.contiguous() for p in parameters]


def forward(name: str, input: Tensor, *parameters: Tensor) -> Tensor:
    values = _check(name, input, parameters)
    y = torch.empty_like(input)
    x = input if is_dense(input) else y.copy_(input.detach())
    if x.numel():
        plan = _forward_plan(name, x.itemsize, values[0].numel() == 1, channel_view(x))
        plan.run(x, y, values[0], values[-1])
    return y


def backward(name: str, grad: Tensor, input: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    check_same(name, grad, input, "grad", "input")
    values = _check(name, input, parameters)
    gx = torch.empty_like(input)
    gradients = [torch.empty_like(v) for v in values]
    if input.numel() == 0:
        return (gx, *(g.zero_() for g in gradients))
    g, x = dense_like(grad, gx), dense_like(input, gx)
    one = values[0].numel() == 1
    plan, finish, count = _backward_plan(name, x.itemsize, one, channel_view(x), len(values))
    shares = x.new_empty(count, dtype=torch.float64 if x.itemsize == 8 else torch.float32)
    plan.run(g, x, gx, values[0], values[-1], shares)
    finish.run(gradients[0], gradients[-1], shares)
    return (gx, *gradients)
