"""Every op has the same arguments, by name and in one order, in its schema, its Triton twin and its
binding in C++.

Its schema is made of the annotations of its reference. The dispatcher hands a binding its arguments
by their places, and compares no types.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.ops._library import schema_of
from fusedtrain.reference import FAMILIES
from fusedtrain.reference.images import MemoryFormat
from helpers import ROOT

OPS = [(family, op) for family, ops in FAMILIES.items() for op in ops]
BINDINGS = sorted((ROOT / "csrc/bindings").glob("*.h"))
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


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
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


# Types of C++ and of a schema; shorter names of a header.
_TYPES = {
    "Tensor": "Tensor", "MaybeTensor": "Tensor?", "std::optional<Tensor>": "Tensor?",
    "Tensors": "Tensor[]", "Ints": "int[]", "std::vector<int64_t>": "int[]",
    "int64_t": "int", "double": "float", "bool": "bool", "ScalarType": "ScalarType",
    "MemoryFormat": "MemoryFormat",
}  # fmt: skip
_NAMES = {
    "batch_norm": {"p0": "a", "p1": "b"},
    "fold": {"mean": "running_mean", "var": "running_var"},
    "pool": {"kernel": "kernel_size"},
}


def of_binding(header: Path, function: str) -> list[tuple[str, str]]:
    """Type and name of each argument of a function of a header."""
    text, names = header.read_text(), _NAMES.get(header.stem, {})
    for name, value in re.findall(r"#define (FT_\w*ARGUMENTS)((?:.*\\\n)*.*)", text):
        text = re.sub(rf"\b{name}\b(?!  )", value.replace("\\\n", " "), text)
    (arguments,) = re.findall(rf"  static [\w:<>, ]+?\s{function}\(([^)]*)\)\s*\{{", text)
    pairs = [" ".join(a.split()).rpartition(" ") for a in arguments.split(",")]
    plain = [(kind.removeprefix("const ").rstrip("&"), name) for kind, _, name in pairs]
    return [(_TYPES[kind], names.get(name, name)) for kind, name in plain]


@pytest.mark.parametrize("header", BINDINGS, ids=[path.stem for path in BINDINGS])
def test_binding(header: Path) -> None:
    boxed = r'm\.impl\("(\w+)", TORCH_BOX\(&\w+<Backend>::(\w+)\)\)'
    for op, function in re.findall(boxed, header.read_text()):
        schema = str(getattr(torch.ops.fusedtrain, op).default._schema)
        arguments = re.sub(r"\(\w!\)", "", schema).partition("(")[2].partition(") ->")[0]
        expected = [tuple(argument.split()) for argument in arguments.split(", ")]
        assert of_binding(header, function) == expected, op


def test_every_op_has_a_binding_that_is_compared() -> None:
    text = "".join(path.read_text() for path in BINDINGS)
    compared = re.findall(r'm\.impl\("(\w+)", TORCH_BOX', text)
    others = [op for family, op in OPS if family != "activations"]
    assert sorted(compared) == sorted(others)
