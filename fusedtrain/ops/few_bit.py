"""Activations that keep their derivative in few bits: the ops, and autograd around them, for the
functions with an argument ``save``.

``activation`` counts the lines of ``FT_POINTWISE`` (csrc/formulas.h). Codes are in the order of the
memory of a tensor like the input, as ``torch.empty_like`` lays it out, packed as csrc/bits.h says;
the gradient that backward takes has that layout, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _calls
from ..reference import few_bit
from ..reference.bits import packed_bytes
from ..reference.dtypes import laid_out, wide_of
from ..reference.few_bit import TABLES
from ..reference.pointwise import INDEX, POINTWISE
from ._library import define, op
from .activations import Kernel


def _codes(input: Tensor, activation: int, bits: int) -> Tensor:
    few_bit.table_of(activation, bits)
    return input.new_empty(packed_bytes(input.numel(), bits), dtype=torch.uint8)


def _fake_forward(input: Tensor, activation: int, bits: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), _codes(input, activation, bits)


define("few_bit", few_bit.few_bit, _fake_forward)  # -> output, codes
define("few_bit_", few_bit.few_bit_, _codes, writes=("input",))
define("few_bit_backward", few_bit.few_bit_backward, lambda grad, *_: torch.empty_like(grad))
_forward = op("few_bit")
_inplace = op("few_bit_")
_backward = op("few_bit_backward")

# Values of `save` beside None, by activation, with their number of bits.
SAVES = {
    name: {f"q{bits}": bits for bits in sorted(table.bits())} for name, table in TABLES.items()
}


def check_save(name: str, save: str | None) -> None:
    """Raises ValueError where the activation `name` has no such ``save``."""
    if save is not None and save not in SAVES[name]:
        known = ", ".join(map(repr, SAVES[name]))
        raise ValueError(f"{name}: save must be None or one of {known}, not {save!r}")


def _times_slope(ctx: Any, grad: Tensor, codes: Tensor) -> Tensor:
    """The gradient in operators of torch, the slope itself as a tensor."""
    ones = torch.empty_strided(grad.shape, ctx.strides, dtype=wide_of(grad), device=codes.device)
    slope = _backward(ones.fill_(1), codes, ctx.activation, ctx.bits)
    return (grad * slope).to(grad.dtype)


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    (codes,) = ctx.saved_tensors
    if torch.is_grad_enabled() and ctx.bits == 1:  # the derivative of that is 0
        return _times_slope(ctx, grad, codes)
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{POINTWISE[ctx.activation].name} with save='q{ctx.bits}' kept no input to "
            "differentiate its derivative by: create_graph=True needs save=None"
        )
    if not _calls.takes(grad):  # torch.func.vmap over gradients
        return _times_slope(ctx, grad, codes)
    return _backward(laid_out(grad, ctx.strides), codes, ctx.activation, ctx.bits)


class FewBit(torch.autograd.Function):
    """Saves the codes alone."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, activation: int, bits: int) -> Tensor:
        output, codes = _forward(input, activation, bits)
        ctx.save_for_backward(codes)
        ctx.activation, ctx.bits, ctx.strides = activation, bits, output.stride()
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gradient(ctx, grad), None, None


class FewBitInplace(FewBit):
    @staticmethod
    def forward(ctx: Any, input: Tensor, activation: int, bits: int) -> Tensor:
        codes = _inplace(input, activation, bits)
        ctx.mark_dirty(input)
        ctx.save_for_backward(codes)
        strides = torch.empty_like(input, device="meta").stride()
        ctx.activation, ctx.bits, ctx.strides = activation, bits, strides
        return input


_apply, _apply_inplace = _calls.apply_of(FewBit), _calls.apply_of(FewBitInplace)


def run(kernel: Kernel, input: Tensor, inplace: bool, save: str) -> Tensor:
    """The activation, with its derivative in few bits where backward will ask for it.

    Under torch.compile and the like it is the exact one. Raises ValueError for an unknown ``save``.
    """
    name = kernel.row.name
    check_save(name, save)
    if (
        not _calls.takes(input)
        or not (input.requires_grad and torch.is_grad_enabled())
        or torch.is_inference_mode_enabled()
        or input.is_inference()
        or (inplace and input.is_leaf)  # torch's error
    ):
        return kernel(input, inplace)
    activation, bits = INDEX[name], SAVES[name][save]
    if not inplace:
        return _apply(input, activation, bits)
    if input._is_view() or input.is_neg():
        return input.copy_(_apply(input.clone(), activation, bits))
    return _apply_inplace(input, activation, bits)
