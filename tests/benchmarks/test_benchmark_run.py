"""Runs of the benchmarks: what is stored, what is dropped, what a wrong op leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.harness import store
from helpers import ROOT, environment
from helpers.processes import run_python


def run(folder: Path, *command: str) -> tuple[int, str]:
    """The exit code and the output."""
    # Here the machinery is tested, which the plain-torch reference serves as well as a binary.
    settings = environment(FUSEDTRAIN_REQUIRE="", OMP_NUM_THREADS="1", RESULTS_DIR=str(folder))
    settings["PYTHONPATH"] = os.pathsep.join([str(folder), settings["PYTHONPATH"]])
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        settings.pop(name, None)
    options = ("-o", "addopts=", "--threads=1", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = run_python("-m", *command, "--quick", *options, cwd=ROOT, env=settings, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_quick_run_stores_and_shows_rows(tmp_path: Path) -> None:
    also = tmp_path / "also"
    names = ("--family=batch_norm", "--op=bn_add_relu", f"--also={also}")
    code, output = run(tmp_path, "benchmarks.run", *names)
    assert code == 0, output
    (path,) = tmp_path.glob("*.json")
    entries = store.read(path)["benchmarks"]
    assert store.read(also / path.name)["benchmarks"] == entries
    name = "benchmarks/bench_batch_norm.py::test_batch_norm"
    assert [entry["fullname"].partition("[")[0] for entry in entries] == [name] * 2
    for entry in entries:
        row = entry["extra_info"]
        assert row["allocator"] == "kept"
        assert row["ns"].keys() == {"fusedtrain", "eager", "copy", "copy_fresh"}
        low, high = row["ratio_interval"]["eager"]
        assert low <= row["ratio"]["eager"] <= high
        assert entry["stats"]["median"] == pytest.approx(row["ns"]["fusedtrain"] * 1e-9)
        assert "data" not in entry["stats"]
    assert "node" not in store.read(path)["machine_info"]
    assert "batch_norm, " in output
    assert [chart.name for chart in tmp_path.glob("*.svg")] == [f"{path.stem}.svg"]


WRONG_MISH = """
import fusedtrain.functional

fusedtrain.functional.mish = fusedtrain.functional.silu
"""


def test_a_wrong_op_is_not_reported(tmp_path: Path) -> None:
    (tmp_path / "wrong_mish.py").write_text(WRONG_MISH)
    path = tmp_path / "device.json"
    code, output = run(
        tmp_path, "pytest", "benchmarks/bench_activations.py", f"--store={path}", "-p", "wrong_mish"
    )  # fmt: skip
    assert code == 1, output
    assert "mish-forward-float32-65536 on cpu: wrong forward" in output
    assert "Not timed" in output
    assert [entry["extra_info"]["op"] for entry in store.read(path)["benchmarks"]] == ["relu"] * 2


KILLED = """
import os, signal

begun = []


def pytest_runtest_setup(item):
    begun.append(item)
    if len(begun) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_its_rows(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    path, also = tmp_path / "device.json", tmp_path / "also.json"
    stores = (f"--store={path}", f"--store={also}")
    command = ("pytest", "benchmarks/bench_batch_norm.py", "--family=batch_norm", *stores)
    code, output = run(tmp_path, *command, "-p", "killed")
    assert code != 0, output
    before = store.read(path)["benchmarks"]
    assert [entry["extra_info"]["layout"] for entry in before] == ["contiguous"]
    assert store.read(also)["benchmarks"] == before
    code, output = run(tmp_path, *command, "-k", "channels_last", "--keep-rows")
    assert code == 0, output
    entries = store.read(path)["benchmarks"]
    layouts = [entry["extra_info"]["layout"] for entry in entries]
    assert layouts[0] == "contiguous"
    assert set(layouts[1:]) == {"channels_last"}
    assert len({entry["fullname"] for entry in entries}) == len(entries)
