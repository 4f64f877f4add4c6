"""Options and fixtures of the benchmarks: what to run, how it is timed, the stored results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.cases import Options
from benchmarks.harness.clock import REPLAY
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
    group.addoption("--no-compile", action="store_true", help="leave torch.compile out")
    group.addoption(
        "--only-compile", action="store_true", help="only the rows that torch.compile takes part in"
    )
    group.addoption(
        "--store", action="append", default=[], help="put each row into this file (repeatable)"
    )
    group.addoption(
        "--keep-rows", action="store_true", help="--store: leave rows that are not measured"
    )
    group.addoption("--threads", type=int, default=0, help="torch's threads; 0 leaves its default")
    group.addoption("--flush-l2", action="store_true", help="CUDA: cold L2 cache before each call")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(
            "the benchmarks need pytest-benchmark: pip install pytest-benchmark"
        )
    config.addinivalue_line("python_files", "bench_*.py")
    device = config.getoption("--device", default="cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device")
    if config.getoption("--threads", default=0):
        torch.set_num_threads(config.getoption("--threads"))
    if paths := config.getoption("--store", default=[]):
        families = [] if config.getoption("--keep-rows") else config.getoption("--family")
        config.pluginmanager.register(Recorder(config, [*map(Path, paths)], families))
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
    metafunc.parametrize("case", metafunc.module.select(options), ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A file of benchmarks passes over the names of the others, so only here a wrong one shows.
    cases = [item.callspec.params.get("case") for item in items if hasattr(item, "callspec")]
    for option, attribute in (("--op", "op"), ("--model", "model")):
        known = {getattr(case, attribute, None) for case in cases}
        unknown = sorted(set(config.getoption(option)) - known)
        if unknown:
            raise pytest.UsageError(f"{option}: no benchmark of {', '.join(unknown)}")
    kept = items[:]
    if config.getoption("--only-compile"):
        kept = [i for i in kept if getattr(i.callspec.params["case"], "compiled", False)]  # type: ignore[attr-defined]
    if families := config.getoption("--family"):
        files = {f"bench_{family}.py" for family in families}
        kept = [item for item in kept if item.path.name in files]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=REPLAY))


@pytest.fixture
def race(pytestconfig: pytest.Config, benchmark: Any) -> Race:
    """How the rivals of a test are timed."""
    device = str(pytestconfig.getoption("--device"))
    clock: Clock = cpu_clock
    if device == "cuda":
        clock = FlushingCudaClock() if pytestconfig.getoption("--flush-l2") else cuda_clock
    effort = QUICK if pytestconfig.getoption("--quick") else NORMAL
    return Race(benchmark, clock, effort, device)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    # Results are committed: the host's name and kernel are nobody's business.
    kept = ("machine", "system", "python_version")
    cpu = {key: machine_info.get("cpu", {}).get(key) for key in ("brand_raw", "count")}
    for key in machine_info.keys() - {*kept}:
        del machine_info[key]
    machine_info["cpu"] = cpu


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    # The row is in extra_info; samples and pytest-benchmark's options are 90 % of the file.
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
        for key in ("options", "params"):
            entry.pop(key, None)
