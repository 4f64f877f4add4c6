"""Runs a model on an example, and compares what two models give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._graph.difference import relative_difference
from .._graph.example import arguments_of
from .._graph.modules import is_scripted
from .._graph.state import duplicate, restored
from .._graph.tracer import same_generators
from .._torch_private import pytree

# Largest difference allowed, relative to the largest magnitude of each output. The sum of a
# convolution is rounded in another order: 1.2e-6 was the most that float32 models of timm and
# torchvision showed. In 16 bits the weights are rounded once more.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


def call(model: nn.Module, example: Any, original: nn.Module | None = None) -> Any:
    """The model's output for an input, a tuple of inputs, or a dict of named ones; no gradients.

    Random numbers are the same at every call, and the generators left as they were, as are objects
    that the model reaches, or the `original` of a copy. Values of its tensors may change.
    """
    arguments, named = arguments_of(example)
    with torch.no_grad(), same_generators(seed=0), restored(original or model):
        return model(*arguments, **named)


def stock_copy(model: nn.Module) -> nn.Module:
    """A copy without what convert, fold_frozen_norms and drop_redundant_bias did to the model."""
    from .. import revert  # on first use: it imports `conversion`, and undoes what is done here

    copied = duplicate(model)
    revert(copied)
    return copied


def ranks(model: nn.Module, example: Any) -> tuple[Any, dict[str, set[int]]]:
    """The output of a stock copy, and by name of a module the dimensions of its inputs."""
    dims: dict[str, set[int]] = {}
    copied = stock_copy(model)
    for name, module in copied.named_modules():

        def note(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                dims.setdefault(name, set()).add(inputs[0].dim())

        if not is_scripted(module):
            module.register_forward_pre_hook(note)
    return call(copied, example, model), dims


def compare(
    function: str, model: nn.Module, example: Any, expected: Any, tolerance: float | None = None
) -> float:
    """The largest relative difference of a copy's outputs; RuntimeError if that is too large."""
    error, ratio = difference(call(duplicate(model), example), expected, tolerance)
    if ratio > 1:
        raise RuntimeError(
            f"{function}: the outputs of the changed model differ by {error:.2e} of the largest "
            f"magnitude, {ratio:.3g} times what is allowed: the change is undone"
        )
    return error


def difference(actual: Any, expected: Any, tolerance: float | None) -> tuple[float, float]:
    """The largest relative difference of all outputs, and that in units of what is allowed."""
    values, structure = pytree.tree_flatten(actual)
    wanted, wanted_structure = pytree.tree_flatten(expected)
    if structure != wanted_structure:
        return float("inf"), float("inf")
    worst = worst_ratio = 0.0
    for a, b in zip(values, wanted, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            continue
        error = relative_difference(a.detach().cpu(), b.detach().cpu(), math.inf)
        exact = not (a.is_floating_point() or a.is_complex())
        limit = TOLERANCES.get(a.dtype, 0.0) if tolerance is None or exact else tolerance
        worst = max(worst, error)
        worst_ratio = max(
            worst_ratio, 0.0 if error == 0 else error / limit if limit else float("inf")
        )
    return worst, worst_ratio
