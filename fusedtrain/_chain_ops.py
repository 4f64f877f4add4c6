"""The ops of reference/chains.py: schemas, fake kernels, fallbacks.

``activation`` counts the lines of ``FT_POINTWISE`` (csrc/formulas.h), -1 is none; ``a`` and ``b``
are its parameters. ``scale`` is [samples, channels]: as many samples as dimension 0 has or one, as
many channels as dimension ``dim`` has, one where that is -1. ``seed`` is two int64 numbers.
`_chains.py` puts autograd in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._definitions import fallback
from .reference import chains
from .reference.dtypes import wide_of

_ACTIVATION = "int activation, float a, float b"
_FINISH = f"int dim, {_ACTIVATION}, float gain, float clamp, float p"

SCHEMAS = {
    "gated": f"(Tensor gate, Tensor value, {_ACTIVATION}) -> Tensor",
    # Writes both gradients, which may be halves of one tensor.
    "gated_backward": (
        "(Tensor grad, Tensor gate, Tensor value, Tensor(a!) grad_gate, Tensor(b!) grad_value, "
        f"{_ACTIVATION}) -> ()"
    ),
    "scale_add": "(Tensor input, Tensor scale, Tensor? residual, int dim) -> Tensor",
    # Without the input: no gradient of scale. -> gradients of input and scale
    "scale_add_backward": (
        "(Tensor grad, Tensor? input, Tensor scale, int dim, bool needs_input) -> (Tensor, Tensor)"
    ),
    "bias_act": f"(Tensor input, Tensor? bias, Tensor? seed, {_FINISH}) -> Tensor",
    # -> gradients of input and bias [1, channels]
    "bias_act_backward": (
        f"(Tensor grad, Tensor saved, Tensor? bias, Tensor? seed, {_FINISH}, bool needs_bias) "
        "-> (Tensor, Tensor)"
    ),
}


def _fake_first(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _fake_gated(gate: Tensor, value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value)


def _fake_scale_backward(
    grad: Tensor, input: Tensor | None, scale: Tensor, dim: int, needs_input: bool
) -> tuple[Tensor, Tensor]:
    model = grad if input is None else input
    grad_input = torch.empty_like(model) if needs_input else grad.new_empty(0)
    shape = (0,) if input is None else scale.shape
    return grad_input, grad.new_empty(shape, dtype=wide_of(grad))


def _fake_bias_backward(
    grad: Tensor, saved: Tensor, bias: Any, seed: Any, dim: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    shape = (1, saved.shape[dim] if dim >= 0 else 1) if rest[-1] else (0,)
    return torch.empty_like(saved), grad.new_empty(shape, dtype=wide_of(grad))


_FAKES: dict[str, Callable[..., Any]] = {
    "gated": _fake_gated,
    "gated_backward": lambda *_: None,
    "scale_add": _fake_first,
    "scale_add_backward": _fake_scale_backward,
    "bias_act": _fake_first,
    "bias_act_backward": _fake_bias_backward,
}


def define(library: torch.library.Library, warn: Callable[[torch.device], None]) -> None:
    """Defines the ops in the library, with the plain-torch reference behind each."""
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _FAKES[name], "Meta")
        run = fallback(getattr(chains, name), warn)
        library.impl(name, run, "CompositeExplicitAutograd")
