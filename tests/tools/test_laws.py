"""Tables that must agree: names of torch, activations."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import torch

from fusedtrain import functional
from fusedtrain.reference import ACTIVATIONS, FAMILIES
from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
import _torch_names


def test_names_of_torch_are_in_its_headers() -> None:
    """The table is of the torch at hand; `make oldest-torch` compiles with the oldest."""
    include = Path(torch.__file__).parent / "include/torch"
    folders = ("csrc/stable", "headeronly", "csrc/inductor/aoti_torch/c")
    headers = [path for folder in folders for path in (include / folder).rglob("*.h")]
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in headers)))
    assert {word for name in _torch_names.OLDEST for word in name.split("::")} <= words
    source = ROOT / "tests/cuda_emulator/memory.h"  # which takes nothing from torch
    assert _torch_names.newer_names([source]) == []


def rows_of(file: str, macro: str) -> list[list[str]]:
    body = (ROOT / "csrc" / file).read_text().split(f"#define {macro}(X)")[1].split("\n\n")[0]
    return [row.split(", ") for row in re.findall(r"X\(([^)]*)\)", body)]


def test_one_table_and_one_name_of_each_activation() -> None:
    """Ops take the number of a row: names, columns and order are those of the formulas."""
    pointwise = rows_of("formulas.h", "FT_POINTWISE")
    channelwise = rows_of("channelwise_formulas.h", "FT_CHANNELWISE")
    table = []
    for row in ACTIVATIONS.values():
        columns = [str(row.rounds).lower(), f"k{row.saves.capitalize()}"]
        table.append([row.name, str(len(row.parameters)), *([] if row.tensors else columns)])
    assert table == [[name, *columns] for name, _, *columns in pointwise + channelwise]
    twins = (ROOT / "fusedtrain/triton/formulas.py").read_text()
    functions = {node.name for node in ast.parse(twins).body if isinstance(node, ast.FunctionDef)}
    for name in ACTIVATIONS:
        # functional.gelu reaches gelu_tanh by its argument, as torch's does.
        assert name == "gelu_tanh" or hasattr(functional, name)
        assert {f"{name}_forward", f"{name}_backward"} <= functions
    assert "batch_norm" in FAMILIES
