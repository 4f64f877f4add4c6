"""Depthwise convolutions. A tile has lines, columns and channels of the targets, the numbers that a
program makes: outputs, or inputs of the gradient. Lines run through rows, depths and samples; in
contiguous tensors a tile has one channel. Sources are the numbers that the targets are sums of.

The gradient of the input is a convolution, too: inputs of one phase, a stride apart, see the same
taps, and their sources are neighbours. Its phases are programs of their own.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.depthwise import new_tensor, out_sizes
from ._layout import cdiv, power_of_two, steps_of, unit_of
from .channelwise import LaunchConfig, finish_plan
from .launch import Launcher, check_dtype
from .pool import narrow
from .vecmath import widen

_SIZES = [
    "samples", "units", "from_depth", "from_height", "from_width", "depth", "height", "width",
]  # fmt: skip


@triton.jit
def targets(program, depth, height, width, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """Sample, depth, row and column of a tile's targets, if there are so many in a sample."""
    across = tl.cdiv(width, COLUMNS)
    line = program // across * LINES + tl.arange(0, LINES)[:, None, None]
    column = program % across * COLUMNS + tl.arange(0, COLUMNS)[None, :, None]
    above = line // height
    return above // depth, above % depth, line % height, column


@triton.jit
def place(sample, d, h, w, channel, channels, depth, height, width, LAST: tl.constexpr):
    if LAST:
        return (((sample * depth + d) * height + h) * width + w) * channels + channel
    else:
        return (((sample * channels + channel) * depth + d) * height + h) * width + w


@triton.jit
def read(
    x_ptr, sample, d, h, w, channel, samples, channels, depth, height, width, LAST: tl.constexpr
):  # fmt: skip
    """Zero outside of the tensor."""
    inside = (sample < samples) & (d >= 0) & (d < depth) & (h >= 0) & (h < height)
    inside = inside & ((w >= 0) & (w < width)) & (channel < channels)
    at = place(sample, d, h, w, channel, channels, depth, height, width, LAST)
    return widen(tl.load(x_ptr + at, mask=inside, other=0.0))


@triton.jit
def sources(
    phase, target, D: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    DILATION: tl.constexpr, PAD: tl.constexpr, STEP: tl.constexpr, INVERSE: tl.constexpr,
    GRADIENT: tl.constexpr,
):  # fmt: skip
    """The first tap that the phase sees along dimension D (KERNEL: it sees none), and its sources.

    An input i of a phase sees tap k of the output that is at k dilation = i + pad modulo stride:
    every STEP-th tap, if the common divisor of dilation and stride divides i + pad.
    """
    if GRADIENT:
        COMMON: tl.constexpr = STRIDE[D] // STEP[D]
        shifted = phase + PAD[D]
        first = shifted // COMMON % STEP[D] * INVERSE[D] % STEP[D]
        first = tl.where(shifted % COMMON == 0, first, KERNEL[D])
        return first, target + (shifted - first * DILATION[D]) // STRIDE[D]
    else:
        return phase, target * STRIDE[D] - PAD[D]  # the only phase is 0


