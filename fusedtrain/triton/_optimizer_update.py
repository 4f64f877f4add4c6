"""The sweeps over parameters: a trial of the update, and the update."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from ._optimizer_memory import (
    ENTRY,
    FIRST_CHUNK,
    FIRST_UNIT,
    INNER,
    NUMBERS,
    NUMEL,
    SCALAR,
    TENSOR,
    UNITS,
    memory,
    read,
    read_state,
    read_weights,
    state_memory,
    weights_memory,
    write,
    write_state,
)
from .split_weights import split_bfloat16, split_half
from .stochastic_rounding import random_bits, random_key, stochastic_bfloat16


@triton.jit
def four_numbers(k_ptr, WIDE: tl.constexpr):
    return (
        tl.load(k_ptr).to(WIDE), tl.load(k_ptr + 1).to(WIDE), tl.load(k_ptr + 2).to(WIDE),
        tl.load(k_ptr + 3).to(WIDE),
    )  # fmt: skip


@triton.jit
def numbers(k_ptr, entry_ptr, WIDE: tl.constexpr):
    """The numbers of all rules, and of this rule, as prepare_kernel wrote them for a tensor."""
    k_ptr += (1 + tl.load(entry_ptr + TENSOR)) * NUMBERS
    gradient, keep, size, late_decay = four_numbers(k_ptr, WIDE)
    caution, cautious, _, _ = four_numbers(k_ptr + 4, WIDE)
    c0, c1, c2, c3 = four_numbers(k_ptr + 8, WIDE)
    c4, c5, c6, c7 = four_numbers(k_ptr + 12, WIDE)
    k = (gradient, keep, size, late_decay, caution, cautious)
    return k, (c0, c1, c2, c3, c4, c5, c6, c7)


@triton.jit
def all_states(
    entry_ptr, begin, param, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Memory of each state and of its scales; for a state that does not exist, the parameter's."""
    state0, scales0 = state_memory(entry_ptr, begin, param, 0, S0, ALIGNED)
    state1, scales1 = state_memory(entry_ptr, begin, param, 1, S1, ALIGNED)
    state2, scales2 = state_memory(entry_ptr, begin, param, 2, S2, ALIGNED)
    return (state0, state1, state2), (scales0, scales1, scales2)


