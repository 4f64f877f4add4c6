"""The benchmark of few-bit activations: who is wrong is not timed."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fusedtrain.functional as F
from benchmarks import bench_few_bit as bench, report
from benchmarks.harness.cases import Options
from fusedtrain.advisor.bench.gate import NotTheJob
from fusedtrain.reference import ACTIVATIONS
from helpers.benchmarks import measured, mistakes

CASES = [(op, save) for op, saves in bench.SAVES.items() for save in saves]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(op: str, function: Any, dtype: torch.dtype, error: tuple[float, float]) -> None:
    bench.check(op, function, *bench._tensors(bench.QUICK_SIZE, dtype, "cpu"), error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "save"), CASES)
def test_right_ones_pass(op: str, save: str, dtype: torch.dtype) -> None:
    check(op, partial(getattr(F, op), save=save), dtype, bench.stated_error(op, save))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "save"), [("gelu", "q2"), ("silu", "q8"), ("relu", "q1")])
def test_wrong_ones_do_not(op: str, save: str, dtype: torch.dtype) -> None:
    wrong = mistakes(partial(getattr(F, op), save=save))
    for function in (*wrong.values(), torch.nn.functional.elu):
        with pytest.raises(NotTheJob):
            check(op, function, dtype, bench.stated_error(op, save))


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
    case = bench.select(Options(quick=True))[0]
    assert set(bench.contest(case, "cpu").functions) == {"fusedtrain", "eager", "exact"}
    monkeypatch.setattr(bench, "F", SimpleNamespace(gelu=lambda x, save: F.gelu(x)))
    with pytest.raises(pytest.fail.Exception, match=r"keeps 32 bits an element, not 8\. Not timed"):
        measured(bench, case)


def test_cases() -> None:
    for device in ("cpu", "cuda"):
        cases = bench.select(Options(device))
        assert {(case.op, case.save) for case in cases} == set(CASES)
        assert {(case.op, case.save) for case in cases if case.compiled} == set(CASES)
        assert {case.dtype for case in cases} == set(bench.DTYPES[device])
    assert len(bench.select(Options(quick=True))) == 6
    assert {case.op for case in bench.select(Options(ops=("silu",)))} == {"silu"}
    case = bench.select(Options(ops=("gelu",)))[0]
    assert (case.save, case.pass_name, case.tensors()) == ("q8", "forward", 2.25)


def test_rows() -> None:
    rows = [measured(bench, case) for case in bench.select(Options(quick=True))]
    assert {row["pass"] for row in rows} == {"forward", "backward", "forward+backward"}
    assert {row.op: row["kept"] for row in rows} == {
        "gelu q8": {"fusedtrain": 1, "eager": 4, "exact": 4},
        "relu q1": {"fusedtrain": 0.125, "eager": 4, "exact": 4},
    }
    assert all({"eager", "exact"} == set(row.ratio) for row in rows)
    kept = [report.cells(row)["kept"] for row in rows]
    assert {*kept} == {"1 B (eager 4 B, exact 4 B)", "0.125 B (eager 4 B, exact 4 B)"}
