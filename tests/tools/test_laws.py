"""Violations that the laws of tools/laws.py notice, on small trees."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ROOT


@pytest.fixture
def laws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import laws

    monkeypatch.setattr(laws, "FOUND", [])
    yield laws
    for name in ("laws", "_imports", "_openings", "_private", "_torch_names"):
        del sys.modules[name]


def package(folder: Path, files: dict[str, str]) -> Path:
    made = folder / "house"
    for name, text in {"__init__.py": "", **files}.items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return made


CIRCLES = {
    "two modules": ({"a.py": "from .b import x", "b.py": "from .a import y"}, "a, b"),
    "a module and itself": ({"a.py": "from . import a"}, "a"),
    "three": (
        {"a.py": "from . import b", "b.py": "import house.c", "c.py": "from .a import z"},
        "a, b, c",
    ),
    "in a function": ({"a.py": "def f():\n    from . import b", "b.py": "import house.a"}, "a, b"),
    "in a method, under an if": (
        {"a.py": "from . import b",
         "b.py": "class C:\n    def f(self):\n        if self:\n            from .a import x"},
        "a, b",
    ),
    "where types are not checked": (
        {"a.py": "if TYPE_CHECKING:\n    pass\nelse:\n    from .b import x",
         "b.py": "from . import a"},
        "a, b",
    ),
    "not for types": (
        {"a.py": "if not TYPE_CHECKING:\n    from .b import x", "b.py": "from . import a"}, "a, b"
    ),
    "by the import of a part": (
        {"p/__init__.py": "from ..a import x", "p/c.py": "", "a.py": "from .p.c import y"}, "a, p"
    ),
    "by a name of the folder": (
        {"p/__init__.py": "from .c import x", "p/c.py": "from . import y"}, "p, p.c"
    ),
    "by a name of the root": (
        {"__init__.py": "from . import a", "a.py": "from . import version"}, ", a"
    ),
    "upward out of a folder": (
        {"p/__init__.py": "", "p/c.py": "from ..a import x", "a.py": "from .p import c"}, "a, p.c"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CIRCLES)
def test_circles_are_noticed(laws: Any, tmp_path: Path, name: str) -> None:
    files, circle = CIRCLES[name]
    house = package(tmp_path, files)
    laws.forbid_circles(house)
    modules = ", ".join(f"house.{part}".rstrip(".") for part in circle.split(", "))
    (line,) = laws.FOUND
    assert line == f"no import circle, imports within functions included: {modules}"


NO_CIRCLES = {
    "a diamond": {
        "a.py": "from . import b, c", "b.py": "from .d import x", "c.py": "from . import d",
        "d.py": "import sys",
    },
    "of types": {
        "a.py": "from . import b",
        "b.py": "import typing\nif typing.TYPE_CHECKING:\n    from . import a",
    },
    "parts of one folder": {
        "p/__init__.py": "from . import c", "p/c.py": "from . import d", "p/d.py": "",
    },
    "another package of the name": {"a.py": "from . import b", "b.py": "import a, houses.a"},
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CIRCLES)
def test_what_is_no_circle(laws: Any, tmp_path: Path, name: str) -> None:
    laws.forbid_circles(package(tmp_path, NO_CIRCLES[name]))
    assert laws.FOUND == []


def test_includes_are_followed(laws: Any, tmp_path: Path) -> None:
    texts = {
        "cpu/unit.cpp": '#include "loop.h"\n#include <stdint.h>\n',
        "cpu/loop.h": '#include "../calls.h"',
        "calls.h": '#include "cpu/loop.h"\n',
        "cpu/once.h": "#include <vector>",
    }
    (tmp_path / "cpu").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    files = laws.included([tmp_path / "cpu/unit.cpp"])
    assert files == [tmp_path / name for name in ("calls.h", "cpu/loop.h", "cpu/unit.cpp")]


def test_imports_go_down(laws: Any, tmp_path: Path) -> None:
    files = {
        "reference/__init__.py": "from .. import nn",
        "ops/pool.py": "def f():\n    import house.amp",
        "nn/__init__.py": "from ..ops import pool\nfrom .. import reference", "amp/__init__.py": "",
        "cellar.py": "",
    }  # fmt: skip
    laws.forbid_upward(package(tmp_path, files))
    law = "each imports only those before it"
    assert sorted(laws.FOUND) == [
        f"{law}: house.ops.pool imports house.amp",
        f"{law}: house.reference imports house.nn",
    ]
    laws.FOUND.clear()
    laws.forbid_upward(package(tmp_path, {"ops/b.py": "from .. import cellar", "cellar.py": ""}))
    assert f"{law}: FLOORS lacks cellar" in laws.FOUND


PRIVATE_OF_TORCH = {
    "import torch\ntorch._C._get()": "2:torch._C",
    "import torch._dynamo as dynamo": "1:torch._dynamo",
    "from torch.utils import _pytree": "1:torch.utils._pytree",
    "from torch import nn\nx = nn.functional._check(1)": "2:nn.functional._check",
    "from torch import Tensor\nf = Tensor._is_view": "2:Tensor._is_view",
    "import torch\nx = torch.nn.Module._get_name": "2:torch.nn.Module._get_name",
    "import torch\nx = torch.__version__": "",
    "from . import torch\nx._private": "",
    "from ._torch_private import is_view": "",
}


@pytest.mark.parametrize("text", PRIVATE_OF_TORCH)
def test_private_names_of_torch(laws: Any, tmp_path: Path, text: str) -> None:
    laws.forbid_private_names(package(tmp_path, {"a.py": text, "_torch_private.py": text}))
    line, _, name = PRIVATE_OF_TORCH[text].partition(":")
    law = "torch's private names: _torch_private.py"
    assert ([f"house/a.py:{line}: {law}: {name}"] if name else []) == laws.FOUND


PRIVATE_ACROSS = {
    "from ..p.c import _x": "p.c._x",
    "from ..p import c\nc._x": "p.c._x",
    "from ..p import c as d\nd._x": "p.c._x",
    "from .. import a\na._x": "a._x",
    "from house.p import _x": "p._x",
    "from ..p import _d\n_d.x": "",
    "from ..p import _d\n_d.__name__": "",
    "from .e import _x": "",
    "from . import e\ne._x": "",
    "import typing\ntyping._x": "",
}


@pytest.mark.parametrize("text", PRIVATE_ACROSS)
def test_private_names_of_another_package(laws: Any, tmp_path: Path, text: str) -> None:
    others = {"a.py": "", "p/__init__.py": "", "p/c.py": "", "p/_d.py": "", "q/e.py": ""}
    laws.forbid_private_names(package(tmp_path, {**others, "q/__init__.py": "", "q/f.py": text}))
    name = PRIVATE_ACROSS[text]
    line = text.count("\n") + 1
    law = "no private name of another package"
    assert ([f"house/q/f.py:{line}: {law}: {name}"] if name else []) == laws.FOUND


NEWER_NAMES = {
    "STD_TORCH_CHECK(true); torch::stable::copy_(a, b);": "",
    "STABLE_TORCH_ERROR_CODE_CHECK(x);": "STABLE_TORCH_ERROR_CODE_CHECK",
    "#define STABLE_TORCH_ERROR_CODE_CHECK(call) call\nSTABLE_TORCH_ERROR_CODE_CHECK(x);": "",
    "// STABLE_TORCH_ERROR_CODE_CHECK, torch::stable::squeeze": "",
    "return torch::stable::squeeze(t);": "torch::stable::squeeze",
    "aoti_torch_get_size(t, 0, &n);": "aoti_torch_get_size",
}


@pytest.mark.parametrize("text", NEWER_NAMES)
def test_names_that_the_oldest_torch_lacks(laws: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "csrc/bindings/cpu.cpp"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    laws.forbid_newer_names(tmp_path)
    name = NEWER_NAMES[text]
    line = text.count("\n") + 1
    law = f"csrc/bindings/cpu.cpp:{line}: torch 2.10 may lack {name}: _torch_names.py"
    assert ([law] if name else []) == laws.FOUND


def test_torch_has_the_names_of_the_bindings(laws: Any) -> None:
    """The torch at hand; `make oldest-torch` looks into the oldest."""
    include = Path(torch.__file__).parent / "include/torch"
    folders = ("csrc/stable", "headeronly", "csrc/inductor/aoti_torch/c")
    headers = [path for folder in folders for path in (include / folder).rglob("*.h")]
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in headers)))
    names = {word for name in laws.OLDEST for word in name.split("::")}
    assert names - words == set()


def test_long_files(laws: Any, tmp_path: Path) -> None:
    for name, lines in {"csrc/a.h": 450, "tests/b.py": 451, "tests/c.xz": 900}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n" * lines)
    laws.forbid_long_files(tmp_path)
    assert laws.FOUND == ["tests/b.py: 451 lines, more than 450"]


VAGUE = {
    "found = 1": "found",
    "_told: set[str] = set()": "_told",
    "def f(x, *, given=1): pass": "given",
    "self._own = 1": "_own",
    "for here, x in y: pass": "here",
    "if (apart := f()): pass": "apart",
    "try: pass\nexcept E as found: pass": "found",
    "f(lambda own: own)": "own",
    "f(found=given, own=1)": "",  # names of others
    "x = y.found": "",
    "FOUND = found_at = not_found = 1": "",
}


@pytest.mark.parametrize("text", VAGUE)
def test_vague_names(laws: Any, tmp_path: Path, text: str) -> None:
    for name in ("fusedtrain/a/b.py", "tests/c.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    laws.forbid_vague_names(tmp_path)
    line, name = text.count("\n") + 1, VAGUE[text]
    assert ([f"fusedtrain/a/b.py:{line}: say what it holds: {name}"] if name else []) == laws.FOUND


def test_a_pickled_attribute_keeps_its_name(laws: Any, tmp_path: Path) -> None:
    (file,) = laws.PICKLED
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("self.own = found = 1")
    laws.forbid_vague_names(tmp_path)
    assert [f"{file}:1: say what it holds: found"] == laws.FOUND


LISTS = {
    "x = ['fold', 'gated', 'other', 'pool']": 1,
    "for x in ('fold', 'gated', 'pool'): pass": 1,
    "x = {'fold', 'gated', 'pool'}": 1,
    "x = ['fold', 'gated']": 0,  # half of them
    "x = {'fold': 1, 'gated': 2, 'pool': 3}": 0,  # says something of each
}


@pytest.mark.parametrize("text", LISTS)
def test_a_second_list_of_families(
    laws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(laws, "ROOT", tmp_path)
    file = tmp_path / "a.py"
    file.write_text(text)
    laws.forbid_lists_of_families([file], {"fold", "gated", "pool", "scaling"})
    assert len(laws.FOUND) == LISTS[text]
    assert "batch_norm" in laws.families_of(ROOT / "fusedtrain/reference/__init__.py")


HEADER = """
#define FT_POINTWISE(X)     \\
  X(a, A, 0, false, kInput) \\
  X(b, B, 2, true, kOutput)

