"""Options and fixtures of the benchmarks: what to run, how it is timed, the stored results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks import report
from benchmarks.harness.cases import Options
from benchmarks.harness.race import Race
from benchmarks.harness.store import Recorder
from fusedtrain.advisor.bench.clock import (
    NORMAL,
    QUICK,
    Clock,
    FlushingCudaClock,
    cpu_clock,
    cuda_clock,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fusedtrain benchmarks")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where to run")
    group.addoption("--full", action="store_true", help="the whole cross product, for hours")
    group.addoption(
        "--family", action="append", default=[], help="only bench_NAME.py (may be repeated)"
    )
    group.addoption("--quick", action="store_true", help="a smoke test: few ops, one small size")
    group.addoption(
        "--op", action="append", default=[], help="only this op, optimizer or job (repeatable)"
    )
    group.addoption("--model", action="append", default=[], help="only this network (repeatable)")
    group.addoption("--float64", action="store_true", help="add float64 where dtypes are compared")
    group.addoption("--gates-only", action="store_true", help="check all, time nothing")
    group.addoption("--no-compile", action="store_true", help="leave torch.compile out")
    group.addoption(
        "--only-compile", action="store_true", help="only the rows that torch.compile takes part in"
    )
    group.addoption(
        "--store", action="append", default=[], help="put each row into this file (repeatable), "
        "in place of showing the rows at the end"
    )  # fmt: skip
    group.addoption(
        "--keep-rows", action="store_true", help="--store: leave rows that are not measured"
    )
    group.addoption("--threads", type=int, default=0, help="torch's threads; 0 leaves its default")
    group.addoption("--flush-l2", action="store_true", help="CUDA: cold L2 cache before each call")
    group.addoption(
        "--first", action="store_true", help="CUDA: the few large rows that `make gpu` begins with"
    )
    group.addoption(
        "--profile", action="store_true", help="CUDA: one call of fusedtrain's, for ncu; no time"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
    device = config.getoption("--device", default="cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device")
    if config.getoption("--threads", default=0):
        torch.set_num_threads(config.getoption("--threads"))
    families = [] if config.getoption("--keep-rows", default=True) else config.getoption("--family")
    paths = [*map(Path, config.getoption("--store", default=[]))]
    config.pluginmanager.register(Recorder(paths, families, lambda path: report.main([str(path)])))
    # Without its binary the package works by its plain-torch reference: that must not be timed.
    if "FUSEDTRAIN_BACKEND" not in os.environ:
        os.environ.setdefault("FUSEDTRAIN_REQUIRE", device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    options = Options(
        option("--device"),
        full=option("--full"),
        quick=option("--quick"),
        float64=option("--float64"),
        compiled=not option("--no-compile"),
        ops=tuple(option("--op")),
        models=tuple(option("--model")),
    )
    module, first = metafunc.module, option("--first")
    cases = getattr(module, "FIRST", ()) if first else module.select(options)
    metafunc.parametrize("case", cases, ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A file of benchmarks passes over the names of the others, so only here a wrong one shows.
    cases = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    for option, attribute in (("--op", "op"), ("--model", "model")):
        known = {getattr(case, attribute, None) for case in cases}
        unknown = sorted(set(config.getoption(option)) - known)
        if unknown:
            raise pytest.UsageError(f"{option}: no benchmark of {', '.join(unknown)}")
    kept = [i for i in items if not config.getoption("--first") or hasattr(i.module, "FIRST")]  # type: ignore[attr-defined]
    if config.getoption("--only-compile"):
        kept = [i for i in kept if getattr(i.callspec.params["case"], "compiled", False)]  # type: ignore[attr-defined]
    if families := config.getoption("--family"):
        files = {f"bench_{family}.py" for family in families}
        kept = [item for item in kept if item.path.name in files]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


@pytest.fixture
def race(pytestconfig: pytest.Config) -> Race:
    """How the rivals of a test are timed: not at all beside other processes of pytest-xdist."""
    device = str(pytestconfig.getoption("--device"))
    clock: Clock = cpu_clock
    if device == "cuda":
        clock = FlushingCudaClock() if pytestconfig.getoption("--flush-l2") else cuda_clock
    effort = QUICK if pytestconfig.getoption("--quick") else NORMAL
    # An installed pytest-benchmark takes its own option, which once was the one to be used here.
    off = pytestconfig.getoption("--gates-only") or hasattr(pytestconfig, "workerinput")
    off = off or pytestconfig.getoption("--benchmark-disable", default=False)
    profiled, first = (bool(pytestconfig.getoption(name)) for name in ("--profile", "--first"))
    return Race(clock, effort, device, off, profiled, first)
