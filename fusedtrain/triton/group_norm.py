"""Group norm, modulation and activation: batch norm's launches over one or all samples, and between
them kernels of vectors."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.dtypes import wide_of
from ._batch_norm_calls import BackwardCall, Call, walkable
from ._layout import cdiv, check_same, dense_like, power_of_two
from .launch import WIDE, Launcher, check_dtype
from .vecmath import widen

_TILE = 1024  # numbers, of whole groups
_CHANNELS = 128
_NUMBERS = ["units", "groups", "size"]
_LEAST_FACTOR = tl.constexpr(2.0**-64)  # kLeastFactor of csrc/ops/group_norm.h


@triton.jit
def tile(units, groups, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Places of the channels of some groups among those of all samples, the channels, and which
    exist."""
    unit = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    return unit * size + i, unit % groups * size + i, (unit < units) & (i < size)


@triton.jit
def loaded(  # equal (other=): what does not exist is not stored
    p, at, inside, otherwise, wide: tl.constexpr, EXISTS: tl.constexpr
):  # fmt: skip
    if EXISTS:
        return widen(tl.load(p + at, mask=inside, other=0.0))
    else:
        return tl.full(at.shape, otherwise, wide)


@triton.jit
def put(p, at, value, inside, wide: tl.constexpr):
    """Rounded to the type computed in, then to that of what is stored."""
    tl.store(p + at, value.to(wide).to(p.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*_NUMBERS, "eps"])