@triton.jit(do_not_specialize=_SIZES)
def depthwise_kernel(  # equal (other=): such weights meet a zero, such elements are not stored
    x_ptr, weight_ptr, bias_ptr, y_ptr, samples: tl.int64, units: tl.int64, from_depth: tl.int64,
    from_height: tl.int64, from_width: tl.int64, depth: tl.int64, height: tl.int64,
    width: tl.int64, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    PAD: tl.constexpr, STEP: tl.constexpr, INVERSE: tl.constexpr, SPREAD: tl.constexpr,
    TAPS: tl.constexpr, MULTIPLIER: tl.constexpr, GRADIENT: tl.constexpr, BIAS: tl.constexpr,
    PARTS: tl.constexpr, UNROLLED: tl.constexpr, LAST: tl.constexpr, SMALL: tl.constexpr,
    UNIT: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`units` times UNIT channels of targets. A phase sees up to TAPS taps of each dimension, the
    sources of one tap SPREAD from those of the tap before; PARTS times UNROLLED in all."""
    PHASES: tl.constexpr = STRIDE if GRADIENT else (1, 1, 1)
    samples, depth, height, width = narrow(samples, depth, height, width, SMALL)
    units, from_depth, from_height, from_width = narrow(
        units, from_depth, from_height, from_width, SMALL
    )
    channels = units * UNIT
    program = tl.program_id(0).to(units.dtype)
    groups = tl.cdiv(channels, CHANNELS)
    channel = program % groups * CHANNELS + tl.arange(0, CHANNELS)[None, None, :]
    program = program // groups
    # No dimension has more phases than targets.
    phases_d = tl.minimum(depth, PHASES[0])
    phases_h = tl.minimum(height, PHASES[1])
    phases_w = tl.minimum(width, PHASES[2])
    phase_w = program % phases_w
    phase_h = program // phases_w % phases_h
    phase_d = program // phases_w // phases_h % phases_d
    sample, d, h, w = targets(
        program // phases_w // phases_h // phases_d, tl.cdiv(depth, PHASES[0]),
        tl.cdiv(height, PHASES[1]), tl.cdiv(width, PHASES[2]), LINES, COLUMNS,
    )  # fmt: skip
    tap_d, from_d = sources(phase_d, d, 0, KERNEL, STRIDE, DILATION, PAD, STEP, INVERSE, GRADIENT)
    tap_h, from_h = sources(phase_h, h, 1, KERNEL, STRIDE, DILATION, PAD, STEP, INVERSE, GRADIENT)
    tap_w, from_w = sources(phase_w, w, 2, KERNEL, STRIDE, DILATION, PAD, STEP, INVERSE, GRADIENT)
    wide = widen(tl.zeros((1,), y_ptr.dtype.element_ty)).dtype
    sums = tl.zeros((LINES, COLUMNS, CHANNELS), wide)
    for part in range((MULTIPLIER if GRADIENT else 1) * PARTS):
        if GRADIENT:
            # Without the number of the part Triton knows that channels start on 16 bytes.
            copy = part // PARTS if MULTIPLIER > 1 else 0  # equal (>= for >): the quotient is 0
            from_channel = channel * MULTIPLIER + copy
            from_channels = channels * MULTIPLIER
            weight, weights = from_channel, from_channels
        else:
            from_channel = channel // MULTIPLIER
            from_channels = channels // MULTIPLIER
            weight, weights = channel, channels
        for unrolled in tl.static_range(UNROLLED):
            number = part % PARTS * UNROLLED + unrolled
            across = number % TAPS[2]
            down = number // TAPS[2] % TAPS[1]
            behind = number // TAPS[2] // TAPS[1]
            k_d = tap_d + behind * STEP[0]
            k_h = tap_h + down * STEP[1]
            k_w = tap_w + across * STEP[2]
            exists = (k_d < KERNEL[0]) & (k_h < KERNEL[1]) & (k_w < KERNEL[2])
            x = read(
                x_ptr, sample, tl.where(exists, from_d + behind * SPREAD[0], -1),
                from_h + down * SPREAD[1], from_w + across * SPREAD[2], from_channel, samples,
                from_channels, from_depth, from_height, from_width, LAST,
            )  # fmt: skip
            at = place(0, k_d, k_h, k_w, weight, weights, KERNEL[0], KERNEL[1], KERNEL[2], LAST)
            inside = exists & (weight < weights)
            sums += x * widen(tl.load(weight_ptr + at, mask=inside, other=0.0))
    if BIAS:
        sums += widen(tl.load(bias_ptr + channel, mask=channel < channels, other=0.0))
    d = phase_d + d * PHASES[0]
    h = phase_h + h * PHASES[1]
    w = phase_w + w * PHASES[2]
    inside = (sample < samples) & (d < depth) & (h < height) & (w < width) & (channel < channels)
    at = place(sample, d, h, w, channel, channels, depth, height, width, LAST)
    tl.store(y_ptr + at, sums.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*_SIZES, "shares"])
def depthwise_weight_kernel(
    grad_ptr, x_ptr, shares_ptr, bias_shares_ptr, shares: tl.int64, samples: tl.int64,
    units: tl.int64, from_depth: tl.int64, from_height: tl.int64, from_width: tl.int64,
    depth: tl.int64, height: tl.int64, width: tl.int64, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr, MULTIPLIER: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, TAPS: tl.constexpr, STEPS: tl.constexpr,
    LAST: tl.constexpr, SMALL: tl.constexpr, UNIT: tl.constexpr, LINES: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program adds up STEPS tiles of outputs for TAPS taps. The shares of a weight, one of each
    program, lie side by side."""
    ALL: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    PARTS: tl.constexpr = (ALL + TAPS - 1) // TAPS
    samples, depth, height, width = narrow(samples, depth, height, width, SMALL)
    units, from_depth, from_height, from_width = narrow(
        units, from_depth, from_height, from_width, SMALL
    )
    channels = units * UNIT
    program = tl.program_id(0).to(units.dtype)
    groups = tl.cdiv(channels, CHANNELS)
    channel = program % groups * CHANNELS + tl.arange(0, CHANNELS)
    lanes = channel[None, None, :]
    part = program // groups % PARTS
    share = program // groups // PARTS
    lane = tl.arange(0, TAPS)
    sums = tl.zeros((TAPS, CHANNELS), shares_ptr.dtype.element_ty)
    bias_sums = tl.zeros((CHANNELS,), shares_ptr.dtype.element_ty)
    for step in range(STEPS):
        sample, d, h, w = targets(share * STEPS + step, depth, height, width, LINES, COLUMNS)
        grad = read(grad_ptr, sample, d, h, w, lanes, samples, channels, depth, height, width, LAST)
        if BIAS:
            bias_sums += tl.sum(tl.reshape(grad, (LINES * COLUMNS, CHANNELS)), axis=0)
        if WEIGHT:
            for tap in range(min(TAPS, ALL)):
                number = part * TAPS + tap
                from_w = w * STRIDE[2] - PAD[2] + number % KERNEL[2] * DILATION[2]
                from_h = h * STRIDE[1] - PAD[1] + number // KERNEL[2] % KERNEL[1] * DILATION[1]
                from_d = d * STRIDE[0] - PAD[0] + number // KERNEL[2] // KERNEL[1] * DILATION[0]
                # Columns without an output have no source: an infinite one would meet a zero.
                x = read(
                    x_ptr, sample, from_d, from_h, tl.where(w < width, from_w, -1),
                    lanes // MULTIPLIER, samples, channels // MULTIPLIER, from_depth, from_height,
                    from_width, LAST,
                )  # fmt: skip
                products = tl.reshape(grad * x, (LINES * COLUMNS, CHANNELS))
                sums += tl.where(lane[:, None] == tap, tl.sum(products, axis=0)[None, :], 0.0)
    inside = channel < channels
    if WEIGHT:
        tap = (part * TAPS + lane)[:, None]
        at = (channel[None, :].to(tl.int64) * ALL + tap) * shares + share
        tl.store(shares_ptr + at, sums, mask=inside[None, :] & (tap < ALL))
    if BIAS:
        at = channel.to(tl.int64) * shares + share
        tl.store(bias_shares_ptr + at, bias_sums, mask=inside & (part == 0))


_launch = Launcher(depthwise_kernel)
_launch_weight = Launcher(depthwise_weight_kernel)

_Three = tuple[int, ...]  # of depth, height, width
# Elements of a tile: four in each of 128 threads, or 16 bytes of neighbouring channels.
_BLOCK = 512
_BLOCK_LAST = {8: 512, 4: 512, 2: 1024}
_BLOCK_WEIGHT = 1024
# Taps that a program visits without a loop: of all, of a plane, of a row, or so many. With 49 taps
# of planes in one piece, 16-bit numbers spill 3,476 bytes on sm_90.
_MOST_UNROLLED = 27
_UNROLLED = 16
_TAPS = 32  # that a program of the gradient of the weight takes at most
_MOST = 2**29  # elements of tensors whose indices have 32 bits
_FAR = 2**15  # products of two such numbers have 32 bits


class ConvShape(NamedTuple):
    """csrc/ops/depthwise.h."""

    itemsize: int
    last: bool
    samples: int
    channels: int
    multiplier: int
    sizes: _Three
    out: _Three
    kernel: _Three
    stride: _Three
    dilation: _Three
    pad: _Three

    @property
    def small(self) -> bool:
        numel = max(math.prod(self.sizes), math.prod(self.out) * self.multiplier)
        far = max(*self.kernel, *self.stride, *self.dilation, *self.pad)
        return numel * self.channels * self.samples < _MOST and far < _FAR

    def cut(self, block: int, lines: int, width: int, channels: int) -> tuple[int, int, int, int]:
        """UNIT, and lines, columns and channels of a tile of `block` elements."""
        unit = min(unit_of(channels), 16 // self.itemsize) if self.last and self.small else 1
        together = min(32, power_of_two(channels)) if self.last else 1
        columns = min(8 if self.last else 64, power_of_two(width))
        lines = min(block // (together * columns), power_of_two(lines))
        return unit, lines, min(block // (together * lines), power_of_two(width)), together


@functools.lru_cache(maxsize=1024)
def _plan(call: ConvShape, gradient: bool, bias: bool) -> LaunchConfig:
    common = [
        math.gcd(s, d) if gradient else s for s, d in zip(call.stride, call.dilation, strict=True)
    ]
    step = tuple(s // g for s, g in zip(call.stride, common, strict=True))
    if gradient:
        inverse = tuple(
            pow(d // g, -1, s) for d, g, s in zip(call.dilation, common, step, strict=True)
        )
        spread = tuple(-(d // g) for d, g in zip(call.dilation, common, strict=True))
        phases, sources, targets = call.stride, call.out, call.sizes
    else:
        inverse, spread, phases = (0, 0, 0), call.dilation, (1, 1, 1)
        sources, targets = call.sizes, call.out
    taps = tuple(cdiv(k, s) for k, s in zip(call.kernel, step, strict=True))
    count = math.prod(taps)
    sizes = (count, taps[1] * taps[2], taps[2], _UNROLLED)
    unrolled = next(size for size in sizes if size <= _MOST_UNROLLED)
    channels = call.channels if gradient else call.channels * call.multiplier
    depth, height, width = (cdiv(n, p) for n, p in zip(targets, phases, strict=True))
    rows = call.samples * depth * height
    block = _BLOCK_LAST[call.itemsize] if call.last else _BLOCK
    unit, lines, columns, together = call.cut(block, rows, width, channels)
    constants = (
        call.kernel, call.stride, call.dilation, call.pad, step, inverse, spread, taps,
        call.multiplier, gradient, bias, cdiv(count, unrolled), unrolled, call.last, call.small,
        unit, lines, columns, together,
    )  # fmt: skip
    programs = cdiv(rows, lines) * cdiv(width, columns) * cdiv(channels, together)
    programs *= math.prod(min(n, p) for n, p in zip(targets, phases, strict=True))
    numbers = (call.samples, channels // unit, *sources, *targets)
    return LaunchConfig(_launch, constants, programs, numbers, constants)


@functools.lru_cache(maxsize=1024)
def _weight_plan(call: ConvShape, weight: bool, bias: bool) -> tuple[LaunchConfig, int]:
    """The launch, and the number of shares of each weight."""
    taps = math.prod(call.kernel) if weight else 1
    channels = call.channels * call.multiplier
    rows = call.samples * call.out[0] * call.out[1]
    block = _BLOCK_WEIGHT
    unit, lines, columns, together = call.cut(block, rows, call.out[2], channels)
    lanes = min(_TAPS, power_of_two(taps))
    blocks = cdiv(rows, lines) * cdiv(call.out[2], columns)
    beside = cdiv(channels, together) * cdiv(taps, lanes)
    steps = steps_of(blocks, blocks * beside)
    shares = cdiv(blocks, steps)
    kernel = call.kernel if weight else (1, 1, 1)
    constants = (
        kernel, call.stride, call.dilation, call.pad, call.multiplier, weight, bias, lanes, steps,
        call.last, call.small, unit, lines, columns, together,
    )  # fmt: skip
    numbers = (shares, call.samples, channels // unit, *call.sizes, *call.out)
    return LaunchConfig(_launch_weight, constants, shares * beside, numbers, constants), shares


def _call(
    model: Tensor, weight: Tensor, out: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], channels_last: bool,
) -> ConvShape:  # fmt: skip
    front = (1,) * (5 - model.dim())
    sizes, kernel = (*front, *model.shape[2:]), (*front, *weight.shape[2:])
    pad = (0,) * len(front) + tuple(padding)
    # No number that 32 bits cannot hold: one tap has no dilation, and a stride that leads beyond
    # the input leads there however long.
    spread = tuple(d if k > 1 else 1 for d, k in zip((*front, *dilation), kernel, strict=True))
    step = tuple(
        min(s, n + p + d * k)
        for s, n, p, d, k in zip((*front, *stride), sizes, pad, spread, kernel, strict=True)
    )
    return ConvShape(
        model.itemsize, channels_last, model.size(0), model.size(1),
        weight.size(0) // model.size(1), sizes, (*front, *out), kernel, step, spread, pad,
    )  # fmt: skip


def _check(
    name: str, input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], channels_last: bool,
) -> None:  # fmt: skip
    """As csrc/bindings/depthwise.h."""
    dims, spatial = input.dim(), input.dim() - 2
    channels = input.size(1) if dims > 1 else 0
    for wrong, message in (
        (weight.device != input.device, "weight is on another device"),
        (weight.dtype != input.dtype, "weight must have the dtype of the others"),
        (not 3 <= dims <= 5, "expected [N, C, L], [N, C, H, W] or [N, C, D, H, W]"),
        (channels_last and spatial < 2, "[N, C, L] has no channels_last"),
        (
            weight.dim() != dims or channels < 1 or weight.size(0) < 1 or weight.size(1) != 1
            or weight.size(0) % channels != 0,
            "weight must be [C multiplier, 1, ...] for C channels of input",
        ),
        (
            any(len(numbers) != spatial for numbers in (stride, padding, dilation)),
            "stride, padding and dilation must have a number for each dimension",
        ),
    ):  # fmt: skip
        if wrong:
            raise RuntimeError(f"fusedtrain::{name}: {message}")
    check_dtype(name, input, "input")
    if min(*weight.shape[2:], *stride, *dilation) < 1 or min(padding) < 0:
        raise RuntimeError(
            f"fusedtrain::{name}: kernel, stride and dilation must be positive, padding not "
            "negative"
        )


def _in_layout(t: Tensor, channels_last: bool) -> Tensor:
    if not channels_last:
        return t.detach().contiguous()
    format = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return t.detach().contiguous(memory_format=format)


def _taps_of(weight: Tensor, channels_last: bool) -> Tensor:
    """Weights side by side as channels are."""
    weight = weight.detach()
    return weight.flatten(1).t().contiguous() if channels_last else weight.contiguous()


def depthwise_conv(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], padding_end: Sequence[int], dilation: Sequence[int],
    channels_last: bool,
) -> Tensor:  # fmt: skip
    name = "depthwise_conv"
    _check(name, input, weight, stride, padding, dilation, channels_last)
    sizes, kernel = list(input.shape[2:]), list(weight.shape[2:])
    if len(padding_end) != len(sizes):
        raise RuntimeError(f"fusedtrain::{name}: padding_end must have a number for each dimension")
    out = out_sizes(sizes, kernel, list(stride), list(padding), list(padding_end), list(dilation))
    if min(padding_end) < 0 or min(out) < 1:
        raise RuntimeError(f"fusedtrain::{name}: the padded input is smaller than the kernel")
    if bias is not None:
        if bias.device != input.device:
            raise RuntimeError(f"fusedtrain::{name}: bias is on another device")
        if bias.shape != weight.shape[:1] or bias.dtype != input.dtype:
            raise RuntimeError(
                f"fusedtrain::{name}: bias must have a number for each channel of outputs, and "
                "input's dtype"
            )
    y = new_tensor(input, [input.size(0), weight.size(0), *out], channels_last)
    if y.numel():
        call = _call(input, weight, out, stride, padding, dilation, channels_last)
        taps = _taps_of(weight, channels_last)
        added = taps if bias is None else bias.detach().contiguous()
        plan = _plan(call, False, bias is not None)
        plan.run(_in_layout(input, channels_last), taps, added, y)
    return y


def depthwise_conv_backward(
    grad: Tensor, input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], channels_last: bool, input_asked: bool, weight_asked: bool,
    bias_asked: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    name = "depthwise_conv_backward"
    if grad.device != input.device:
        raise RuntimeError(f"fusedtrain::{name}: grad is on another device")
    if grad.dtype != input.dtype:
        raise RuntimeError(f"fusedtrain::{name}: grad and input must have the same dtype")
    _check(name, input, weight, stride, padding, dilation, channels_last)
    if grad.dim() != input.dim() or grad.shape[:2] != (input.size(0), weight.size(0)):
        raise RuntimeError(f"fusedtrain::{name}: grad must have the shape of the output")
    shape = list(input.shape if input_asked else [0])
    grad_input = new_tensor(input, shape, channels_last and input_asked)
    grad_weight = weight.new_empty(weight.shape if weight_asked else [0])
    grad_bias = weight.new_empty(weight.shape[:1] if bias_asked else [0])
    if not grad.numel():
        return grad_input.zero_(), grad_weight.zero_(), grad_bias.zero_()
    call = _call(input, weight, grad.shape[2:], stride, padding, dilation, channels_last)
    g = _in_layout(grad, channels_last)
    if grad_input.numel():
        taps = _taps_of(weight, channels_last)
        _plan(call, True, False).run(g, taps, taps, grad_input)
    if weight_asked or bias_asked:
        plan, count = _weight_plan(call, weight_asked, bias_asked)
        wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
        shares = [g.new_empty(t.numel() * count, dtype=wide) for t in (grad_weight, grad_bias)]
        plan.run(g, _in_layout(input, channels_last) if weight_asked else g, *shares)
        for gradient, parts in zip((grad_weight, grad_bias), shares, strict=True):
            if gradient.numel():
                finish_plan(gradient.numel(), count, 1).run(gradient, gradient, parts)
    return grad_input, grad_weight, grad_bias
