"""The optimizer step over chunks of all tensors: kernels, then launchers.

A program has one chunk of one tensor. It finds the tensor's line in a table of addresses; see
`_tables.py`. Sums are shares of fixed chunks, which add_kernel adds up in a fixed order, so that
the same bits come out every time. What is decided by few numbers (skipping, clipping, what the
update multiplies by, step counts) is done by the torch operators of ``fusedtrain.reference``.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.optimizer_rules import RULES
from ..reference.optimizers import MEASURE_PARAMETERS, _Measures, _Plan
from . import _tables, optimizers
from ._tables import CHUNK, DeviceCall, Kind
from .launch import STORED, WIDE, Launcher
from .optimizers import random_key, stochastic_bfloat16
from .vecmath import widen

_ENTRY: tl.constexpr = tl.constexpr(_tables.ENTRY)
_NUMEL: tl.constexpr = tl.constexpr(_tables.NUMEL)
_FIRST_CHUNK: tl.constexpr = tl.constexpr(_tables.FIRST_CHUNK)
_INDEX: tl.constexpr = tl.constexpr(_tables.INDEX)
_SCALAR: tl.constexpr = tl.constexpr(_tables.SCALAR)
_UNITS: tl.constexpr = tl.constexpr(_tables.UNITS)
_INNER: tl.constexpr = tl.constexpr(_tables.INNER)
_FIRST_UNIT: tl.constexpr = tl.constexpr(_tables.FIRST_UNIT)
_FIRST_PIECE: tl.constexpr = tl.constexpr(_tables.FIRST_PIECE)
# That many numbers of float64 say how a tensor is updated.
_NUMBERS: tl.constexpr = tl.constexpr(16)


@triton.jit
def memory(entry_ptr, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """One of a tensor's buffers, from its address."""
    pointer = tl.load(entry_ptr + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def read(pointer, at, inside, MASKED: tl.constexpr, WIDE: tl.constexpr):
    if MASKED:
        return widen(tl.load(pointer + at, mask=inside, other=0.0)).to(WIDE)
    else:
        return widen(tl.load(pointer + at)).to(WIDE)


@triton.jit
def write(pointer, at, inside, values, MASKED: tl.constexpr):
    if pointer.dtype.element_ty.primitive_bitwidth == 16 and values.dtype == tl.float64:
        values = values.to(tl.float32)  # there is no direct way
    values = values.to(pointer.dtype.element_ty)
    if MASKED:
        tl.store(pointer + at, values, mask=inside)
    else:
        tl.store(pointer + at, values)


@triton.jit
def four_numbers(k_ptr, WIDE: tl.constexpr):
    return (
        tl.load(k_ptr).to(WIDE), tl.load(k_ptr + 1).to(WIDE), tl.load(k_ptr + 2).to(WIDE),
        tl.load(k_ptr + 3).to(WIDE),
    )  # fmt: skip


@triton.jit
def numbers(k_ptr, WIDE: tl.constexpr):
    """Those of all rules, as _numbers() stacks them, and those of this one."""
    gradient, keep, size, late_decay = four_numbers(k_ptr, WIDE)
    caution, cautious, skip, _ = four_numbers(k_ptr + 4, WIDE)
    c0, c1, c2, c3 = four_numbers(k_ptr + 8, WIDE)
    c4, c5, c6, c7 = four_numbers(k_ptr + 12, WIDE)
    k = (gradient, keep, size, late_decay, caution, cautious, skip)
    return k, (c0, c1, c2, c3, c4, c5, c6, c7)


# --- the sweep over gradients


@triton.jit
def measured(
    grad, param, at, inside, unscale,
    PARAMETERS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of each element: 1 where the gradient is not finite, g^2, p^2."""
    g = read(grad, at, inside, MASKED, WIDE) * unscale
    wide = g.to(tl.float64)
    weight = tl.zeros_like(wide)
    if PARAMETERS:
        weight = read(param, at, inside, MASKED, WIDE).to(tl.float64)
    return tl.where(g - g != 0.0, 1, 0), wide * wide, weight * weight


@triton.jit(do_not_specialize=["first"])
def measure_kernel(
    table_ptr, part_ptr, unscale_ptr, shares_ptr, first: tl.int64,
    WIDE: tl.constexpr, G: tl.constexpr, P: tl.constexpr, MASTER: tl.constexpr,
    ALIGNED: tl.constexpr, INDEX: tl.constexpr, PARAMETERS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Shares of chunks; or, where INDEX is a dtype to count elements in, of pieces of units."""
    part = first + tl.program_id(0)
    entry_ptr = table_ptr + tl.load(part_ptr + part) * _ENTRY
    unscale = tl.load(unscale_ptr).to(WIDE)
    grad = memory(entry_ptr, 1, G, ALIGNED)
    param = memory(entry_ptr, 5 if MASTER else 0, P, ALIGNED)
    numel = tl.load(entry_ptr + _NUMEL)
    at = tl.arange(0, BLOCK)
    bad = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.float64)
    weights = tl.zeros((BLOCK,), tl.float64)
    if INDEX is None:
        begin = (part - tl.load(entry_ptr + _FIRST_CHUNK)) * CHUNK
        n = tl.minimum(numel - begin, CHUNK).to(tl.int32)
        grad += begin
        param += begin
        for i in range(n // BLOCK):
            b, g2, p2 = measured(
                grad, param, i * BLOCK + at, None, unscale, PARAMETERS, False, WIDE
            )
            bad += b
            squares += g2
            weights += p2
        if n % BLOCK != 0:
            place = n // BLOCK * BLOCK + at
            b, g2, p2 = measured(grad, param, place, place < n, unscale, PARAMETERS, True, WIDE)
            bad += b
            squares += g2
            weights += p2
    else:
        units = tl.load(entry_ptr + _UNITS).to(INDEX)
        inner = tl.load(entry_ptr + _INNER).to(INDEX)
        of_unit = numel.to(INDEX) // units
        local = (part - tl.load(entry_ptr + _FIRST_PIECE)).to(INDEX)
        pieces = tl.cdiv(of_unit, CHUNK)
        unit = local // pieces
        begin = local % pieces * CHUNK
        n = tl.minimum(of_unit - begin, CHUNK)
        for i in range(tl.cdiv(n, BLOCK)):
            local_at = (i * BLOCK + at).to(INDEX)
            within = begin + local_at
            # Element `within` of the unit: stretches of `inner` elements, one in every `units`.
            place = (within // inner * units + unit) * inner + within % inner
            b, g2, p2 = measured(grad, param, place, local_at < n, unscale, PARAMETERS, True, WIDE)
            bad += b
            squares += g2
            weights += p2
    tl.store(shares_ptr + part * 3, tl.sum(bad).to(tl.float64))
    tl.store(shares_ptr + part * 3 + 1, tl.sum(squares))
    tl.store(shares_ptr + part * 3 + 2, tl.sum(weights))


@triton.jit
def add_kernel(
    sums_ptr, shares_ptr, first_ptr, place_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row of `sums`: those rows of `shares` that are one tensor's, or one unit's."""
    which = tl.program_id(0)
    begin = tl.load(first_ptr + which)
    n = tl.load(first_ptr + which + 1) - begin
    row, column = tl.arange(0, BLOCK), tl.arange(0, 4)
    total = tl.zeros((BLOCK, 4), tl.float64)
    for i in range(tl.cdiv(n, BLOCK)):
        at = ((begin + i * BLOCK) + row)[:, None] * WIDTH + column[None, :]
        inside = (i * BLOCK + row < n)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(shares_ptr + at, mask=inside, other=0.0)
    place = tl.load(place_ptr + which) * WIDTH + column
    tl.store(sums_ptr + place, tl.sum(total, axis=0), mask=column < WIDTH)


# --- the sweeps over parameters


@triton.jit
def direction(
    p, stored, state0, state1, state2, at, inside, k, c,
    RULE: tl.constexpr, WIDE: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The direction, with disagreeing elements at 0, which agree, and the new states."""
    s0, s1, s2 = tl.zeros_like(p), tl.zeros_like(p), tl.zeros_like(p)
    if S0 is not None:
        s0 = read(state0, at, inside, MASKED, WIDE)
    if S1 is not None:
        s1 = read(state1, at, inside, MASKED, WIDE)
    if S2 is not None:
        s2 = read(state2, at, inside, MASKED, WIDE)
    u, g, s0, s1, s2 = RULE(p, stored * k[0], s0, s1, s2, c)
    agrees = u * g > 0.0
    dropped = tl.where(k[5] != 0.0, u * 0.0, u)
    return tl.where(agrees, u, dropped), agrees, s0, s1, s2


@triton.jit
def read_gradient(
    grad, at, inside, begin, entry_ptr, factors_ptr,
    WIDE: tl.constexpr, INDEX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As stored; clipped unit by unit where INDEX is a dtype to count elements in."""
    g = read(grad, at, inside, MASKED, WIDE)
    if INDEX is not None:
        inner = tl.load(entry_ptr + _INNER).to(INDEX)
        units = tl.load(entry_ptr + _UNITS).to(INDEX)
        unit = (begin.to(INDEX) + at) // inner % units
        g *= tl.load(factors_ptr + tl.load(entry_ptr + _FIRST_UNIT) + unit).to(WIDE)
    return g


@triton.jit
def tried(
    grad, param, state0, state1, state2, at, inside, begin, entry_ptr, factors_ptr, k, c,
    RULE: tl.constexpr, WIDE: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    INDEX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Of each element: 1 where direction and gradient agree, u^2, u p."""
    p = read(param, at, inside, MASKED, WIDE)
    g = read_gradient(grad, at, inside, begin, entry_ptr, factors_ptr, WIDE, INDEX, MASKED)
    u, agrees, _, _, _ = direction(
        p, g, state0, state1, state2, at, inside, k, c, RULE, WIDE, S0, S1, S2, MASKED
    )
    if MASKED:  # where a rule makes something of nothing
        u = tl.where(inside, u, 0.0)
        agrees = agrees & inside
    wide = u.to(tl.float64)
    return tl.where(agrees, 1, 0), wide * wide, wide * p.to(tl.float64)


@triton.jit(do_not_specialize=["first"])
def try_kernel(
    table_ptr, part_ptr, k_ptr, factors_ptr, shares_ptr, first: tl.int64,
    RULE: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, MASTER: tl.constexpr,
    ALIGNED: tl.constexpr, INDEX: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part = first + tl.program_id(0)
    entry_ptr = table_ptr + tl.load(part_ptr + part) * _ENTRY
    k_ptr += tl.load(entry_ptr + _INDEX) * _NUMBERS
    begin = (part - tl.load(entry_ptr + _FIRST_CHUNK)) * CHUNK
    n = tl.minimum(tl.load(entry_ptr + _NUMEL) - begin, CHUNK).to(tl.int32)
    k, c = numbers(k_ptr, WIDE)
    n = tl.where(k[6] == 0.0, n, 0)  # sums of a step that is skipped are 0
    grad = memory(entry_ptr, 1, G, ALIGNED) + begin
    param = memory(entry_ptr, 5 if MASTER else 0, P, ALIGNED) + begin
    state0, state1, state2 = param, param, param
    if S0 is not None:
        state0 = memory(entry_ptr, 2, S0, ALIGNED) + begin
    if S1 is not None:
        state1 = memory(entry_ptr, 3, S1, ALIGNED) + begin
    if S2 is not None:
        state2 = memory(entry_ptr, 4, S2, ALIGNED) + begin
    agreeing = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.float64)
    products = tl.zeros((BLOCK,), tl.float64)
    for i in range(n // BLOCK):
        a, u2, up = tried(
            grad, param, state0, state1, state2, i * BLOCK + tl.arange(0, BLOCK), None, begin,
            entry_ptr, factors_ptr, k, c, RULE, WIDE, S0, S1, S2, INDEX, False,
        )  # fmt: skip
        agreeing += a
        squares += u2
        products += up
    if n % BLOCK != 0:
        at = n // BLOCK * BLOCK + tl.arange(0, BLOCK)
        a, u2, up = tried(
            grad, param, state0, state1, state2, at, at < n, begin,
            entry_ptr, factors_ptr, k, c, RULE, WIDE, S0, S1, S2, INDEX, True,
        )  # fmt: skip
        agreeing += a
        squares += u2
        products += up
    tl.store(shares_ptr + part * 3, tl.sum(agreeing).to(tl.float64))
    tl.store(shares_ptr + part * 3 + 1, tl.sum(squares))
    tl.store(shares_ptr + part * 3 + 2, tl.sum(products))


@triton.jit
def update_block(
    grad, param, state0, state1, state2, master, average, at, inside, begin,
    entry_ptr, factors_ptr, k, c, weight, key,
    RULE: tl.constexpr, WIDE: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    MASTER: tl.constexpr, A: tl.constexpr, INDEX: tl.constexpr, WRITE_BACK: tl.constexpr,
    STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if MASTER:
        p = read(master, at, inside, MASKED, WIDE)
    else:
        p = read(param, at, inside, MASKED, WIDE)
    stored = read_gradient(grad, at, inside, begin, entry_ptr, factors_ptr, WIDE, INDEX, MASKED)
    if A is not None:
        old = read(average, at, inside, MASKED, WIDE)
    u, _, s0, s1, s2 = direction(
        p, stored, state0, state1, state2, at, inside, k, c, RULE, WIDE, S0, S1, S2, MASKED
    )
    u *= k[4]
    u = tl.where(k[3] != 0.0, u + k[3] * p, u)
    p = k[1] * p - k[2] * u
    if S0 is not None:
        write(state0, at, inside, s0, MASKED)
    if S1 is not None:
        write(state1, at, inside, s1, MASKED)
    if S2 is not None:
        write(state2, at, inside, s2, MASKED)
    if A is not None:
        write(average, at, inside, old + tl.full((), weight, WIDE) * (p - old), MASKED)
    if MASTER:
        write(master, at, inside, p, MASKED)
    if STOCHASTIC:
        write(param, at, inside, stochastic_bfloat16(p, begin + at, key), MASKED)
    else:
        write(param, at, inside, p, MASKED)
    if WRITE_BACK == 1:
        write(grad, at, inside, stored * tl.abs(k[0]), MASKED)
    elif WRITE_BACK == 2:
        write(grad, at, inside, tl.zeros_like(p), MASKED)


@triton.jit(do_not_specialize=["last", "weight", "seed"])
def update_kernel(
    table_ptr, part_ptr, k_ptr, factors_ptr, control_ptr,
    last: tl.int64, weight: tl.float64, seed: tl.int64,
    RULE: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, MASTER: tl.constexpr, A: tl.constexpr,
    ALIGNED: tl.constexpr, INDEX: tl.constexpr, WRITE_BACK: tl.constexpr,
    STOCHASTIC: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Backwards: what the sweep over gradients read last is still in the cache.
    part = last - tl.program_id(0)
    entry_ptr = table_ptr + tl.load(part_ptr + part) * _ENTRY
    k_ptr += tl.load(entry_ptr + _INDEX) * _NUMBERS
    begin = (part - tl.load(entry_ptr + _FIRST_CHUNK)) * CHUNK
    n = tl.minimum(tl.load(entry_ptr + _NUMEL) - begin, CHUNK).to(tl.int32)
    grad = memory(entry_ptr, 1, G, ALIGNED) + begin
    k, c = numbers(k_ptr, WIDE)
    if k[6] == 0.0:
        param = memory(entry_ptr, 0, P, ALIGNED) + begin
        state0, state1, state2, master, average = param, param, param, param, param
        if S0 is not None:
            state0 = memory(entry_ptr, 2, S0, ALIGNED) + begin
        if S1 is not None:
            state1 = memory(entry_ptr, 3, S1, ALIGNED) + begin
        if S2 is not None:
            state2 = memory(entry_ptr, 4, S2, ALIGNED) + begin
        if MASTER:
            master = memory(entry_ptr, 5, tl.float32, ALIGNED) + begin
        if A is not None:
            average = memory(entry_ptr, 6, A, ALIGNED) + begin
        key = tl.full((), 0, tl.uint32)
        if STOCHASTIC:
            key = random_key(seed, tl.load(entry_ptr + _SCALAR), tl.load(control_ptr + 5))
        for i in range(n // BLOCK):
            update_block(
                grad, param, state0, state1, state2, master, average,
                i * BLOCK + tl.arange(0, BLOCK), None, begin, entry_ptr, factors_ptr, k, c,
                weight, key,
                RULE, WIDE, S0, S1, S2, MASTER, A, INDEX, WRITE_BACK, STOCHASTIC, False,
            )  # fmt: skip
        if n % BLOCK != 0:
            at = n // BLOCK * BLOCK + tl.arange(0, BLOCK)
            update_block(
                grad, param, state0, state1, state2, master, average,
                at, at < n, begin, entry_ptr, factors_ptr, k, c, weight, key,
                RULE, WIDE, S0, S1, S2, MASTER, A, INDEX, WRITE_BACK, STOCHASTIC, True,
            )  # fmt: skip
    else:  # the step is skipped
        if WRITE_BACK == 2:
            for i in range(tl.cdiv(n, BLOCK)):
                at = i * BLOCK + tl.arange(0, BLOCK)
                tl.store(grad + at, tl.zeros((BLOCK,), G), mask=at < n)


# --- launchers

_launch_measure = Launcher(measure_kernel)
_launch_add = Launcher(add_kernel)
_launch_try = Launcher(try_kernel)
_launch_update = Launcher(update_kernel)

# 8 elements, 16 or 32 bytes of each buffer, for each of 128 threads (4 wavefronts are 256).
_BLOCK = 1024 if torch.version.hip is None else 2048
_ADD_BLOCK = 128


def _stored(dtype: torch.dtype | None) -> Any:
    return None if dtype is None else STORED[dtype]


def _index(kind: Kind, units: bool) -> Any:
    return None if not units else tl.int64 if kind.large else tl.int32


@functools.cache
def _measure_constants(kind: Kind, units: bool, parameters: bool) -> tuple[Any, ...]:
    param = tl.float32 if kind.master else STORED[kind.param]
    return (
        WIDE[kind.param], STORED[kind.grad], param, kind.master, kind.aligned,
        _index(kind, units), parameters, CHUNK, _BLOCK,
    )  # fmt: skip


@functools.cache
def _try_constants(rule: str, kind: Kind, units: bool) -> tuple[Any, ...]:
    param = tl.float32 if kind.master else STORED[kind.param]
    return (
        getattr(optimizers, rule), WIDE[kind.param], STORED[kind.grad], param,
        *map(_stored, kind.states), kind.master, kind.aligned, _index(kind, units), CHUNK, _BLOCK,
    )  # fmt: skip


@functools.cache
def _update_constants(
    rule: str, kind: Kind, units: bool, averages: bool, write_back: int, stochastic: bool
) -> tuple[Any, ...]:
    return (
        getattr(optimizers, rule), WIDE[kind.param], STORED[kind.grad], STORED[kind.param],
        *map(_stored, kind.states), kind.master, _stored(kind.average) if averages else None,
        kind.aligned, _index(kind, units), write_back,
        stochastic and kind.param is torch.bfloat16 and not kind.master, CHUNK, _BLOCK,
    )  # fmt: skip


def _add(shares: Tensor, first: Tensor, places: Tensor) -> Tensor:
    """Rows first[i] up to first[i + 1] of `shares`, added up in row places[i]."""
    width = shares.size(1)
    sums = shares.new_empty(places.numel(), width)
    _launch_add(width, places.numel(), (sums, shares, first, places), (), (width, _ADD_BLOCK))
    return sums


def _measure(call: DeviceCall) -> tuple[_Measures, Tensor | None]:
    """What the gradients are, and what each unit is clipped by."""
    units = call.clips_units
    count = call.piece_count if units else call.chunk_count
    shares = call.scalars.new_empty((count, 3), dtype=torch.float64)
    unscale = call.unscale()
    parameters = bool(call.measures & MEASURE_PARAMETERS)
    for kind, first_chunk, chunks, first_piece, pieces in call.launches:
        variant = (kind, units, parameters)
        parts, first, programs = (
            (call.pieces, first_piece, pieces) if units else (call.chunks, first_chunk, chunks)
        )
        if programs:
            tensors = (call.entries, parts, unscale, shares)
            _launch_measure(variant, programs, tensors, (first,), _measure_constants(*variant))
    if not units:
        return call.measured(_add(shares, call.first_chunks, call.places)), None
    every_unit = torch.arange(call.unit_count, device=call.device)
    if call.unit_count == 0:
        return call.measured(None), shares.new_ones(0)
    of_units = _add(shares, call.first_pieces, every_unit)
    factors = call.unit_factor(of_units[:, 1].sqrt(), of_units[:, 2].sqrt())
    clipped = of_units[:, 1] * factors.square()
    sums = _add(torch.cat([of_units, clipped[:, None]], 1), call.first_units, call.places)
    return _Measures(sums[:, :3].contiguous(), sums[:, 3], None), factors


def _numbers(call: DeviceCall, plan: _Plan) -> Tensor:
    k = plan.k
    head = (plan.gradient, k.keep, k.size, k.late_decay, k.caution, k.cautious, plan.skip.double())
    rows = torch.stack(torch.broadcast_tensors(*head, k.keep), 1)
    return torch.nn.functional.pad(torch.cat([rows, k.c], 1), (0, 8 - k.c.size(1)))


def _try(call: DeviceCall, plan: _Plan, factors: Tensor | None) -> Tensor:
    shares = call.scalars.new_empty((call.chunk_count, 3), dtype=torch.float64)
    numbers = _numbers(call, plan)
    rule = RULES[call.rule].name
    for kind, first, chunks, _, _ in call.launches:
        variant = (rule, kind, call.clips_units)
        if chunks:
            clips = numbers if factors is None else factors
            tensors = (call.entries, call.chunks, numbers, clips, shares)
            _launch_try(variant, chunks, tensors, (first,), _try_constants(*variant))
    return _add(shares, call.first_chunks, call.places)


def _update(call: DeviceCall, plan: _Plan, factors: Tensor | None) -> None:
    numbers = _numbers(call, plan)
    rule, option = RULES[call.rule].name, call.option
    weight, seed = option["average_weight"], int(option["seed"])
    write_back, stochastic = int(option["write_back"]), option["stochastic"] != 0
    for kind, first, chunks, _, _ in call.launches:
        variant = (rule, kind, call.clips_units, weight != 0, write_back, stochastic)
        if chunks:
            clips = numbers if factors is None else factors
            tensors = (call.entries, call.chunks, numbers, clips, call.control)
            options = (first + chunks - 1, weight, seed)
            _launch_update(variant, chunks, tensors, options, _update_constants(*variant))
    params = set(map(id, call.params))
    for original, copy in call.shadows:
        if write_back or id(original) in params:
            original.copy_(copy)


@torch.no_grad()
def measure_gradients(*arguments: Any) -> Tensor:
    call = DeviceCall(*arguments)
    return _measure(call)[0].sums if call.params else call.measured(None).sums


@torch.no_grad()
def try_update(*arguments: Any) -> Tensor:
    call = DeviceCall(*arguments[:-1])
    if not call.params:
        return call.measured(None).sums
    if call.clips_units:
        raise RuntimeError("fusedtrain: units are clipped by what their own call measures")
    return _try(call, call.plan(call.measured(arguments[-1])), None)


@torch.no_grad()
def optimizer_step(*arguments: Any) -> Tensor:
    call, sums, trial_sums = DeviceCall(*arguments[:-2]), arguments[-2], arguments[-1]
    if sums is not None and call.clips_units:
        raise RuntimeError("fusedtrain: units are clipped by what their own call measures")
    if not call.params:
        return call.measured(sums).sums.clone()
    factors = None
    if sums is None and call.measures:
        measures, factors = _measure(call)
    else:
        measures = call.measured(sums)
    plan = call.plan(measures)
    if call.option["trial"] != 0:
        if trial_sums is None:
            trial_sums = _try(call, plan, factors)
        plan = call.finished(plan, trial_sums)
    _update(call, plan, factors)
    call.commit(plan, measures.sums)
    return measures.sums.clone()
