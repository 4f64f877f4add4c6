"""The launches of the optimizer step over chunks of all tensors, and their arguments.

A step takes four launches for any number of groups: a sweep over gradients, sums by tensor, the
coefficients, and the update. Each kind of tensors (dtypes, states) has its own sweeps; a trial of
the update adds three launches, and clipping by units one. A program of a sweep has one chunk of one
tensor, and looks up the tensor's line in a table of addresses (`_optimizer_tables.py`). Shares of
fixed chunks are added up in a fixed order, so sums are the same bits every time.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..reference.optimizer_rules import RULES
from ..reference.optimizers import MEASURE_PARAMETERS
from ..reference.state_codes import SIGNED, SQUARES
from ..reference.stochastic_rounding import whole_seed
from . import optimizer_rules as optimizers
from ._layout import cdiv
from ._optimizer_calls import DeviceCall
from ._optimizer_measure import measure_kernel
from ._optimizer_tables import CHUNK, NUMBERS, Kind
from ._optimizer_tail import add_kernel, clip_units_kernel, prepare_kernel
from ._optimizer_update import try_kernel, update_kernel
from .launch import STORED, WIDE, Launcher

_launch_measure = Launcher(measure_kernel)
_launch_clip_units = Launcher(clip_units_kernel)
_launch_add = Launcher(add_kernel)
_launch_prepare = Launcher(prepare_kernel, num_warps=1)
_launch_try = Launcher(try_kernel)
_launch_update = Launcher(update_kernel)

# Each of 128 threads (4 wavefronts: 256) has 8 elements, 16 or 32 bytes of each buffer.
_BLOCK = 1024 if torch.version.hip is None else 2048
# With states in codes 4, since 8 take more registers than there are: 4 bytes of each code buffer.
_CODES_BLOCK = 512 if torch.version.hip is None else 1024
_ADD_BLOCK = 128
_TAIL_BLOCK = 32 if torch.version.hip is None else 64  # the lanes of one warp


# Float32 weights (uint32: that follow 16-bit parameters), or the corrections of these.
_MASTERS = {
    None: None, torch.float32: tl.float32, torch.uint32: tl.uint32, torch.int16: tl.int16,
    torch.int8: tl.int8,
}  # fmt: skip


# Floats, or codes of momenta and of averages of squares.
_STATES: dict[Any, Any] = {None: None, **STORED, SIGNED: tl.int8, SQUARES: tl.uint8}


def _has_codes(kind: Kind) -> bool:
    return SIGNED in kind.states or SQUARES in kind.states


def _sizes(kind: Kind) -> tuple[int, int]:
    return CHUNK, _CODES_BLOCK if _has_codes(kind) else _BLOCK


def _index(kind: Kind, units: bool) -> Any:
    return None if not units else tl.int64 if kind.large else tl.int32


@functools.cache
def _measure_constants(kind: Kind, units: bool, parameters: bool) -> tuple[Any, ...]:
    return (
        WIDE[kind.param], STORED[kind.grad], STORED[kind.param], _MASTERS[kind.master],
        kind.aligned, _index(kind, units), parameters, CHUNK, _BLOCK,
    )  # fmt: skip


@functools.cache
def _prepare_constants(
    rule: str, measured: bool, clipped: bool, tried: bool, commits: bool
) -> tuple[Any, ...]:
    return (
        getattr(optimizers, f"prepare_{rule}"), getattr(optimizers, f"finish_{rule}", None),
        measured, clipped, tried, commits, _TAIL_BLOCK,
    )  # fmt: skip


@functools.cache
def _try_constants(rule: str, kind: Kind, units: bool) -> tuple[Any, ...]:
    return (
        getattr(optimizers, rule), WIDE[kind.param], STORED[kind.grad], STORED[kind.param],
        *(_STATES[s] for s in kind.states), _MASTERS[kind.master], kind.aligned,
        _index(kind, units), *_sizes(kind),
    )  # fmt: skip


@functools.cache
def _update_constants(
    rule: str, kind: Kind, units: bool, averages: bool, write_back: int, stochastic: bool
) -> tuple[Any, ...]:
    return (
        getattr(optimizers, rule), WIDE[kind.param], STORED[kind.grad], STORED[kind.param],
        *(_STATES[s] for s in kind.states), _MASTERS[kind.master],
        _STATES[kind.average if averages else None], kind.aligned,
        _index(kind, units), write_back,
        stochastic and kind.param is torch.bfloat16 and kind.master in (None, torch.int8),
        _has_codes(kind), *_sizes(kind),
    )  # fmt: skip


class _Measures(NamedTuple):
    sums: Tensor  # [n, 3]: number of non-finite gradients, sum of g^2, sum of p^2
    clipped: Tensor | None = None  # [n]: sum of g^2 after unit-wise clipping
    factors: Tensor | None = None  # the clip factor of each unit
    done: bool = True  # False: `sums` is memory to which prepare_kernel writes zeros


def _doubles(call: DeviceCall, *shape: int) -> Tensor:
    return call.scalars.new_empty(shape, dtype=torch.float64)


def _add(call: DeviceCall, shares: Tensor, first: Tensor) -> tuple[Tensor, Tensor | None]:
    """Sums of each tensor's rows of `shares`, which begin at `first`; and of the fourth column."""
    count, width = len(call.params), shares.size(1)
    sums = _doubles(call, count, 3)
    clipped = _doubles(call, count) if width == 4 else None
    tensors = (sums, sums if clipped is None else clipped, shares, call.entries, first)
    _launch_add(width, count, tensors, (), (width, _ADD_BLOCK))
    return sums, clipped


