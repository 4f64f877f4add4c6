"""A violation of each law of tools/laws.py, which it notices; laws that the tables obey."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from fusedtrain import functional
from fusedtrain.reference import ACTIVATIONS, FAMILIES
from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
import _torch_names
import laws

# File, text, and the laws that it breaks, by line.
PLANTED = {
    "torch": ("fusedtrain/a.py", "torch._C._get()\nx = torch.__version__\nnn.Module._name",
              ["1: .*torch._C$", "3: .*nn.Module._name$"]),
    "private": ("fusedtrain/q/f.py", "from ..p import _x, c\nc._y\nfrom .e import _z\nc.__doc__",
                ["1: .*_x$", "2: .*_y$"]),
    "vague": ("tools/a.py", "f(found=1)\ndef _told(): pass\nself.own = 1\nx.here",
              ["2: .*_told", "3: .*own"]),
    "families": ("a.py", "('fold', 'pool', 'x')\n['fold', 'b']", ["1: families"]),
    "Python": ("a.py", '"""Gives a."""\n# The b.\n# Which c.\nx = 1  #' + ' Of d', ["1: ", "4: "]),
    "C++": ("a.h", "// By a.\nint x;  // What x\nint y;  // y\n", ["1: ", "2: "]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_violation_is_noticed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "ROOT", tmp_path)
    monkeypatch.setattr(laws, "PACKAGE", tmp_path / "fusedtrain")
    monkeypatch.setattr(laws, "BROKEN", [])
    file, text, noticed = PLANTED[name]
    for path in ("fusedtrain/p/__init__.py", "fusedtrain/p/c.py", file):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text if path == file else "")
    laws.forbid_in(tmp_path / file, {"fold", "pool"})
    assert len(laws.BROKEN) == len(noticed), laws.BROKEN
    for line, expected in zip(sorted(laws.BROKEN), noticed, strict=True):
        assert re.search(expected, line), line


@pytest.mark.parametrize(
    "line",
    ["x.is_cuda", 'x.device.type == "cuda"', 'x.device.type not in ("cpu",)',
     '{"cuda": 1}[x.device.type]', '{"cuda": 1}.get(x.device.type)', "match x.device.type:"],
)  # fmt: skip
def test_a_second_switch_is_noticed(line: str) -> None:
    assert re.search(laws.SWITCH, line)
    assert not re.search(laws.SWITCH, "_MEASURED.get(x.device.type), PLATFORMS[x.device.type]")


def test_a_budget_counts_what_lies_in_a_folder() -> None:
    lines = {"a/b.py": 3, "a/c/d.h": 4, "ab/e.py": 5}
    rows = list(laws.budget("# words\na 10 # more\na/c 3\n. 12\n", lines))
    assert rows == [("a", 7, 10), ("a/c", 4, 3), (".", 12, 12)]


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
