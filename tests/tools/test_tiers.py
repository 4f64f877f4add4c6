"""Cases of a test that run: tests/helpers/tiers.py."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import ROOT, tiers


def items(function: str, **values: list[Any]) -> list[Any]:
    """Collected cases of a test with these parameters, all combinations."""
    cases = []
    for row in itertools.product(*values.values()):
        params = dict(zip(values, row, strict=True))
        spec = SimpleNamespace(params=params, id="-".join(map(str, row)))
        nodeid = f"{function}[{spec.id}]"
        cases.append(SimpleNamespace(nodeid=nodeid, **({"callspec": spec} if params else {})))
    return [Hashed(case) for case in cases]


class Hashed:
    """A case that can be in a set."""

    marks: tuple[str, ...] = ()

    def __init__(self, case: Any) -> None:
        vars(self).update(vars(case))

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks


def chosen_params(cases: list[Any]) -> list[dict[str, Any]]:
    chosen = tiers.few(cases)
    return [case.callspec.params for case in cases if case in chosen]


def test_each_value_meets_each_implementation() -> None:
    names = list("abcdefgh")
    cases = items("f", ops=["cpu", "emulated", "triton"], name=names, dtype=[[16], [32]])
    chosen = chosen_params(cases)
    assert {(p["ops"], p["name"]) for p in chosen} == set(
        itertools.product(["cpu", "emulated", "triton"], names)
    )
    assert {(p["ops"], *p["dtype"]) for p in chosen} == set(
        itertools.product(["cpu", "emulated", "triton"], [16, 32])
    )
    assert len(chosen) <= 26  # of 48


def test_every_test_has_a_case() -> None:
    cases = [*items("f"), *items("g", case=[object()]), *items("h", case=[(1, 2), (1, 3)])]
    assert tiers.few(cases) == set(cases)
    assert tiers.few([]) == set()


def names_of(*changed: str) -> set[str]:
    return {path.name for path in tiers.tests_of([Path(name) for name in changed])}


def test_tests_of_a_source() -> None:
    of_pool = names_of("csrc/cpu/isa/pool.h")
    assert "test_pool_kernels.py" in of_pool
    assert "test_convert.py" not in of_pool
    assert "test_guards.py" not in of_pool
    assert names_of("docs/convert.md", "README.md") == set()
    assert "test_tiers.py" in names_of("tests/helpers/tiers.py")
    assert names_of("tests/tools/test_tiers.py") == {"test_tiers.py"}
    assert "test_convert_guards.py" in names_of("fusedtrain/_graph/guards.py")


def test_the_files_that_tools_name_are_there() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        named = importlib.import_module("other_torch").OLDEST
    assert [name for name in named if not (ROOT / name.partition("::")[0]).exists()] == []


def left_by(cases: list[Any], tier: str, arguments: list[str], keyword: str = "") -> list[Any]:
    """The cases that run."""
    config: Any = SimpleNamespace(
        option=SimpleNamespace(cases=tier, keyword=keyword),
        args=arguments,
        getini=lambda name: ["tests"],
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    for case in cases:
        case.path = ROOT
    left = list(cases)
    tiers.pytest_collection_modifyitems(config, left)
    return left


def test_three_commits_see_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    monkeypatch.setattr(tiers, "_changed_tests", lambda: frozenset())
    for count in range(3):
        monkeypatch.setattr(tiers, "_commits", lambda count=count: count)
        left = left_by(items("f", name=list(range(50)), dtype=[16, 32]), "third", ["tests"])
        assert len(left) < 100
        seen |= {case.nodeid for case in left}
    assert len(seen) == 100


def test_a_case_that_is_named_runs() -> None:
    cases = items("tests/ops/test_f.py::f", name=list("abcdef"), dtype=[16, 32])
    left_out = next(case for case in cases if case not in tiers.few(cases))
    assert left_out in left_by(cases, "few", [f"/root/{left_out.nodeid}"])


@pytest.mark.parametrize(
    ("arguments", "keyword", "runs"), [(["tests"], "", 0), (["tests"], "f", 1), (["f.py"], "", 1)]
)
def test_slow_tests_run_where_a_part_is_named(
    arguments: list[str], keyword: str, runs: int
) -> None:
    case = items("tests/test_f.py::f")[0]
    case.marks = ("slow",)
    assert len(left_by([case], "few", arguments, keyword)) == runs
