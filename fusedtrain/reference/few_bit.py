"""Activations whose derivative is kept in few bits, in plain torch; csrc/few_bit.h has the same
tables.

The derivative is quantised to the nearest level of a table. With 2, 3 and 4 bits the levels have
the least squared error for x ~ N(0, 1) (S. Lloyd, Least squares quantization in PCM, IEEE Trans.
Inf. Theory 28, 1982); with 8 bits they are whole multiples of ``1 / unit``, with 0 and 1 exact. A
derivative that is 0 or 1 takes 1 bit.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import pack, unpack
from .dtypes import wide_of
from .pointwise import POINTWISE


class Slopes(NamedTuple):
    """The levels of a derivative by the number of bits. An 8-bit code means
    ``(code - zero) / unit``."""

    levels: dict[int, tuple[float, ...]]
    unit: int = 1
    zero: int = 0

    def bits(self) -> tuple[int, ...]:
        return (*self.levels, 8) if self.unit > 1 else tuple(self.levels)

    def values(self, bits: int) -> Tensor:
        """The levels by code, float64 ``[2**bits]``."""
        if bits == 8:
            return (torch.arange(256, dtype=torch.float64) - self.zero) / self.unit
        return torch.tensor(self.levels[bits], dtype=torch.float64)

    def thresholds(self, bits: int) -> list[int]:
        """The numbers of units from which on a code is above 0, 1, ..."""
        levels = self.levels[bits]
        middles = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
        return [math.ceil(middle * self.unit + self.zero) for middle in middles]

    def codes(self, slope: Tensor, bits: int) -> Tensor:
        """The codes of the levels nearest to the slope in whole units, int64; 0 for nan."""
        counted = (slope * self.unit + (self.zero + 0.5)).clamp(0, 255)
        units = counted.nan_to_num(0.0).to(torch.int64)
        if bits == 8:
            return units
        codes = torch.zeros_like(units)
        for threshold in self.thresholds(bits):
            codes += units >= threshold
        return codes


TABLES = {
    "relu": Slopes({1: (0.0, 1.0)}),
    "silu": Slopes({
        2: (0.0336, 0.3445, 0.6555, 0.9664),
        3: (-0.0407, 0.1136, 0.2681, 0.4227, 0.5773, 0.7319, 0.8864, 1.0407),
        4: (-0.0746, 0.0013, 0.0779, 0.1546, 0.2314, 0.3081, 0.3849, 0.4616, 0.5384, 0.6151, 0.6919,
            0.7686, 0.8454, 0.9221, 0.9987, 1.0746),
    }, unit=212, zero=21),
    "mish": Slopes({
        2: (0.0117, 0.3474, 0.6887, 1.0131),
        3: (-0.0605, 0.0967, 0.2595, 0.4246, 0.5901, 0.7536, 0.9116, 1.0565),
        4: (-0.0906, -0.0158, 0.0621, 0.1416, 0.2222, 0.3035, 0.3852, 0.4672, 0.5491, 0.6306,
            0.7115, 0.7913, 0.8695, 0.9452, 1.0169, 1.0746),
    }, unit=211, zero=24),
    "gelu": Slopes({
        2: (-0.0464, 0.3127, 0.6873, 1.0464),
        3: (-0.0915, 0.0620, 0.2337, 0.4107, 0.5893, 0.7663, 0.9380, 1.0915),
        4: (-0.1132, -0.0498, 0.0253, 0.1079, 0.1930, 0.2797, 0.3674, 0.4557, 0.5443, 0.6326,
            0.7203, 0.8070, 0.8921, 0.9747, 1.0497, 1.1132),
    }, unit=202, zero=26),
    "quick_gelu": Slopes({
        2: (-0.0295, 0.3156, 0.6844, 1.0295),
        3: (-0.0695, 0.0768, 0.2409, 0.4128, 0.5871, 0.7591, 0.9232, 1.0695),
        4: (-0.0868, -0.0316, 0.0411, 0.1192, 0.2007, 0.2847, 0.3702, 0.4566, 0.5433, 0.6298,
            0.7153, 0.7993, 0.8809, 0.9589, 1.0316, 1.0868),
    }, unit=212, zero=21),
    "hardswish": Slopes({
        2: (0.0060, 0.3514, 0.6486, 0.9940),
        3: (-0.1873, 0.0636, 0.2537, 0.4201, 0.5799, 0.7463, 0.9364, 1.1873),
        4: (-0.3234, -0.1409, -0.0066, 0.1041, 0.2018, 0.2917, 0.3767, 0.4592, 0.5408, 0.6233,
            0.7083, 0.7982, 0.8959, 1.0066, 1.1409, 1.3234),
    }, unit=127, zero=64),
}  # fmt: skip
TABLES["gelu_tanh"] = TABLES["gelu"]


def table_of(activation: int, bits: int) -> Slopes:
    """The table of an activation; raises RuntimeError if there is none."""
    name = POINTWISE[activation].name if 0 <= activation < len(POINTWISE) else ""
    if name not in TABLES:
        raise RuntimeError("fusedtrain: activation has no derivative in few bits")
    if bits not in TABLES[name].bits():
        raise RuntimeError(f"fusedtrain: no derivative of {name} in {bits} bits")
    return TABLES[name]


def _in_memory(dense: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return dense.as_strided((dense.numel(),), (1,))


def few_bit(input: Tensor, activation: int, bits: int) -> tuple[Tensor, Tensor]:
    """The output, and the codes of the derivative in the order of the output's memory."""
    table = table_of(activation, bits)
    row = POINTWISE[activation]
    wide = input.to(wide_of(input))
    exact = row.forward(wide)
    slope = row.backward(torch.ones_like(wide), exact if row.saves == "output" else wide)
    output = torch.empty_like(input).copy_(exact)
    slopes = torch.empty_like(input, dtype=wide.dtype).copy_(slope)
    return output, pack(table.codes(_in_memory(slopes), bits), bits)


def few_bit_(input: Tensor, activation: int, bits: int) -> Tensor:
    """Overwrites the input with the output; returns the codes."""
    output, codes = few_bit(input, activation, bits)
    input.copy_(output)
    return codes


def few_bit_backward(grad: Tensor, codes: Tensor, activation: int, bits: int) -> Tensor:
    """``grad`` times the derivative; the memory of `grad` has the order of the output's."""
    table = table_of(activation, bits)
    gradient = torch.empty_like(grad).copy_(grad)
    numbers = unpack(codes, bits, grad.numel())
    levels = table.values(bits).to(grad.device, wide_of(grad))[numbers]
    flat = _in_memory(gradient)
    flat.copy_(flat * levels)
    return gradient
