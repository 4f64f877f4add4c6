"""Optimizer states in 8 bits, with the bits of csrc/state_codes.h.

Divisions and roots are those of IEEE, and a product that a sum follows is exact: a compiler that
fuses multiplies changes no code.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl

from ..reference import state_codes as _codes
from .vecmath import sqrt

LANES: tl.constexpr = tl.constexpr(_codes.GROUP)
STATE_STREAM: tl.constexpr = tl.constexpr(_codes.STATE_STREAM)
SHARED_BY: tl.constexpr = tl.constexpr(_codes.SHARED_BY)


@triton.jit
def group_scales(x):
    """The scale of each row: the largest magnitude; 0 below 2^-100, NaN from 2^119 on."""
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    bits = tl.where(most < 0x0D800000, 0, most)
    return tl.where(most >= 0x7B000000, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def rounding_chances(random):
    """Chances from 2^-14 to 1 - 2^-14, one a lane, of rows with 32 random bits."""
    lanes = tl.arange(0, LANES).to(tl.uint32) * 0x9E3779B9
    bits = (random[:, None] + lanes[None, :]) >> 19
    return (2 * bits + 1).to(tl.int32).to(tl.float32) * 6.103515625e-05


@triton.jit
def signed_codes(x, scale, chance):
    """Momenta: with r = x / scale, codes of 254 - 254 / (1 + |r|)."""
    rest = tl.div_rn(254.0 * scale, scale + tl.abs(x))
    q = tl.where(scale > 0.0, 254.0 - rest, 0.0)
    below = q.to(tl.int32)
    k = below.to(tl.float32)
    upper = chance * rest < (q - k) * (253.0 - k)
    rounded = tl.where(upper, below + 1, below)
    return tl.where(x < 0.0, -rounded, rounded)


@triton.jit
def square_codes(x, scale, chance):
    """Averages of squares: codes of 255 sqrt(r), 1 at least of a number > 0."""
    square = tl.where(scale > 0.0, tl.abs(x) * tl.div_rn(65025.0, scale), 0.0)
    below = sqrt(square).to(tl.int32)
    k = below.to(tl.float32)
    upper = chance * (k + k + tl.minimum(k, 1.0)) + k * k < square
    return tl.where(upper, below + 1, below)


@triton.jit
def quantise(values, random, SIGNED: tl.constexpr):
    """Codes of float32 numbers, of int8 or uint8, and the scale of each group of LANES neighbours.

    `random` has 32 random bits of each group. Numbers that do not exist are zeros.
    """
    x = tl.reshape(values, (values.shape[0] // LANES, LANES))
    scales, chances = group_scales(x), rounding_chances(random)
    if SIGNED:
        codes = signed_codes(x, scales[:, None], chances).to(tl.int8)
    else:
        codes = square_codes(x, scales[:, None], chances).to(tl.uint8)
    return tl.reshape(codes, (values.shape[0],)), scales


@triton.jit
def dequantise(codes, scales):
    """The float32 numbers of codes, from the scales of their groups."""
    k = codes.to(tl.float32)
    if codes.dtype == tl.int8:
        share = tl.div_rn(k, 254.0 - tl.abs(k))
    else:
        share = k * k * (1.0 / 65025.0)
    shares = tl.reshape(share, (codes.shape[0] // LANES, LANES))
    return tl.reshape(scales[:, None] * shares, (codes.shape[0],))
