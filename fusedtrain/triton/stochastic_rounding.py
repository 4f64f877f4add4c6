"""Stochastic rounding to bfloat16, with the bits of csrc/optimizer_rules.h."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def random_key(seed, tensor, step):
    """The key of a tensor at a step (splitmix64's finaliser)."""
    x = seed.to(tl.uint64) + tensor.to(tl.uint64) * 0x9E3779B97F4A7C15
    x += step.to(tl.uint64) * 0xD1B54A32D192ED03
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x >> 32) ^ x).to(tl.uint32)


@triton.jit
def random_bits(index, key):
    """32 random bits of each element (lowbias32 of Chris Wellons' hash-prospector)."""
    x = index.to(tl.uint32) * 0x9E3779B9 + key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stochastic_bfloat16(x, index, key):
    """Rounds float32 values at random, more likely to the nearer one. Infinities and NaN stay."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + (random_bits(index, key) >> 16)) >> 16
    rounded = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((bits & 0x7F800000) != 0x7F800000, rounded, x.to(tl.bfloat16))
