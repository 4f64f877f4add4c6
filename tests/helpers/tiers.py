"""Cases of the tests that run: a few of each test, all, or a few and a part of the others.

A test with parameters has a case for each combination of their values. `docs/testing.md` says what
each tier proves.
"""

from __future__ import annotations

import subprocess
import zlib
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT

# Implementations of one op. Each value of another parameter meets each of them.
_IMPLEMENTATIONS = {"cpu", "cuda", "emulated", "triton", "reference", "registered", "python", "cpp"}
_MOST_CHANGED = 40  # files, a sixth: a commit that touches them all is for `make test-all`
_PLAIN = (str, int, float, type(None), type)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", choices=("few", "third", "all"), default="few",
        help="few (default): each value of each parameter, and each with each backend. third: few, "
        "all of what the last day's commits changed, and a third of the others, another one with "
        "each commit. all: each combination",
    )  # fmt: skip


# Behind -k and -m: a few of the cases that they leave.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.option.cases
    if tier == "all":
        return
    named = {_within_file(argument) for argument in config.args if "::" in argument}
    whole_suite = config.args == config.getini("testpaths") and not config.option.keyword
    chosen = few([i for i in items if not (whole_suite and i.get_closest_marker("slow"))])
    chosen |= {item for item in items if _within_file(item.nodeid) in named}
    if tier == "third":
        turn, changed = _commits() % 3, _changed_tests()
        chosen |= {
            item
            for item in items
            if zlib.crc32(item.nodeid.encode()) % 3 == turn or item.path in changed
        }
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _within_file(nodeid: str) -> str:
    """The name of a case, its file without folders."""
    path, _, case = nodeid.partition("::")
    return f"{path.rpartition('/')[2]}::{case}"


def few(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of each test that contain each value of each parameter, with each backend."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for cases in tests.values() for item in _cover(cases)}


def _cover(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Cases of one test that contain every combination of _combinations.

    Those with most missing ones come first. The hash mixes the other parameters, and chooses the
    same cases each time.
    """
    combinations = {case: _combinations(case) for case in cases}
    missing = set().union(*combinations.values())
    chosen: list[pytest.Item] = []
    rest = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode()))
    for at_least in range(max(map(len, combinations.values())), 0, -1):
        for case in rest:
            if len(combinations[case] & missing) >= at_least:
                chosen.append(case)
                missing -= combinations[case]
    return chosen or cases


def _combinations(case: pytest.Item) -> set[Any]:
    """Values of the parameters of a case, alone and beside the implementation that it is for."""
    spec = getattr(case, "callspec", None)
    if spec is None:
        return set()
    names = _IMPLEMENTATIONS.intersection(spec.id.split("-"))
    values = {(name, _key(value)) for name, value in spec.params.items()}
    return values | {(name, value) for name in names for value in values}


def _key(value: Any) -> Any:
    """Equal for the same value in all cases of a test."""
    if isinstance(value, tuple):
        return tuple(map(_key, value))
    if type(value).__module__ == "torch":  # a dtype, a layout
        return str(value)
    return value if isinstance(value, _PLAIN) else id(value)


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip() if run.returncode == 0 else ""


@cache
def _commits() -> int:
    """The number of commits, 0 outside of a repository."""
    return int(_git("rev-list", "--count", "HEAD") or 0)


@cache
def _changed_tests() -> frozenset[Path]:
    """The test files of what the commits of the last day changed, the last one first, but for
    commits that would make them more than _MOST_CHANGED."""
    last = _git("log", "-1", "--format=%cI")
    if not last:
        return frozenset()
    since = datetime.fromisoformat(last) - timedelta(days=1)
    tests: frozenset[Path] = frozenset()
    for commit in _git("log", f"--since={since.isoformat()}", "--format=%H").split():
        names = _git("show", "--name-only", "--format=", commit).split("\n")
        more = tests | tests_of([Path(name) for name in names if name])
        if len(more) <= _MOST_CHANGED:
            tests = more
    return tests


def tests_of(changed: list[Path]) -> frozenset[Path]:
    """The test files among some changed files, and those that belong to a changed source.

    A family of ops has one name in all folders, so ``csrc/cpu/isa/pool.h`` has
    ``test_pool_kernels.py``; else a test imports the module, or the changed helper of tests.

    Args:
        changed: paths from the repository's root.
    """
    stems = {
        path.stem.lstrip("_")
        for path in changed
        if path.parts[0] in ("csrc", "fusedtrain") and path.suffix != ".md"
    } - {"init"}
    modules = {
        ".".join(path.with_suffix("").parts).removeprefix("tests.").removesuffix(".__init__")
        for path in changed
        if path.suffix == ".py" and path.parts[:-1] and path.parts[0] in ("fusedtrain", "tests")
    } - {"fusedtrain"}
    tests = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.stem.removeprefix("test_")
        if path.relative_to(ROOT) in changed or any(_is_of(name, stem) for stem in stems):
            tests.add(path)
        elif modules:
            text = path.read_text()
            if any(_imports(text, module) for module in modules):
                tests.add(path)
    return frozenset(tests)


def _is_of(test: str, stem: str) -> bool:
    return f"_{stem}_" in f"_{test}_"


def _imports(text: str, module: str) -> bool:
    package, _, name = module.rpartition(".")
    lines = (line for line in text.splitlines() if "import" in line)
    return any(
        module in line or (line.startswith(f"from {package} import") and name in line)
        for line in lines
    )
