"""The ops of reference/few_bit.py: schemas, fake kernels, fallbacks.

``activation`` counts the lines of ``FT_POINTWISE`` (csrc/formulas.h). Codes are in the order of the
memory of a tensor like the input, as ``torch.empty_like`` lays it out, packed as csrc/bits.h says;
the gradient that backward takes has that layout, too. `_few_bit.py` puts autograd in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._definitions import fallback
from .reference import few_bit
from .reference.bits import packed_bytes

SCHEMAS = {
    "few_bit": "(Tensor input, int activation, int bits) -> (Tensor, Tensor)",  # output, codes
    "few_bit_": "(Tensor(a!) input, int activation, int bits) -> Tensor",
    "few_bit_backward": "(Tensor grad, Tensor codes, int activation, int bits) -> Tensor",
}


def _codes(input: Tensor, activation: int, bits: int) -> Tensor:
    few_bit.table_of(activation, bits)
    return input.new_empty(packed_bytes(input.numel(), bits), dtype=torch.uint8)


def _fake_forward(input: Tensor, activation: int, bits: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), _codes(input, activation, bits)


_FAKES: dict[str, Callable[..., Any]] = {
    "few_bit": _fake_forward,
    "few_bit_": _codes,
    "few_bit_backward": lambda grad, *_: torch.empty_like(grad),
}


def define(library: torch.library.Library, warn: Callable[[torch.device], None]) -> None:
    """Defines the ops in the library, with the plain-torch reference behind each."""
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _FAKES[name], "Meta")
        library.impl(name, fallback(getattr(few_bit, name), warn), "CompositeExplicitAutograd")
