"""How an op is defined, with its fake kernel and its fallback, and how it is called."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .. import _backends
from .._recompute import OP_NAMES

library = torch.library.Library("fusedtrain", "DEF")
_KEY = "CompositeExplicitAutograd"
_warned: set[str] = set()  # types of devices


def warn_once(device: torch.device) -> None:
    """Says on which type of device the reference is used, and why, unless it was asked for."""
    if device.type not in _warned:
        _warned.add(device.type)
        reason = _backends.why_not(device.type)
        if reason:
            warnings.warn(
                f"fusedtrain: plain-torch reference used on {device.type}: {reason}", stacklevel=4
            )


def fallback(function: Callable[..., Any]) -> Callable[..., Any]:
    """A plain-torch formula as the kernel of last resort."""

    def run(*arguments: Any) -> Any:
        for argument in arguments:
            tensor = argument[0] if isinstance(argument, list) and argument else argument
            if isinstance(tensor, Tensor):
                warn_once(tensor.device)
                break
        return function(*arguments)

    return run


# The types of a schema that Python names otherwise.
_TYPES = {
    "Tensor | None": "Tensor?", "list[Tensor]": "Tensor[]", "list[int]": "int[]",
    "torch.dtype": "ScalarType", "None": "()",
}  # fmt: skip


def schema_of(types: Mapping[str, str], writes: Sequence[str] = ()) -> str:
    """Arguments and results, as torch.library.define takes them behind the name of an op.

    torch.library.infer_schema would make a SymInt of every int, and knows no memory format.

    Args:
        types: the annotations of the op's formula, as text.
        writes: the arguments that the op writes to.
    """
    arguments = []
    for name, annotation in types.items():
        schema = _TYPES.get(annotation, annotation)
        if name in writes:
            letter = chr(ord("a") + writes.index(name))
            schema = schema.replace("Tensor", f"Tensor({letter}!)")
        arguments.append(f"{schema} {name}")
    results = arguments.pop().removesuffix(" return").removeprefix("tuple")
    return f"({', '.join(arguments)}) -> {results.replace('[', '(').replace(']', ')')}"


def define(
    name: str,
    formula: Callable[..., Any],
    fake: Callable[..., Any],
    writes: Sequence[str] = (),
    types: Mapping[str, str] | None = None,
) -> None:
    """Defines ``fusedtrain::name``.

    Args:
        formula: in plain torch, where no kernel is registered for the device.
        fake: makes results of the right shape, dtype and layout, of tensors without values.
        writes: the arguments that the op writes to, in their order.
        types: of the arguments and of the result ("return"); None: the formula's annotations.
    """
    schema = schema_of(formula.__annotations__ if types is None else types, writes)
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, fallback(formula), _KEY)
    library.impl(name, fake, "Meta")


def op(name: str) -> Callable[..., Any]:
    """The op ``fusedtrain::name``, without the Python call around it (0.5 us) where it has one."""
    overload = getattr(torch.ops.fusedtrain, name).default
    function: Callable[..., Any] = getattr(overload, "_op", overload)
    OP_NAMES[function] = name
    return function


def public_in(module: dict[str, Any]) -> list[str]:
    """Names of the public functions of a module, which become functions of it. Pickles name a
    function by its module, in graphs of torch.fx and in forwards that convert wrote."""
    names = [
        name
        for name, value in module.items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    ]
    for name in names:
        module[name].__module__ = module["__name__"]
    return sorted(names)
