"""Optimizer states in 8 bits, with the bits of csrc/state_codes.h.

Groups of 32 neighbouring elements in memory share a scale, the largest magnitude among them.
With r = x / scale, int8 codes hold 127 * 2 r / (1 + |r|), uint8 codes of numbers >= 0 hold
255 sqrt(r). Codes are rounded at random so that the mean of the stored number is the number.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
SIGNED, SQUARES = torch.int8, torch.uint8  # codes of momenta, of averages of squares
_LEAST, _MOST = 0x0D800000, 0x7B000000  # bits of scales: 2^-100, 2^119
_LANE = 0x9E3779B9  # 2^32 / golden ratio: random numbers of neighbours are spread out
_BITS32 = 0xFFFFFFFF
STATE_STREAM = 1 << 30  # groups of state k are elements from (k + 1) 2^30 on for `random_bits`
SHARED_BY = 8  # groups that follow each other have the same random bits


def is_codes(state: Tensor | None) -> bool:
    """Whether a state is kept as codes."""
    return state is not None and state.dtype in (SIGNED, SQUARES)


def group_count(numel: int) -> int:
    return (numel + GROUP - 1) // GROUP


def random_indices(numel: int, state: int, device: torch.device) -> Tensor:
    """Indices whose hashes are the random bits of each group of a state."""
    return torch.arange(group_count(numel), device=device) // SHARED_BY + (state + 1) * STATE_STREAM


def in_memory_order(t: Tensor) -> Tensor:
    """The elements of a dense tensor as they lie in memory: a view of one dimension."""
    return t.as_strided((t.numel(),), (1,))


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 numbers of codes, in their layout.

    Args:
        codes: int8 or uint8, dense.
        scales: float32, a number for each group.
    """
    k = in_memory_order(codes).to(torch.float32)
    scale = scales.reshape(-1).repeat_interleave(GROUP)[: len(k)]
    share = k / (254 - k.abs()) if codes.dtype == SIGNED else (k * k) * (1 / 65025)
    values = torch.empty_like(codes, dtype=torch.float32)
    in_memory_order(values).copy_(scale * share)
    return values


def quantise(
    values: Tensor, dtype: torch.dtype, random: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and scales of numbers; the numbers of `dequantise` give the same codes and scales.

    A group with an infinity, a NaN or a magnitude of 2^119 or more becomes NaN. A group below
    2^-100 becomes 0. A number > 0 among squares has a code of 1 at least: a divisor stays one.

    Args:
        values: float32, dense.
        dtype: of the codes.
        random: int64 [groups], 32 random bits each; None: to the nearest number.
    """
    flat, groups = in_memory_order(values), group_count(values.numel())
    x = flat.new_zeros(groups * GROUP)
    x[: len(flat)] = flat
    x = x.view(groups, GROUP)
    most = (x.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(1)
    bits = most.masked_fill(most < _LEAST, 0).masked_fill(most >= _MOST, 0x7FC00000)
    scales = bits.view(torch.float32)
    scale, magnitude = scales[:, None], x.abs()
    if random is None:
        chance = torch.full_like(x, 0.5)
    else:
        lanes = torch.arange(GROUP, device=x.device) * _LANE
        thirteen = ((random[:, None] + lanes) & _BITS32) >> 19
        chance = (2 * thirteen + 1).to(x.dtype) * 2.0**-14
    # (q) numbers of codes, k below them; an upper code where `chance` is below the share of the
    # distance between the numbers that k and k + 1 stand for.
    if dtype == SIGNED:
        rest = 254 * scale / (scale + magnitude)
        q = 254 - rest
        k = q.trunc()
        k = k + (chance * rest < (q - k) * (253 - k))
        k = torch.where(x < 0, -k, k)
    else:
        square = magnitude * (65025 / scale)
        k = square.sqrt().floor()
        k = k + (chance * (2 * k + k.clamp(max=1)) + k * k < square)
    k = torch.where(scale > 0, k, 0.0)
    codes = torch.empty_like(values, dtype=dtype)
    in_memory_order(codes).copy_(k.view(-1)[: len(flat)])
    return codes, scales