#define FT_CHANNELWISE(X) \\
  X(c, C, 1)

"""
TABLES = {
    'Activation("a", f, g, "input"), Activation("b", f, g, "output", ("x", "y"), rounds=True), '
    'Activation("c", f, g, "input", ("x",), tensors=True)': 0,
    'Activation("b", f, g, "output", ("x", "y"), rounds=True), Activation("a", f, g, "input"), '
    'Activation("c", f, g, "input", ("x",), tensors=True)': 1,  # another order
    'Activation("a", f, g, "output"), Activation("b", f, g, "output", ("x", "y"), rounds=True), '
    'Activation("c", f, g, "input", ("x",), tensors=True)': 2,  # another column
    'Activation("a", f, g, "input"), Activation("b", f, g, "output", ("x", "y")), '
    'Activation("c", f, g, "input", ("x",), tensors=True)': 2,
    'Activation("a", f, g, "input"), Activation("b", f, g, "output", ("x", "y"), rounds=True)': 1,
}


@pytest.mark.parametrize("table", TABLES)
def test_the_tables_of_activations_agree(laws: Any, table: str) -> None:
    laws.forbid_two_tables(HEADER, f"ROWS = ({table})")
    assert len(laws.FOUND) == TABLES[table], laws.FOUND


NAMES = {
    '__all__ = ["a", "b"]\ndef a(): ...\ndef b(): ...\ndef _c(): ...': "",
    "def a(): ...\ndef b(): ...": "",
    '__all__ = ["a"]\ndef a(): ...\ndef b(): ...': "formulas have b, no public function",
    '__all__ = ["a"]\ndef a(): ...\ndef bb(): ...': "formulas have b, no public function",
    "def a(): ...\ndef b(): ...\ndef c(): ...": "functions have c, no row of the formulas",
}


@pytest.mark.parametrize("source", NAMES)
def test_names_of_activations(laws: Any, source: str) -> None:
    twins = "".join(f"def {n}_{d}(x)\n" for n in "ab" for d in ("forward", "backward"))
    laws.forbid_other_names({"a", "b"}, [source], twins)
    assert len(laws.FOUND) == bool(NAMES[source]), laws.FOUND
    assert NAMES[source] in "".join(laws.FOUND)
    laws.FOUND.clear()
    laws.forbid_other_names({"a"}, ["def a(): ..."], twins.replace("def a_back", "def _a_back"))
    assert laws.FOUND == ["one name everywhere: a_backward is not in triton/formulas.py"]


PYTHON_OPENINGS = '''"""What a module is for."""
# Which calls are usual.
# Of these the second line goes on.
x = 1  # those that are left
y = 2  # Those that are left
def f():
    """Of both."""
    # The subject.
    # What goes on may begin as it likes.
'''
CPP_OPENINGS = """// What a file is for.
// Which goes on.
int x;  // Of both
int y;  // the rest
const char* z = "http://Who";
"""


def test_comments_begin_with_their_subject(laws: Any, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(PYTHON_OPENINGS)
    (tmp_path / "a.h").write_text(CPP_OPENINGS)
    laws.forbid_openings([tmp_path / "a.py", tmp_path / "a.h"])
    lines = [line.removeprefix(f"{tmp_path}/").split(": ")[0] for line in laws.FOUND]
    assert sorted(lines) == ["a.h:1", "a.h:3", "a.py:1", "a.py:2", "a.py:5", "a.py:7"]
