"""Every op has the same arguments, by name and in one order, in its schema, its reference and its
Triton twin."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusedtrain.reference import ACTIVATIONS, FAMILIES, optimizers as reference_of_optimizers

OPS = [(family, op) for family, ops in FAMILIES.items() for op in ops]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def of_schema(op: str) -> list[str]:
    return [a.name for a in getattr(torch.ops.fusedtrain, op).default._schema.arguments]


def of(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The named parameters, and whether any number of others follows."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    return named, len(named) < len(parameters)


def reference(family: str, op: str) -> Callable[..., Any]:
    if family == "activations":
        row = ACTIVATIONS[op.removesuffix("_backward").removesuffix("_")]
        return row.backward if op.endswith("_backward") else row.forward
    function: Callable[..., Any]
    function = getattr(importlib.import_module(f"fusedtrain.reference.{family}"), op)
    return function


@pytest.mark.parametrize(("family", "op"), OPS, ids=[op for _, op in OPS])
def test_reference(family: str, op: str) -> None:
    named, more = of(reference(family, op))
    if family == "optimizers":  # three ops of one list of arguments, which a call takes apart
        named, more = of(reference_of_optimizers.OptimizerCall)[0] + named, True
    assert of_schema(op)[: len(named)] == named
    assert more or len(named) == len(of_schema(op))


@pytest.mark.skipif(not HAS_TRITON, reason="no triton")
@pytest.mark.parametrize(("family", "op"), OPS, ids=[op for _, op in OPS])
def test_twin(family: str, op: str) -> None:
    from fusedtrain.triton import OPS as twins
    from fusedtrain.triton._optimizer_calls import DeviceCall

    named, more = of(twins[op])
    if family == "optimizers":
        named = of(DeviceCall)[0]
    expected = of_schema(op)
    if "saved" in named and family == "activations":  # one loop serves those that save either
        expected[expected.index("grad") + 1] = "saved"
    assert expected[: len(named)] == named
    assert more or len(named) == len(expected)
