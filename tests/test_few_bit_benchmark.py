"""The benchmark of few-bit activations: who is wrong is not timed; its rows reach the report."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks._guards import NotTheJob  # noqa: E402
from benchmarks._rows import load  # noqa: E402

bench: Any = importlib.import_module("benchmarks.bench_few_bit")

CASES = [(op, save) for op, saves in bench.SAVES.items() for save in saves]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Off(torch.autograd.Function):
    """The identity with a gradient that is off by 2 %."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1.02


def check(op: str, function: Any, dtype: torch.dtype, error: tuple[float, float]) -> None:
    bench.check(op, function, *bench._tensors(bench.QUICK_SIZE, dtype, "cpu"), error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "save"), CASES)
def test_right_ones_pass_and_wrong_ones_do_not(op: str, save: str, dtype: torch.dtype) -> None:
    right, error = partial(getattr(F, op), save=save), bench.stated_error(op, save)
    check(op, right, dtype, error)
    wrong = {
        "output": lambda x: right(x) * 1.02,
        "gradient": lambda x: right(Off.apply(x)),
        "sign": lambda x: -right(x),
        "another": torch.nn.functional.elu,
        "nan": lambda x: right(x) * torch.nan,
        "dtype": lambda x: right(x).double(),
    }
    for function in wrong.values():
        with pytest.raises(NotTheJob):
            check(op, function, dtype, error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", bench.SAVES)
def test_exact_ones(op: str, dtype: torch.dtype) -> None:
    for function in (ACTIVATIONS[op].eager, getattr(F, op)):
        check(op, function, dtype, (0.0, 0.0))
    if op != "relu":  # whose bits are exact
        with pytest.raises(NotTheJob, match="wrong gradient"):
            check(op, partial(getattr(F, op), save="q4"), dtype, (0.0, 0.0))


def test_errors_are_those_of_the_docstrings() -> None:
    assert bench.stated_error("gelu", "q8") == (0.0025, 0.0015)
    assert bench.stated_error("relu", "q1") == (0.0, 0.0)
    assert all(bench.stated_error(op, save)[1] for op, save in CASES if op != "relu")


def test_who_keeps_the_input_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench.select(quick=True)[0]
    entrants = bench._entrants(case, "cpu")
    assert set(entrants) == {"fusedtrain", "eager", "exact"}
    monkeypatch.setattr(bench, "F", SimpleNamespace(gelu=lambda x, save: F.gelu(x)))
    with pytest.raises(pytest.fail.Exception, match=r"keeps 32 bits an element, not 8\. Not timed"):
        bench._entrants(case, "cpu")


def test_cases() -> None:
    for device in ("cpu", "cuda"):
        cases = bench.select(device)
        assert len(set(map(str, cases))) == len(cases)
        assert {(case.op, case.save) for case in cases} == set(CASES)
        assert {(case.op, case.save) for case in cases if case.compiled} == set(CASES)
        assert {case.dtype for case in cases} == set(bench.DTYPES[device])
    assert len(bench.select(quick=True)) == 6
    assert {case.op for case in bench.select(ops=("silu",))} == {"silu"}
    assert not any(case.compiled for case in bench.select(full=True, compiled=False))
    case = bench.select(ops=("gelu",))[0]
    assert (case.save, case.pass_name, case.tensors()) == ("q8", "forward", 2.25)


def test_a_quick_run_reaches_the_report(tmp_path: Path, capsys: Any) -> None:
    environment = os.environ | {"RESULTS_DIR": str(tmp_path)}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--quick", "--family", "few_bit"],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(tmp_path.glob("*-few-bit.png"))
    (path,) = tmp_path.glob("*.json")
    rows = load([path])
    assert {row.pass_name for row in rows} == {"forward", "backward", "forward+backward"}
    kept = {row.op: row.kept for row in rows}
    assert kept == {
        "gelu q8": {"fusedtrain": 1, "eager": 4, "exact": 4},
        "relu q1": {"fusedtrain": 0.125, "eager": 4, "exact": 4},
    }
    assert all(row.family == "few_bit" and {"eager", "exact"} == set(row.ratio) for row in rows)
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "float32, 2^16 elements" in text
    (line,) = (x for x in text.splitlines() if "gelu q8" in x and "│ backward" in x)
    assert line.split("│")[-3].strip() == "1 / 4"
    assert f"{rows[0].ratio['exact']:.2f}x" in text
    assert report.main([str(path), "--markdown"]) == 0
    header, _, *lines = (x for x in capsys.readouterr().out.splitlines() if x.startswith("|"))
    assert "forward+backward vs exact | kept B / eager's |" in header
    assert [line.split("|")[-2].strip() for line in lines] == ["1 / 4", "0.125 / 4"]