def _measure(call: DeviceCall) -> _Measures:
    units = call.clips_units
    shares = _doubles(call, call.piece_count if units else call.chunk_count, 3)
    parameters = bool(call.measures & MEASURE_PARAMETERS)
    for kind, first_chunk, chunks, first_piece, pieces in call.launches:
        variant = (kind, units, parameters)
        parts, first, programs = (
            (call.pieces, first_piece, pieces) if units else (call.chunks, first_chunk, chunks)
        )
        if programs:
            tensors = (call.entries, parts, call.scale_or_one, shares)
            _launch_measure(variant, programs, tensors, (first,), _measure_constants(*variant))
    if not units:
        return _Measures(*_add(call, shares, call.first_chunks))
    of_units, factors = _doubles(call, call.unit_count, 4), _doubles(call, call.unit_count)
    if call.unit_count:
        clipped = (factors, of_units, shares, call.first_pieces, call.options)
        _launch_clip_units((), call.unit_count, clipped, (), (_ADD_BLOCK,))
    return _Measures(*_add(call, of_units, call.first_units), factors)


def _measured(call: DeviceCall, sums: Tensor | None) -> _Measures:
    """The measures from another call's sums, or without sums none."""
    if sums is None:
        return _Measures(_doubles(call, len(call.params), 3), done=False)
    _check_sums(call, sums)
    return _Measures(sums)


def _check_sums(call: DeviceCall, sums: Tensor) -> None:
    if (
        sums.dtype != torch.float64
        or sums.shape != (len(call.params), 3)
        or not sums.is_contiguous()
        or sums.device != call.device
    ):
        raise RuntimeError("fusedtrain: sums")


def _prepare(
    call: DeviceCall, measures: _Measures, numbers: Tensor, tried: Tensor | None, commits: bool
) -> None:
    sums, clipped = measures.sums, measures.clipped
    variant = (
        RULES[call.rule].name, measures.done, clipped is not None, tried is not None, commits
    )  # fmt: skip
    tensors = (
        numbers, call.entries, sums, sums if clipped is None else clipped,
        sums if tried is None else tried, call.options, call.rates, call.scalars, call.control,
        call.scale_or_one, call.found_or_none,
    )  # fmt: skip
    count = len(call.params)
    _launch_prepare(
        variant, cdiv(count, _TAIL_BLOCK), tensors, (count, call.columns),
        _prepare_constants(*variant),
    )  # fmt: skip


def _try(call: DeviceCall, numbers: Tensor, factors: Tensor | None) -> Tensor:
    shares = _doubles(call, call.chunk_count, 3)
    rule = RULES[call.rule].name
    for kind, first, chunks, _, _ in call.launches:
        variant = (rule, kind, call.clips_units)
        if chunks:
            clips = numbers if factors is None else factors
            tensors = (call.entries, call.chunks, numbers, clips, shares)
            _launch_try(variant, chunks, tensors, (first,), _try_constants(*variant))
    return _add(call, shares, call.first_chunks)[0]


def _update(call: DeviceCall, numbers: Tensor, factors: Tensor | None) -> None:
    rule, option = RULES[call.rule].name, call.option
    weight, seed = option.average_weight, whole_seed(option.seed, option.seed_high)
    write_back, stochastic = int(option.write_back), option.stochastic != 0
    for kind, first, chunks, _, _ in call.launches:
        variant = (rule, kind, call.clips_units, weight != 0, write_back, stochastic)
        if chunks:
            clips = numbers if factors is None else factors
            tensors = (call.entries, call.chunks, numbers, clips)
            options = (first + chunks - 1, weight, seed)
            _launch_update(variant, chunks, tensors, options, _update_constants(*variant))
    if call.shadows:
        params = set(map(id, call.params))
        for original, copy in call.shadows:
            if write_back or id(original) in params:
                original.copy_(copy)


@torch.no_grad()
def measure_gradients(*arguments: Any) -> Tensor:
    call = DeviceCall(*arguments)
    return _measure(call).sums if call.params else _measured(call, None).sums


@torch.no_grad()
def try_update(*arguments: Any) -> Tensor:
    call = DeviceCall(*arguments[:-1])
    if not call.params:
        return _measured(call, None).sums
    if call.clips_units:
        raise RuntimeError("fusedtrain: units are clipped by what their own call measures")
    numbers = _doubles(call, 1 + len(call.params), NUMBERS)
    _prepare(call, _measured(call, arguments[-1]), numbers, None, commits=False)
    return _try(call, numbers, None)


@torch.no_grad()
def optimizer_step(*arguments: Any) -> Tensor:
    call, sums, tried = DeviceCall(*arguments[:-2]), arguments[-2], arguments[-1]
    if sums is not None:
        if call.clips_units:
            raise RuntimeError("fusedtrain: units are clipped by what their own call measures")
        sums = sums.clone()  # an op must not return its argument
    if not call.params:
        return _measured(call, sums).sums
    measures = _measure(call) if sums is None and call.measures else _measured(call, sums)
    numbers = _doubles(call, 1 + len(call.params), NUMBERS)
    if call.option.trial == 0:
        tried = None
    elif tried is not None:
        _check_sums(call, tried)
    else:
        _prepare(call, measures, numbers, None, commits=False)
        tried = _try(call, numbers, measures.factors)
    _prepare(call, measures, numbers, tried, commits=True)
    _update(call, numbers, measures.factors)
    return measures.sums
