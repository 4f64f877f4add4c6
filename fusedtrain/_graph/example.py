"""The example that a model is run on: its type, its arguments, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import BatchNormBase, pytree
from .modules import CONVOLUTIONS
from .tracer import same_generators


def example_for(model: nn.Module, example: Any) -> Any:
    """The input for a run of the model: of a function its value, of a shape random numbers. The
    states of random generators stay.

    Raises:
        ValueError: several shapes, a shape without a batch, or a shape for a model that takes no
            floating-point numbers.
        TypeError: no example at all.
    """
    with same_generators():
        if callable(example):
            example = example()
        if _is_shape(example):
            return _drawn(model, example)
    if not isinstance(example, Tensor | tuple | list | Mapping):
        text = f"; a mode is named: memory={example!r}" if isinstance(example, str) else ""
        raise TypeError(
            "example_inputs: expected a tensor, a tuple of arguments, a dict of named ones, a "
            f"shape or a function that returns one of these, got {type(example).__name__}{text}"
        )
    if type(example) in (tuple, list) and example and all(map(_is_shape, example)):
        raise ValueError(
            f"example_inputs: {example!r} may be shapes or arguments; pass a function that returns "
            "the arguments, `lambda: (torch.randn(2, 3), torch.randn(2, 5))`"
        )
    return example


def _is_shape(value: Any) -> bool:
    if isinstance(value, torch.Size):
        return True
    return type(value) in (tuple, list) and bool(value) and all(type(i) is int for i in value)


def _drawn(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """Normal random numbers of the dtype and on the device of the model's first parameter."""
    if min(shape, default=0) < 0:
        raise ValueError(f"example_inputs: a shape has no negative sizes, got {tuple(shape)}")
    first = next((m for m in model.modules() if m._parameters), None)
    if isinstance(first, (nn.Embedding, nn.EmbeddingBag)):
        raise ValueError(
            f"example_inputs: the shape {tuple(shape)} stands for floating-point numbers, and this "
            "model begins with a look-up; pass its integers, `lambda: torch.randint(99, (2, 7))`"
        )
    if layer := _wants_batch(model, shape):
        raise ValueError(
            f"example_inputs: the shape {tuple(shape)} has no batch, and the model begins with a "
            f"{layer}; pass {(2, *shape)}, or a tensor if the model takes single samples"
        )
    tensors = (t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    like = next(tensors, torch.empty(0))
    return torch.randn(shape, dtype=like.dtype, device=like.device)


def _wants_batch(model: nn.Module, shape: Sequence[int]) -> str:
    """The class of the model's first layer, if the shape is that of one sample for it; or ''."""
    kinds = (*CONVOLUTIONS, BatchNormBase)
    first: Any = next((m for m in model.modules() if isinstance(m, kinds)), None)
    if isinstance(first, nn.Linear):  # takes a vector, too, unlike norms behind it
        dims = 0 if any(isinstance(m, BatchNormBase) for m in model.modules()) else None
    elif isinstance(first, BatchNormBase):
        ranks = {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
        dims = next((rank for kind, rank in ranks.items() if isinstance(first, kind)), None)
    else:
        dims = None if first is None else len(first.kernel_size)
    if dims is None or len(shape) != dims + 1:
        return ""
    sizes = (getattr(first, name, None) for name in ("in_channels", "in_features", "num_features"))
    return type(first).__name__ if shape[0] in sizes else ""


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, by place and by name, with tensors in memory of their own."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    if isinstance(example, Mapping):  # also those of transformers, which are no dicts
        example = dict(example)
    copied = pytree.tree_map(fresh, example)
    if isinstance(copied, dict):
        return (), copied
    return (tuple(copied) if isinstance(copied, (tuple, list)) else (copied,)), {}
