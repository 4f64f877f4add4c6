"""What the laws of tools/laws.py notice, on small trees."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def laws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import laws

    monkeypatch.setattr(laws, "FOUND", [])
    yield laws
    for name in ("laws", "_imports"):
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
        "cpu/loop.h": '#include "../ops.h"',
        "ops.h": '#include "cpu/loop.h"\n',
        "cpu/once.h": "#include <vector>",
    }
    (tmp_path / "cpu").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = laws.included([tmp_path / "cpu/unit.cpp"])
    assert found == [tmp_path / name for name in ("cpu/loop.h", "cpu/unit.cpp", "ops.h")]


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