def vectors_kernel(  # equal (other=): sums are of what exists
    average_ptr, variance_ptr, weight_ptr, bias_ptr, scale_ptr, shift_ptr, vectors_ptr,
    units: tl.int64, groups: tl.int64, size: tl.int64, eps: tl.float64,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    wide: tl.constexpr = vectors_ptr.dtype.element_ty
    at, channel, inside = tile(units, groups, size, HEIGHT, WIDTH)
    average = tl.load(average_ptr + at, mask=inside, other=0.0)
    variance = tl.load(variance_ptr + at, mask=inside, other=0.0)
    mean = tl.sum(average, axis=1)[:, None] / size
    distance = tl.where(inside, average - mean, 0.0)
    variance = tl.sum(variance + distance * distance, axis=1)[:, None] / size
    invstd = 1.0 / tl.sqrt(variance + eps)
    factor = loaded(scale_ptr, at, inside, 0.0, wide, SCALE) + 1.0
    offset = loaded(bias_ptr, channel, inside, 0.0, wide, BIAS) * factor
    offset += loaded(shift_ptr, at, inside, 0.0, wide, SHIFT)
    factor *= loaded(weight_ptr, channel, inside, 1.0, wide, WEIGHT)
    both = tl.zeros(at.shape, tl.float64)
    tl.store(vectors_ptr + 3 * units * size + at, offset, mask=inside)
    tl.store(vectors_ptr + 2 * units * size + at, factor, mask=inside)
    tl.store(vectors_ptr + units * size + at, (both + invstd).to(wide), mask=inside)
    tl.store(vectors_ptr + at, (both + mean).to(wide), mask=inside)


@triton.jit(do_not_specialize=[*_NUMBERS, "part", "count"])
def averages_kernel(  # equal (other=): sums are of products: the other factor is 0
    sums_ptr, factor_ptr, averages_ptr, factors_ptr,
    units: tl.int64, groups: tl.int64, size: tl.int64, part: tl.int64, count: tl.float64,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    wide: tl.constexpr = factor_ptr.dtype.element_ty
    tiny: tl.constexpr = 2.0**-1022 if wide == tl.float64 else 2.0**-126
    place, _, inside = tile(units, groups, size, HEIGHT, WIDTH)
    at = place + place // part * part
    factor = tl.load(factor_ptr + place, mask=inside, other=0.0).to(tl.float64)
    sums = tl.load(sums_ptr + at, mask=inside, other=0.0)
    slopes = tl.load(sums_ptr + part + at, mask=inside, other=0.0)
    sum = tl.sum(sums * factor, axis=1)[:, None]
    slope = tl.sum(slopes * factor, axis=1)[:, None]
    most = tl.max(tl.abs(factor), axis=1)[:, None]
    least = most * _LEAST_FACTOR
    # equal (<= for <): the bound itself stays
    least = tl.where(least < tiny, tiny, least)
    # equal (>= for >): the bound itself stays
    least = tl.where(least > most, most, least)
    # equal (<= for <): the averages have the sign of what they are multiplied by
    signed = tl.where(factor < 0.0, -least, least)
    # equal (<= for <): the bound itself stays
    used = tl.where(tl.abs(factor) < least, signed, factor).to(wide)
    # equal (constant): where all factors are 0, so are the sums
    divisor = tl.where(most > 0.0, used.to(tl.float64) * size, 1.0) * count
    tl.store(factors_ptr + place, used, mask=inside)
    tl.store(averages_ptr + at, sum / divisor, mask=inside)
    tl.store(averages_ptr + part + at, slope / divisor, mask=inside)


@triton.jit(do_not_specialize=["samples", "channels", "part"])
def gradients_kernel(  # equal (other=): channels beyond the last are not stored
    sums_ptr, weight_ptr, bias_ptr, scale_ptr, grad_weight_ptr, grad_bias_ptr, grad_scale_ptr,
    grad_shift_ptr,
    samples: tl.int64, channels: tl.int64, part: tl.int64,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    OF_WEIGHT: tl.constexpr, OF_BIAS: tl.constexpr, OF_SCALE: tl.constexpr, OF_SHIFT: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    weight = loaded(weight_ptr, c, inside, 1.0, tl.float64, WEIGHT)
    bias = loaded(bias_ptr, c, inside, 0.0, tl.float64, BIAS)
    of_weight = tl.zeros([BLOCK], tl.float64)
    of_bias = of_weight
    for n in range(samples):
        place = n * channels + c
        at = place + place // part * part
        sum = tl.load(sums_ptr + at, mask=inside, other=0.0)
        slope = tl.load(sums_ptr + part + at, mask=inside, other=0.0)
        scale = loaded(scale_ptr, place, inside, 0.0, tl.float64, SCALE).to(tl.float64) + 1.0
        of_weight += slope * scale
        of_bias += sum * scale
        if OF_SCALE:
            put(grad_scale_ptr, place, slope * weight + sum * bias, inside, WIDE)
        if OF_SHIFT:
            put(grad_shift_ptr, place, sum, inside, WIDE)
    if OF_WEIGHT:
        put(grad_weight_ptr, c, of_weight, inside, WIDE)
    if OF_BIAS:
        put(grad_bias_ptr, c, of_bias, inside, WIDE)


_launch_vectors = Launcher(vectors_kernel)
_launch_averages = Launcher(averages_kernel)
_launch_gradients = Launcher(gradients_kernel)


class _Parts:
    """A call in parts of a sample, or of all where the channels of a sample follow each other in
    memory. `affine` is weight, bias, scale and shift."""

    def __init__(self, name: str, input: Tensor, groups: int, *affine: Tensor | None) -> None:
        self.name, self.x = name, walkable(input, True)
        check_dtype(name, input, "input")
        self.samples, self.channels = self.x.shape[:2]
        self.wide = wide_of(self.x)
        if groups < 1 or self.channels % groups:
            raise RuntimeError(f"fusedtrain::{name}: num_groups must divide the channels")
        weight, bias = affine[:2]
        if weight is not None and bias is not None and weight.dtype != bias.dtype:
            raise RuntimeError(f"fusedtrain::{name}: weight and bias must have one dtype")
        shape = (self.samples, self.channels)
        either = (self.x.dtype, self.wide)
        self.affine = [
            self.checked(t, what, size, dtypes)
            for t, what, size, dtypes in zip(
                affine, ("weight", "bias", "scale", "shift"), (shape[1:], shape[1:], shape, shape),
                (either, either, either[:1], either[:1]),
            )
        ]  # fmt: skip
        self.has = tuple(t is not None for t in affine)
        self.dtypes = (self.x.dtype, *(t.dtype for t in (weight, bias) if t is not None))
        self.planes = self.x.is_contiguous()
        self.part = self.channels * (self.samples if self.planes else 1)
        size = self.channels // groups
        width = power_of_two(size)
        height = max(1, min(_TILE // width, power_of_two(self.samples * groups)))
        self.sides = (height, width)
        self.numbers = (self.samples * groups, groups, size)
        self.programs = cdiv(self.samples * groups, height)

    def checked(
        self, t: Tensor | None, what: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> Tensor | None:
        if t is None:
            return None
        if t.device != self.x.device:
            raise RuntimeError(f"fusedtrain::{self.name}: {what} is on another device")
        if t.dtype not in dtypes:
            raise RuntimeError(
                f"fusedtrain::{self.name}: {what} must have the dtype of input, or weight and bias "
                "that of its math"
            )
        if t.shape != shape:
            elements = torch.Size(shape).numel()
            raise RuntimeError(f"fusedtrain::{self.name}: {what} must have {elements} elements")
        return t.contiguous()

    def vectors(self, t: Tensor) -> Tensor:
        shape = (4, self.samples, self.channels)
        if t.dim() != 3 or t.shape[:2] != shape[:2]:
            raise RuntimeError(f"fusedtrain::{self.name}: vectors must be [4, N, C]")
        checked = self.checked(t, "vectors", shape, (self.wide,))
        assert checked is not None
        return checked

    def of(self, t: Tensor) -> list[Tensor]:
        """The parts of a tensor in the layout of `x`, as batch norm takes them."""
        return [t.view(1, self.part, -1)] if self.planes else list(t.split(1))

    def rows(self, vectors: Tensor) -> list[Any]:
        """Factor, offset, mean and invstd of each part."""
        parts = vectors.view(4, -1, self.part).unbind(1)
        return [(factor, offset, mean, invstd) for mean, invstd, factor, offset in parts]

    def laid_out(self, t: Tensor, model: Tensor) -> Tensor:
        result = torch.empty_like(model)
        return t if t.stride() == result.stride() else result.copy_(t)

    def calls(self, vectors: Tensor, *activation: Any) -> list[Call]:
        calls = []
        for x, (factor, offset, mean, invstd) in zip(self.of(self.x), self.rows(vectors)):
            calls.append(Call(x, None, factor, offset, *activation))
            calls[-1].use(mean, invstd)
        return calls

    def normalised(self, input: Tensor, calls: list[Call]) -> Tensor:
        output = torch.empty_like(self.x)
        for call, y in zip(calls, self.of(output)):
            call.normalise(None, y)
        return self.laid_out(output, input)


def group_norm_act(
    input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None,
    shift: Tensor | None, eps: float, *activation: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    p = _Parts("group_norm_act", input, groups, weight, bias, scale, shift)
    vectors = input.new_empty((4, p.samples, p.channels), dtype=p.wide)
    if not input.numel():
        return torch.empty_like(input), vectors.zero_()
    calls = p.calls(vectors, *activation)
    average, variance = vectors.new_empty((2, len(calls), p.part), dtype=torch.float64)
    for call, to, spread in zip(calls, average, variance):
        call.statistics(to, spread, None, 0.0, 0.0, invert=False)
    affine = (average if t is None else t for t in p.affine)
    constants = (*p.has, *p.sides)
    tensors = (average, variance, *affine, vectors)
    _launch_vectors((p.dtypes, constants), p.programs, tensors, (*p.numbers, eps), constants)
    return p.normalised(input, calls), vectors


def group_norm_act_apply(input: Tensor, vectors: Tensor, *activation: Any) -> Tensor:
    p = _Parts("group_norm_act_apply", input, 1, None, None, None, None)
    rows = p.vectors(vectors)
    if not input.numel():
        return torch.empty_like(input)
    return p.normalised(input, p.calls(rows, *activation))


def group_norm_act_backward(
    grad: Tensor, input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None,
    scale: Tensor | None, shift: Tensor | None, vectors: Tensor, activation: int, a: float,
    b: float, needs_input: bool, *needs: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    name = "group_norm_act_backward"
    p = _Parts(name, input, groups, weight, bias, scale, shift)
    check_same(name, grad, input, "grad", "input")
    rows = p.vectors(vectors)
    results = [
        torch.empty_like(t, memory_format=torch.contiguous_format)
        if t is not None and needed
        else input.new_empty(0)
        for t, needed in zip(p.affine, needs)
    ]
    grad_input = torch.empty_like(p.x) if needs_input else input.new_empty(0)
    if not input.numel():
        return grad_input, *(t.zero_() for t in results)
    parts = list(zip(p.of(dense_like(grad, p.x)), p.of(p.x)))

    def calls(rows: Tensor) -> list[BackwardCall]:
        of_parts = zip(parts, p.rows(rows))
        return [BackwardCall(*both, None, None, *row, activation, a, b) for both, row in of_parts]

    sums = torch.stack([call.reduce(None, None, 1) for call in calls(rows)])
    if needs_input:
        averages, last = torch.empty_like(sums), rows.clone()
        count = input.numel() // (p.samples * p.channels)
        _launch_averages(
            (p.wide, p.sides), p.programs, (sums, rows[2], averages, last[2]),
            (*p.numbers, p.part, count), p.sides,
        )  # fmt: skip
        for call, to, average in zip(calls(last), p.of(grad_input), averages):
            call.apply(to, None, average)
        grad_input = p.laid_out(grad_input, input)
    wanted = tuple(t.numel() > 0 for t in results)
    if any(wanted):
        affine = (sums if t is None else t for t in p.affine[:3])
        constants = (*p.has[:3], *wanted, WIDE[p.x.dtype], _CHANNELS)
        _launch_gradients(
            (p.dtypes, constants), cdiv(p.channels, _CHANNELS), (sums, *affine, *results),
            (p.samples, p.channels, p.part), constants,
        )  # fmt: skip
    return grad_input, *results
