"""Cases of a test that run: tests/helpers/tiers.py."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers import ROOT, tiers


def items(function: str, **values: list[Any]) -> list[Any]:
    """Collected cases of a test with these parameters, all combinations."""
    cases = []
    for row in itertools.product(*values.values()):
        params = dict(zip(values, row, strict=True))
        spec = SimpleNamespace(
            params=params,
            id="-".join(map(str, row)),
            indices={name: values[name].index(value) for name, value in params.items()},
        )
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


def test_each_value_is_in_a_case() -> None:
    cases = items("f", name=list("abcdefghijkl"), dtype=[16, 32, 64], layout=["dense", "sliced"])
    chosen = chosen_params(cases)
    for name in ("name", "dtype", "layout"):
        assert {p[name] for p in chosen} == {c.callspec.params[name] for c in cases}
    assert len(chosen) <= 14  # of 72


def test_each_value_meets_each_implementation() -> None:
    names = list("abcdefgh")
    cases = items("f", ops=["cpu", "emulated", "triton"], name=names, dtype=[16, 32])
    chosen = chosen_params(cases)
    assert {(p["ops"], p["name"]) for p in chosen} == set(
        itertools.product(["cpu", "emulated", "triton"], names)
    )
    assert {(p["ops"], p["dtype"]) for p in chosen} == set(
        itertools.product(["cpu", "emulated", "triton"], [16, 32])
    )
    assert len(chosen) <= 26  # of 48


def test_every_test_has_a_case() -> None:
    cases = [*items("f"), *items("g", case=[object()]), *items("h", case=[(1, 2), (1, 3)])]
    assert tiers.few(cases) == set(cases)
    assert tiers.few([]) == set()


def test_the_same_cases_are_chosen_each_time() -> None:
    values = {"name": list("abcdef"), "shape": [(1, 2), (3,), ()], "flag": [True, False]}
    first = {case.nodeid for case in tiers.few(items("f", **values))}
    assert {case.nodeid for case in tiers.few(items("f", **values)[::-1])} == first


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


def test_three_commits_see_every_case(monkeypatch: Any) -> None:
    seen: set[str] = set()
    left_out: list[Any] = []
    config: Any = SimpleNamespace(
        option=SimpleNamespace(cases="third", keyword=""),
        args=["tests"],
        getini=lambda name: ["tests"],
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    for count in range(3):
        monkeypatch.setattr(tiers, "_commits", lambda count=count: count)
        monkeypatch.setattr(tiers, "_changed_tests", lambda: frozenset())
        cases = items("f", name=list(range(50)), dtype=[16, 32])
        for case in cases:
            case.path = ROOT
        left_out.clear()
        tiers.pytest_collection_modifyitems(config, cases)
        assert left_out
        seen |= {case.nodeid for case in cases}
    assert len(seen) == 100


def test_a_case_that_is_named_runs() -> None:
    cases = items("tests/ops/test_f.py::f", name=list("abcdef"), dtype=[16, 32])
    left_out = next(case for case in cases if case not in tiers.few(cases))
    config: Any = SimpleNamespace(
        option=SimpleNamespace(cases="few", keyword=""),
        args=[f"/root/{left_out.nodeid}"],
        getini=lambda name: ["tests"],
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    tiers.pytest_collection_modifyitems(config, cases)
    assert left_out in cases


def test_slow_tests_run_where_a_part_of_the_suite_is_named() -> None:
    for args, keyword, runs in (
        (["tests"], "", False),
        (["tests"], "f", True),
        (["f.py"], "", True),
    ):
        case = items("tests/test_f.py::f")[0]
        case.marks = ("slow",)
        config: Any = SimpleNamespace(
            option=SimpleNamespace(cases="few", keyword=keyword),
            args=args,
            getini=lambda name: ["tests"],
            hook=SimpleNamespace(pytest_deselected=lambda items: None),
        )
        cases = [case]
        tiers.pytest_collection_modifyitems(config, cases)
        assert bool(cases) is runs
