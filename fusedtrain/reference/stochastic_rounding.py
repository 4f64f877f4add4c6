"""Stochastic rounding to bfloat16, with the bits of csrc/optimizer_rules.h.

torch has no unsigned arithmetic: int64 wraps around, and masks keep the low bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS32 = 0xFFFFFFFF
_STEP = 0xD1B54A32D192ED03  # added to the seed at each step of the optimizer


def _signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(x: Tensor, bits: int) -> Tensor:
    """A logical shift of 64-bit numbers to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def whole_seed(seed: float, seed_high: float) -> int:
    """The seed of a step's options, an int64."""
    return _signed(int(seed) + (int(seed_high) << 32))


def seed_after(seed: int, steps: int) -> int:
    """The seed, from 0 to 2^64 - 1, whose stream continues this seed's after so many steps."""
    return (seed + steps * _STEP) % (1 << 64)


def random_key(seed: int, tensor: int, step: Tensor) -> Tensor:
    """The key of a tensor at a step (splitmix64's finaliser), 32 bits in an int64."""
    start = _signed(seed + tensor * 0x9E3779B97F4A7C15)
    x = start + step.to(torch.int64) * _signed(_STEP)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (_shift(x, 32) ^ x) & _BITS32


def random_bits(index: Tensor, key: Tensor) -> Tensor:
    """32 random bits of each element (lowbias32 of Chris Wellons' hash-prospector)."""
    x = (index * 0x9E3779B9 + key) & _BITS32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _BITS32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _BITS32
    return x ^ (x >> 16)


def memory_index(like: Tensor) -> Tensor:
    """The place of each element in memory (with gaps: in the memory of a dense copy)."""
    strides = torch.empty_like(like, device="meta").stride()
    return torch.arange(like.numel(), device=like.device).as_strided(like.shape, strides)


def stochastic_bfloat16(values: Tensor, index: Tensor, key: Tensor) -> Tensor:
    """Rounds float32 values at random, more likely to the nearer one. Infinities and NaN stay."""
    bits = values.contiguous().view(torch.int32).to(torch.int64) & _BITS32
    rounded = (bits + (random_bits(index, key) >> 16)) >> 16
    rounded = torch.where(rounded >= 0x8000, rounded - 0x10000, rounded).to(torch.int16)
    finite = (bits & 0x7F800000) != 0x7F800000
    return torch.where(finite, rounded.view(torch.bfloat16), values.to(torch.bfloat16))
