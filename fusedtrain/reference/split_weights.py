"""Float32 weights as a 16-bit parameter and a correction, with the bits of csrc/split_weights.h.

A correction of int16 keeps all 32 bits of a bfloat16 parameter's weight, one of int8 the upper 24.
For float16 parameters it counts 2^-16 or 2^-8 of the parameter's unit in the last place.

Others may write to a parameter, and its correction stays. Whatever the two parts are, the weight
rounds to the parameter, or is the parameter: a correction that no split makes counts as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

CORRECTIONS = {"split24": torch.int8, "split32": torch.int16}
NEAREST = 0x80  # half a unit of the 24 bits that an int8 correction keeps


def is_correction(master: Tensor | None) -> bool:
    """Whether a master is the correction of its parameter, and not a float32 weight."""
    return master is not None and not master.is_floating_point()


def join_weights(param: Tensor, correction: Tensor) -> Tensor:
    """The float32 weights of a 16-bit parameter and its correction."""
    bits = 8 * correction.itemsize
    if param.dtype == torch.bfloat16:
        upper = param.view(torch.int16).to(torch.int32)
        lower = correction.to(torch.int32) << (16 - bits)
        lower = lower.masked_fill(~_is_corrected_bfloat16(upper), 0)
        return ((upper << 16) + lower).view(torch.float32)
    value = param.float()
    weights = value + correction.float() * _power_of_two(_exponent(param) - 25 - bits)
    rounds = weights.to(torch.float16).view(torch.int16) == param.view(torch.int16)
    return torch.where(rounds, weights, value)


def is_rounded(param: Tensor, master: Tensor) -> Tensor:
    """Mask of 16-bit parameters that are their float32 masters, rounded, ties either way."""
    if param.dtype == torch.float16:
        return master.to(torch.float16).view(torch.int16) == param.view(torch.int16)
    upper = param.view(torch.int16).to(torch.int64) << 16
    far: Tensor = (master.view(torch.int32) - upper).abs() > 0x8000
    return ~(far | master.isnan())


def follow(param: Tensor, master: Tensor) -> Tensor:
    """The master, where the parameter is its rounded value; elsewhere others have written to the
    parameter, which is the new master."""
    return torch.where(is_rounded(param, master), master, param.float())


def split_weights(
    weights: Tensor, param_dtype: torch.dtype, dtype: torch.dtype, added: Tensor | int = NEAREST
) -> tuple[Tensor, Tensor]:
    """The 16-bit parameter and the correction of float32 weights.

    Args:
        weights: float32.
        param_dtype: torch.bfloat16 or torch.float16.
        dtype: of the correction, torch.int16 or torch.int8.
        added: to the 8 bits that an int8 correction of bfloat16 cuts: `NEAREST`, or 8 random bits.
    """
    bits = 8 * dtype.itemsize
    if param_dtype == torch.bfloat16:
        return _split_bfloat16(weights, dtype, bits, added)
    param = weights.to(torch.float16)
    most = 2 ** (bits - 1) - 1
    steps = (weights - param.float()) * _power_of_two(25 + bits - _exponent(param))
    correction = steps.round().clamp(-most, most).masked_fill(~param.isfinite(), 0)
    return param, correction.to(dtype)


def _split_bfloat16(
    weights: Tensor, dtype: torch.dtype, bits: int, added: Tensor | int
) -> tuple[Tensor, Tensor]:
    wide = weights.view(torch.int32).to(torch.int64)
    finite = (wide & 0x7F800000) != 0x7F800000
    if bits == 8:
        wide = (wide + added) & ~0xFF
    upper = (wide + 0x8000) >> 16  # ties away from 0
    correction = (wide - (upper << 16)) >> (16 - bits)
    rounded = upper.masked_fill(~finite, 0).to(torch.int16).view(torch.bfloat16)
    param = torch.where(finite, rounded, weights.to(torch.bfloat16))
    corrected = finite & _is_corrected_bfloat16(upper)
    return param, correction.masked_fill(~corrected, 0).to(dtype)


def _is_corrected_bfloat16(upper: Tensor) -> Tensor:
    """Whether the bits are neither those of a zero, nor of an infinity or NaN."""
    magnitude = upper & 0x7FFF
    return (magnitude > 0) & (magnitude < 0x7F80)


def _exponent(half: Tensor) -> Tensor:
    """The exponent bits of float16 numbers; denormal ones count as those of the least normal."""
    return ((half.view(torch.int16).to(torch.int32) >> 10) & 31).clamp(min=1)


def _power_of_two(n: Tensor) -> Tensor:
    return ((n + 127) << 23).view(torch.float32)
