"""The ops of reference/fold.py: schemas, fake kernels, fallbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._definitions import fallback
from .reference import fold

_REST = "Tensor running_mean, Tensor running_var, float eps, bool transposed, int groups"
SCHEMAS = {
    "fold_weight": (
        f"(Tensor weight, Tensor? bias, Tensor? gamma, Tensor? beta, {_REST}) -> (Tensor, Tensor)"
    ),
    "fold_weight_backward": (
        "(Tensor grad_weight, Tensor grad_bias, Tensor weight, Tensor? bias, Tensor? gamma, "
        f"{_REST}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}


def _fake(weight: Tensor, bias: Any, gamma: Any, beta: Any, mean: Tensor, *rest: Any) -> Any:
    return torch.empty_like(weight), weight.new_empty(mean.shape)


def _fake_backward(
    grad_weight: Tensor, grad_bias: Tensor, weight: Tensor, bias: Any, gamma: Any, mean: Tensor,
    *rest: Any,
) -> Any:  # fmt: skip
    ours = torch.empty_like(weight), weight.new_empty(mean.shape)
    return (*ours, torch.empty_like(mean), torch.empty_like(mean))


def define(library: torch.library.Library, warn: Callable[[torch.device], None]) -> None:
    """Defines the ops in the library; `warn` is told where the plain-torch formula is used."""
    for name, fake in (("fold_weight", _fake), ("fold_weight_backward", _fake_backward)):
        library.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        function = fallback(getattr(fold, name), warn)
        library.impl(name, function, "CompositeExplicitAutograd")
        library.impl(name, fake, "Meta")
