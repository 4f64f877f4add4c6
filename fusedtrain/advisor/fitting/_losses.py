"""Batches of so many samples, and the loss of a model for a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate

from ..._graph.kept import bytes_of
from ..._text import memory_text
from ..._torch_private import pytree
from ..tuning._job import Job, load_function, random_inputs
from ._affine import PROBES

Draw = Callable[[int], Any]  # a batch of so many samples
Outcome = Callable[[Any, Any], tuple[Any, Tensor]]  # of model and batch: the output, the loss


def checked_call(function: Any, argument: str, takes: str, *values: Any) -> Any:
    """The function, or the one that the text names, if it takes so many arguments."""
    function = load_function(function) if isinstance(function, str) else function
    if not callable(function):
        kind = type(function).__name__
        raise TypeError(f"{argument}: expected a function of {takes}, got {kind}")
    try:
        inspect.signature(function).bind(*values)
    except TypeError as error:
        raise TypeError(f"{argument}: expected a function of {takes}: {error}") from None
    except ValueError:  # a builtin's signature is not known
        pass
    return function


def draw_of(example: Any, job: Job) -> Draw:
    """Makes batches of one sample, of its shape, or by the function that the user gives."""
    if callable(example) or isinstance(example, str):
        draw = checked_call(example, "example", "the number of samples", 2)
    elif is_sized(example):
        draw = partial(random_inputs, job)
    elif isinstance(example, tuple | list | Mapping):
        sample = dict(example) if isinstance(example, Mapping) else example
        draw = lambda batch: default_collate([sample] * batch)  # noqa: E731
    else:
        raise TypeError(
            "example: expected one sample, its shape, or a function of the number of samples, got "
            f"{type(example).__name__}"
        )

    def moved(batch: int) -> Any:
        data = draw(batch)
        data = dict(data) if isinstance(data, Mapping) else data  # also those of transformers
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(job.device), data)

    few, many = (bytes_of(moved(number)) for number in PROBES)
    if few >= many:
        raise ValueError(
            f"example: {PROBES[0]} samples are {memory_text(few)}, and {PROBES[1]} samples "
            f"{memory_text(many)}; expected a function whose tensors grow with their number"
        )
    return moved


def is_sized(example: Any) -> bool:
    """Whether the example is a tensor or a shape: random samples have the same shape."""
    shape = isinstance(example, tuple | list) and all(type(size) is int for size in example)
    return shape or isinstance(example, Tensor)


def loss_of(step: Callable[[Any, Any], Tensor] | str) -> Outcome:
    """Calls the user's function, and checks its loss."""
    call = checked_call(step, "step", "model and batch", None, None)

    def loss(model: Any, batch: Any) -> tuple[None, Tensor]:
        value = call(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            kind = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"step: expected the loss, one number with a gradient, got {kind}")
        return None, value

    return loss


def usual_loss(model: Any, batch: Any) -> tuple[Any, Tensor]:
    """The loss that the model returns for named arguments (transformers), or cross-entropy."""
    output = loss = None
    if isinstance(batch, dict):
        output = model(**batch)
        loss = output.get("loss") if isinstance(output, Mapping) else None
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        output = model(batch[0])
        loss = nn.functional.cross_entropy(getattr(output, "logits", output), batch[1])
    if loss is None:
        raise TypeError(
            "step: pass `lambda model, batch: loss`; the batch is no pair of inputs and targets, "
            "and no dict for which the model returns a loss"
        )
    return output, loss
