"""The example that a model is run on: its type, its arguments, its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._torch_private import pytree


def check_example(example: Any) -> None:
    """Raises TypeError where it is no tensor, tuple of arguments or dict of named ones."""
    if not isinstance(example, Tensor | tuple | list | Mapping):
        raise TypeError(
            "example_inputs: expected a tensor, a tuple of arguments or a dict of named ones, got "
            f"{type(example).__name__}"
        )


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
