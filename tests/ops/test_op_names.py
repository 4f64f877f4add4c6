"""Every op has the same arguments, by name and in one order, in its schema and its Triton twin.

Its schema is made of the annotations of its reference.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.ops._library import schema_of
from fusedtrain.reference import FAMILIES
from fusedtrain.reference.images import MemoryFormat

OPS = [(family, op) for family, ops in FAMILIES.items() for op in ops]
HAS_TRITON = importlib.util.find_spec("triton") is not None


def of_schema(op: str) -> list[str]:
    return [a.name for a in getattr(torch.ops.fusedtrain, op).default._schema.arguments]


def of(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The named parameters, and whether any number of others follows."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    return named, len(named) < len(parameters)


def test_schema() -> None:
    def formula(
        input: Tensor,
        weight: Tensor | None,
        params: list[Tensor],
        grads: list[Tensor],
        sizes: list[int],
        dtype: torch.dtype,
        memory_format: MemoryFormat,
        count: int,
        eps: float,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    types = formula.__annotations__
    assert schema_of(types, ("input", "weight", "params")) == (
        "(Tensor(a!) input, Tensor(b!)? weight, Tensor(c!)[] params, Tensor[] grads, int[] sizes, "
        "ScalarType dtype, MemoryFormat memory_format, int count, float eps, bool training) "
        "-> (Tensor, Tensor)"
    )
    assert schema_of({"input": "Tensor", "return": "None"}) == "(Tensor input) -> ()"
    assert schema_of({"seed": "int", "return": "Tensor"}) == "(int seed) -> Tensor"


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
