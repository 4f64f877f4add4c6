"""The example that a model is run on: its type, its arguments, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import pytree
from .tracer import same_generators


def check_example(example: Any) -> None:
    """Raises TypeError where it is no tensor, tuple of arguments or dict of named ones."""
    if not isinstance(example, Tensor | tuple | list | Mapping):
        raise TypeError(
            "example_inputs: expected a tensor, a tuple of arguments or a dict of named ones, got "
            f"{type(example).__name__}"
        )


def example_for(model: nn.Module, example: Any) -> Any:
    """What the model is to be run on: of a function its value, of a shape random numbers. The
    states of random generators stay.

    Raises:
        ValueError: several shapes, or a shape for a model that takes no floating-point numbers.
        TypeError: no example at all.
    """
    with same_generators():
        if callable(example):
            example = example()
        if _is_shape(example):
            return _drawn(model, example)
    check_example(example)
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
    tensors = (t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    like = next(tensors, torch.empty(0))
    return torch.randn(shape, dtype=like.dtype, device=like.device)


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, by place and by name, with tensors in memory of their own."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    copied = pytree.tree_map(fresh, example)
    if isinstance(copied, dict):
        return (), copied
    return (tuple(copied) if isinstance(copied, (tuple, list)) else (copied,)), {}


def address_of(tensor: Tensor) -> int:
    """Where its memory begins; 0 where it has none of a known kind."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass, or of another layout
        return 0