@triton.jit
def direction(
    p, stored, states, scales, start, n, at, inside, k, c,
    RULE: tl.constexpr, WIDE: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The direction (0 where it disagrees with g), the mask of agreement, and the new states."""
    s0, s1, s2 = tl.zeros_like(p), tl.zeros_like(p), tl.zeros_like(p)
    if S0 is not None:
        s0 = read_state(states[0], scales[0], start, n, at, inside, MASKED, WIDE)
    if S1 is not None:
        s1 = read_state(states[1], scales[1], start, n, at, inside, MASKED, WIDE)
    if S2 is not None:
        s2 = read_state(states[2], scales[2], start, n, at, inside, MASKED, WIDE)
    u, g, s0, s1, s2 = RULE(p, stored * k[0], s0, s1, s2, c)
    agrees = u * g > 0.0
    dropped = tl.where(k[5] != 0.0, u * 0.0, u)
    return tl.where(agrees, u, dropped), agrees, s0, s1, s2


@triton.jit
def read_gradient(
    grad, at, inside, begin, entry_ptr, factors_ptr,
    WIDE: tl.constexpr, INDEX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The stored gradient; clipped unit by unit if INDEX is a dtype (of element numbers)."""
    g = read(grad, at, inside, MASKED, WIDE)
    if INDEX is not None:
        inner = tl.load(entry_ptr + INNER).to(INDEX)
        units = tl.load(entry_ptr + UNITS).to(INDEX)
        unit = (begin.to(INDEX) + at) // inner % units
        g *= tl.load(factors_ptr + tl.load(entry_ptr + FIRST_UNIT) + unit).to(WIDE)
    return g


@triton.jit
def tried(
    grad, param, master, states, scales, start, n, begin, entry_ptr, factors_ptr, k, c,
    RULE: tl.constexpr, WIDE: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    INDEX: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers of each element: 1 if direction and gradient agree, u^2, u p."""
    at = start + tl.arange(0, BLOCK)
    inside = at < n
    p = read_weights(param, master, at, inside, MASKED, WIDE)
    g = read_gradient(grad, at, inside, begin, entry_ptr, factors_ptr, WIDE, INDEX, MASKED)
    u, agrees, _, _, _ = direction(
        p, g, states, scales, start, n, at, inside, k, c, RULE, WIDE, S0, S1, S2, MASKED
    )
    if MASKED:  # a rule may be nonzero outside
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
    entry_ptr = table_ptr + tl.load(part_ptr + part) * ENTRY
    begin = (part - tl.load(entry_ptr + FIRST_CHUNK)) * CHUNK
    n = tl.minimum(tl.load(entry_ptr + NUMEL) - begin, CHUNK).to(tl.int32)
    k, c = numbers(k_ptr, entry_ptr, WIDE)
    n = tl.where(tl.load(k_ptr).to(WIDE) == 0.0, n, 0)  # sums of a step that is skipped are 0
    grad = memory(entry_ptr, 1, G, ALIGNED) + begin
    param, master = weights_memory(entry_ptr, P, MASTER, ALIGNED)
    param += begin
    master += begin
    states, scales = all_states(entry_ptr, begin, param, S0, S1, S2, ALIGNED)
    agreeing = tl.zeros((BLOCK,), tl.int32)
    squares = tl.zeros((BLOCK,), tl.float64)
    products = tl.zeros((BLOCK,), tl.float64)
    for i in range(n // BLOCK):
        a, u2, up = tried(
            grad, param, master, states, scales, i * BLOCK, n, begin,
            entry_ptr, factors_ptr, k, c, RULE, WIDE, S0, S1, S2, INDEX, False, BLOCK,
        )  # fmt: skip
        agreeing += a
        squares += u2
        products += up
    if n % BLOCK != 0:
        a, u2, up = tried(
            grad, param, master, states, scales, n // BLOCK * BLOCK, n, begin,
            entry_ptr, factors_ptr, k, c, RULE, WIDE, S0, S1, S2, INDEX, True, BLOCK,
        )  # fmt: skip
        agreeing += a
        squares += u2
        products += up
    tl.store(shares_ptr + part * 3, tl.sum(agreeing).to(tl.float64))
    tl.store(shares_ptr + part * 3 + 1, tl.sum(squares))
    tl.store(shares_ptr + part * 3 + 2, tl.sum(products))


@triton.jit
def write_weights(
    param, master, at, inside, begin, p, key,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    if master.dtype.element_ty == tl.int16 or master.dtype.element_ty == tl.int8:
        if param.dtype.element_ty == tl.bfloat16:
            added = tl.full(p.shape, 0x80, tl.uint32)  # half a unit of the 24 bits that remain
            if STOCHASTIC:
                added = random_bits(begin + at, key) >> 24
            upper, correction = split_bfloat16(p, added, master.dtype.element_ty.primitive_bitwidth)
        else:
            upper, correction = split_half(p, master.dtype.element_ty.primitive_bitwidth)
        write(param, at, inside, upper, MASKED)
        write(master, at, inside, correction, MASKED)
    else:
        if tl.uint32 == MASTER:  # a master that follows its parameter
            write(master, at, inside, p.to(tl.uint32, bitcast=True), MASKED)
        elif MASTER is not None:
            write(master, at, inside, p, MASKED)
        if STOCHASTIC:
            write(param, at, inside, stochastic_bfloat16(p, begin + at, key), MASKED)
        else:
            write(param, at, inside, p, MASKED)


@triton.jit
def update_block(
    grad, param, states, scales, master, average, start, n, begin,
    entry_ptr, factors_ptr, k, c, weight, key,
    RULE: tl.constexpr, WIDE: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr,
    MASTER: tl.constexpr, A: tl.constexpr, INDEX: tl.constexpr, WRITE_BACK: tl.constexpr,
    STOCHASTIC: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    inside = at < n
    p = read_weights(param, master, at, inside, MASKED, WIDE)
    stored = read_gradient(grad, at, inside, begin, entry_ptr, factors_ptr, WIDE, INDEX, MASKED)
    if A is not None:
        old = read(average, at, inside, MASKED, WIDE)
    u, _, s0, s1, s2 = direction(
        p, stored, states, scales, start, n, at, inside, k, c, RULE, WIDE, S0, S1, S2, MASKED
    )
    u *= k[4]
    u = tl.where(k[3] != 0.0, u + k[3] * p, u)
    p = k[1] * p - k[2] * u
    if S0 is not None:
        write_state(states[0], scales[0], begin, start, n, at, inside, s0, key, 0, MASKED)
    if S1 is not None:
        write_state(states[1], scales[1], begin, start, n, at, inside, s1, key, 1, MASKED)
    if S2 is not None:
        write_state(states[2], scales[2], begin, start, n, at, inside, s2, key, 2, MASKED)
    if A is not None:
        write(average, at, inside, old + tl.full((), weight, WIDE) * (p - old), MASKED)
    write_weights(param, master, at, inside, begin, p, key, MASTER, STOCHASTIC, MASKED)
    if WRITE_BACK == 1:
        write(grad, at, inside, stored * tl.abs(k[0]), MASKED)
    elif WRITE_BACK == 2:
        write(grad, at, inside, tl.zeros_like(p), MASKED)


@triton.jit(do_not_specialize=["last", "weight", "seed"])
def update_kernel(
    table_ptr, part_ptr, k_ptr, factors_ptr,
    last: tl.int64, weight: tl.float64, seed: tl.int64,
    RULE: tl.constexpr, WIDE: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, MASTER: tl.constexpr, A: tl.constexpr,
    ALIGNED: tl.constexpr, INDEX: tl.constexpr, WRITE_BACK: tl.constexpr,
    STOCHASTIC: tl.constexpr, CODES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Backwards: the last reads of the sweep over gradients are still in the cache.
    part = last - tl.program_id(0)
    entry_ptr = table_ptr + tl.load(part_ptr + part) * ENTRY
    begin = (part - tl.load(entry_ptr + FIRST_CHUNK)) * CHUNK
    n = tl.minimum(tl.load(entry_ptr + NUMEL) - begin, CHUNK).to(tl.int32)
    grad = memory(entry_ptr, 1, G, ALIGNED) + begin
    if tl.load(k_ptr) == 0.0:
        k, c = numbers(k_ptr, entry_ptr, WIDE)
        param, master = weights_memory(entry_ptr, P, MASTER, ALIGNED)
        param += begin
        master += begin
        average = param
        states, scales = all_states(entry_ptr, begin, param, S0, S1, S2, ALIGNED)
        if A is not None:
            average = memory(entry_ptr, 6, A, ALIGNED) + begin
        key = tl.full((), 0, tl.uint32)
        if STOCHASTIC or CODES:
            key = random_key(seed, tl.load(entry_ptr + SCALAR), tl.load(k_ptr + 1))
        for i in range(n // BLOCK):
            update_block(
                grad, param, states, scales, master, average, i * BLOCK, n, begin,
                entry_ptr, factors_ptr, k, c, weight, key,
                RULE, WIDE, S0, S1, S2, MASTER, A, INDEX, WRITE_BACK, STOCHASTIC, False, BLOCK,
            )  # fmt: skip
        if n % BLOCK != 0:
            update_block(
                grad, param, states, scales, master, average, n // BLOCK * BLOCK, n, begin,
                entry_ptr, factors_ptr, k, c, weight, key,
                RULE, WIDE, S0, S1, S2, MASTER, A, INDEX, WRITE_BACK, STOCHASTIC, True, BLOCK,
            )  # fmt: skip
    else:  # the step is skipped
        if WRITE_BACK == 1:
            factor = tl.load(k_ptr + 2).to(WIDE)
            for i in range(tl.cdiv(n, BLOCK)):
                at = i * BLOCK + tl.arange(0, BLOCK)
                stored = read(grad, at, at < n, True, WIDE)
                write(grad, at, at < n, stored * factor, True)
        elif WRITE_BACK == 2:
            for i in range(tl.cdiv(n, BLOCK)):
                at = i * BLOCK + tl.arange(0, BLOCK)
                tl.store(grad + at, tl.zeros((BLOCK,), G), mask=at < n)
