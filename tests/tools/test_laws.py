"""A violation of each law of tools/laws.py, which it notices."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ROOT

HEADER = """
#define FT_POINTWISE(X)     \\
  X(a, A, 0, false, kInput) \\
  X(b, B, 2, true, kOutput)

#define FT_CHANNELWISE(X) \\
  X(c, C, 1)

"""
A, B = 'Activation("a", f, g, "input")', 'Activation("b", f, g, "output", ("x", "y"), rounds=True)'
C = 'Activation("c", f, g, "input", ("x",), tensors=True)'
TWINS = "def a_forward(x)\ndef a_backward(x)\n"


@pytest.fixture
def laws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import laws

    monkeypatch.setattr(laws, "FOUND", [])
    monkeypatch.setattr(laws, "ROOT", tmp_path)
    return laws


# Name: the file, its text, the law as a function of (laws, root, file), and what is noticed.
PLANTED: dict[str, tuple[str, str, Any, list[str]]] = {
    "torch": ("fusedtrain/a.py", "torch._C._get()\nx = torch.__version__\nnn.Module._name",
              lambda laws, root, _: laws.forbid_private_names(root / "fusedtrain"),
              ["1: .*torch._C$", "3: .*nn.Module._name$"]),
    "private": ("fusedtrain/q/f.py", "from ..p import _x, c\nc._y\nfrom .e import _z\nc.__doc__",
                lambda laws, root, _: laws.forbid_private_names(root / "fusedtrain"),
                ["1: .*p._x$", "2: .*p.c._y$"]),
    "newer": ("csrc/bindings/a.h", "STD_TORCH_CHECK(1);  // torch::sin\ntorch::cos(x)",
              lambda laws, root, _: laws.forbid_newer_names(root), ["2: .*torch::cos"]),
    "long": ("tests/b.py", "\n" * 451, lambda laws, root, _: laws.forbid_long_files(root), ["451"]),
    "vague": ("tools/a.py", "f(found=1)\ndef _told(): pass\nself.own = 1\nx.here",
              lambda laws, root, _: laws.forbid_vague_names(root), ["2: .*_told", "3: .*own"]),
    "families": ("a.py", "('fold', 'pool', 'x')\n['fold', 'b']",
                 lambda laws, root, file: laws.forbid_lists_of_families([file], {"fold", "pool"}),
                 ["1: families"]),
    "Python": ("a.py", '"""What a is."""\n# The b.\n# Which c.\nx = 1  # Of d',
               lambda laws, root, file: laws.forbid_openings([file]), ["1: ", "4: "]),
    "C++": ("a.h", "// What a is.\nint x;  // Of x\nint y;  // y\n",
            lambda laws, root, file: laws.forbid_openings([file]), ["1: ", "2: "]),
    "patterns": ("a.py", "if x.y == 1:\nif z == 1: // x.y",
                 lambda laws, root, file: laws.forbid(r"\.y", [file], "law"), ["1: law"]),
    "order": ("a.py", f"{B}, {A}, {C}",
              lambda laws, root, file: laws.forbid_two_tables(HEADER, file.read_text()), ["order"]),
    "columns": ("a.py", f"{A}, {B.replace('True', 'False')}, {C}",
                lambda laws, root, file: laws.forbid_two_tables(HEADER, file.read_text()),
                ["no row .*'b'"] * 2),
    "no function": ("a.py", "def b(): ...",
                    lambda laws, _, file: laws.forbid_other_names({"a"}, [file.read_text()], TWINS),
                    ["formulas have a", "functions have b"]),
    "no twin": ("a.py", '__all__ = ["a"]\ndef a(): ...\ndef c(): ...',
                lambda laws, _, file: laws.forbid_other_names({"a"}, [file.read_text()], TWINS[5:]),
                ["a_forward is not"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_violation_is_noticed(laws: Any, tmp_path: Path, name: str) -> None:
    file, text, law, noticed = PLANTED[name]
    for path in ("fusedtrain/p/__init__.py", "fusedtrain/p/c.py", "csrc/bindings/b.h", file):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text if path == file else "")
    law(laws, tmp_path, tmp_path / file)
    assert len(laws.FOUND) == len(noticed), laws.FOUND
    for line, expected in zip(sorted(laws.FOUND), noticed, strict=True):
        assert re.search(expected, line), line


def test_tables_of_this_tree(laws: Any) -> None:
    """The table of names is of the torch at hand; `make oldest-torch` looks into the oldest."""
    include = Path(torch.__file__).parent / "include/torch"
    folders = ("csrc/stable", "headeronly", "csrc/inductor/aoti_torch/c")
    headers = [path for folder in folders for path in (include / folder).rglob("*.h")]
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in headers)))
    assert {word for name in laws.OLDEST for word in name.split("::")} <= words
    assert "batch_norm" in laws.families_of(ROOT / "fusedtrain/reference/__init__.py")
    laws.forbid_two_tables(HEADER, f"{A}, {B}, {C}")
    assert laws.FOUND == []
