"""The loss scale's update and the zeroing of gradients, in one launch each."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from array import array
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._layout import cdiv, is_dense
from ._optimizer_tables import send
from .launch import Launcher


@triton.jit
def next_scale(
    scale, growth_tracker, hysteresis_tracker, found_inf,
    growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale,
):  # fmt: skip
    """Scale, growth tracker and hysteresis tracker after a step; factors and bounds are float64."""
    bad = found_inf != 0.0  # nan, too
    left = tl.where(bad, tl.maximum(hysteresis_tracker - 1, 0), hysteresis)
    good_steps = growth_tracker + 1
    grows = (good_steps == growth_interval) & (found_inf == 0.0)
    wide = scale.to(tl.float64)
    grown = (wide * growth_factor).to(tl.float32)
    smaller = (wide * backoff_factor).to(tl.float32)
    larger = tl.where(grows & (grown - grown == 0.0), grown, scale)
    new = tl.where(bad, tl.where(left == 0, smaller, scale), larger)
    # equal (<= for <): a scale that is the bound becomes the bound
    new = tl.where(new.to(tl.float64) < min_scale, min_scale.to(tl.float32), new)
    # equal (>= for >): a scale that is the bound becomes the bound
    new = tl.where(new.to(tl.float64) > max_scale, max_scale.to(tl.float32), new)
    return new, tl.where(bad | grows, 0, good_steps), left


@triton.jit(
    do_not_specialize=[
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "hysteresis",
        "min_scale",
        "max_scale",
    ]
)
def update_scale_kernel(
    scale_ptr, growth_ptr, hysteresis_ptr, found_inf_ptr,
    growth_factor: tl.float64, backoff_factor: tl.float64, growth_interval: tl.int64,
    hysteresis: tl.int64, min_scale: tl.float64, max_scale: tl.float64,
):  # fmt: skip
    scale, growth, left = next_scale(
        tl.load(scale_ptr), tl.load(growth_ptr), tl.load(hysteresis_ptr), tl.load(found_inf_ptr),
        tl.full((), growth_factor, tl.float64), tl.full((), backoff_factor, tl.float64),
        growth_interval, hysteresis,
        tl.full((), min_scale, tl.float64), tl.full((), max_scale, tl.float64),
    )  # fmt: skip
    tl.store(scale_ptr, scale)
    tl.store(growth_ptr, growth.to(tl.int32))
    tl.store(hysteresis_ptr, left.to(tl.int32))


@triton.jit
def zero_kernel(table_ptr, part_ptr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Zeroes CHUNK bytes from a multiple of 16 on; a range's first program also zeroes both ends.

    A line of the table: address, bytes, number of the first program.
    """
    part = tl.program_id(0).to(tl.int64)
    entry_ptr = table_ptr + tl.load(part_ptr + part) * 4
    address = tl.load(entry_ptr)
    end = address + tl.load(entry_ptr + 1)
    local = part - tl.load(entry_ptr + 2)
    start = (address + 15) // 16 * 16
    body = tl.maximum(end // 16 * 16 - start, 0)
    if local == 0:
        byte = tl.arange(0, 16)
        none = tl.zeros((16,), tl.int8)
        before = tl.minimum(start, end) - address
        tl.store(address.to(tl.pointer_type(tl.int8)) + byte, none, mask=byte < before)
        rest = start + body
        tl.store(rest.to(tl.pointer_type(tl.int8)) + byte, none, mask=rest + byte < end)
    begin = local * CHUNK
    n = tl.minimum(body - begin, CHUNK) // 16 * 2
    words = tl.multiple_of((start + begin).to(tl.pointer_type(tl.int64)), 16)
    for i in range(tl.cdiv(n, BLOCK)):
        at = i * BLOCK + tl.arange(0, BLOCK)
        tl.store(words + at, tl.zeros((BLOCK,), tl.int64), mask=at < n)


_CHUNK = 65536
_BLOCK = 1024

_launch_update_scale = Launcher(update_scale_kernel)
_launch_zero = Launcher(zero_kernel)


@torch.no_grad()
def update_scale(*arguments: Any) -> None:
    tensors, numbers = arguments[:4], arguments[4:]
    scale = tensors[0]
    names = ("scale", "growth_tracker", "hysteresis_tracker", "found_inf")
    dtypes = (torch.float32, torch.int32, torch.int32, torch.float32)
    for t, name, dtype in zip(tensors, names, dtypes):
        if t.numel() != 1 or t.dtype != dtype or t.device != scale.device:
            raise RuntimeError(f"fusedtrain::update_scale: {name}")
    _launch_update_scale((), 1, tensors, numbers, ())


@torch.no_grad()
def zero_tensors(tensors: list[Tensor]) -> None:
    table, line_of_part = array("q"), array("q")
    for t in tensors:
        if t.device != tensors[0].device:
            raise RuntimeError("fusedtrain::zero_tensors: all tensors must be on one device")
        if not is_dense(t):
            t.zero_()
        elif t.numel():
            size = t.numel() * t.element_size()
            number = array("q", [len(table) // 4])
            table.extend((t.data_ptr(), size, len(line_of_part), 0))
            line_of_part += number * cdiv(size, _CHUNK)
    if line_of_part:
        parts = send((table, line_of_part), tensors[0].device)
        _launch_zero((), len(line_of_part), tuple(parts), (), (_CHUNK, _BLOCK))
