"""Float32 weights as a 16-bit parameter and a correction, with the bits of csrc/split_weights.h."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def half_exponent(bits):
    """The exponent of float16 numbers; denormal ones count as those of the least normal."""
    return tl.maximum((bits >> 10) & 31, 1)


@triton.jit
def is_corrected_bfloat16(upper):
    """Whether the bits are neither those of a zero, nor of an infinity or NaN."""
    magnitude = upper & 0x7FFF
    return (magnitude > 0) & (magnitude < 0x7F80)


@triton.jit
def join_weights(param, correction, BITS: tl.constexpr):
    """The float32 weights of 16-bit parameters and their corrections of BITS bits."""
    if param.dtype == tl.bfloat16:
        upper = param.to(tl.uint16, bitcast=True).to(tl.uint32)
        lower = correction.to(tl.int32).to(tl.uint32, bitcast=True) << (16 - BITS)
        lower = tl.where(is_corrected_bfloat16(upper), lower, 0)
        return ((upper << 16) + lower).to(tl.float32, bitcast=True)
    else:
        bits = param.to(tl.int16, bitcast=True).to(tl.int32)
        value = param.to(tl.float32)
        step = power_of_two(half_exponent(bits) - 25 - BITS)
        weights = value + correction.to(tl.float32) * step
        rounded = weights.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        return tl.where(rounded == bits, weights, value)


@triton.jit
def follow_weights(bits, param):
    """Float32 masters, as bits, that take what others have written to their parameters."""
    master = bits.to(tl.float32, bitcast=True)
    if param.dtype == tl.bfloat16:
        upper = param.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        rounds = (bits - upper + 0x8000 <= 0x10000) & (master == master)
        return tl.where(rounds, master, upper.to(tl.float32, bitcast=True))
    else:
        rounded = master.to(tl.float16).to(tl.int16, bitcast=True)
        rounds = rounded == param.to(tl.int16, bitcast=True)
        return tl.where(rounds, master, param.to(tl.float32))


@triton.jit
def split_bfloat16(weights, added, BITS: tl.constexpr):
    """Parameters and corrections; `added`: to the 8 bits that a correction of 8 bits cuts."""
    bits = weights.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    if BITS == 8:
        bits = (bits + added) & 0xFFFFFF00
    upper = (bits + 0x8000) >> 16  # ties away from 0
    # equal (+ for - #1): the correction is stored without the bits above its own
    # equal (>> for <<): `upper` has 16 bits; bits above its own are not stored
    lower = (bits - (upper << 16)).to(tl.int32, bitcast=True) >> (16 - BITS)
    param = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    corrected = finite & is_corrected_bfloat16(upper)
    return tl.where(finite, param, weights.to(tl.bfloat16)), tl.where(corrected, lower, 0)


@triton.jit
def split_half(weights, BITS: tl.constexpr):
    """Parameters and corrections."""
    param = weights.to(tl.float16)
    bits = param.to(tl.int16, bitcast=True).to(tl.int32)
    steps = (weights - param.to(tl.float32)) * power_of_two(25 + BITS - half_exponent(bits))
    # 1.5 2^23: the sum's low bits are the rounded number.
    rounded = (steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    most: tl.constexpr = (1 << (BITS - 1)) - 1
    clamped = tl.minimum(tl.maximum(rounded, -most), most)
    return param, tl.where((bits & 0x7C00) != 0x7C00, clamped, 0)
