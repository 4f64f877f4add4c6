"""The benchmark of activations: who is wrong is not timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks import bench_activations as bench
from benchmarks.harness.cases import Options, Work
from fusedtrain.advisor.bench import activations
from fusedtrain.advisor.bench.gate import NotTheJob
from fusedtrain.reference import ACTIVATIONS
from helpers.benchmarks import measured, mistakes

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Function = Callable[[torch.Tensor], torch.Tensor]
WRONG: dict[str, Function] = {
    **mistakes(F.mish),
    "no-op": lambda x: x * 1,
    "another op": F.silu,
    "gradient of one": lambda x: F.mish(x).detach() + x - x.detach(),
    "shape": lambda x: F.mish(x)[:-1],
}


def check(op: str, who: str, function: Function, dtype: torch.dtype) -> None:
    x, gradient = (Work("cpu", dtype).random(4097, seed=seed) for seed in range(2))
    activations.check(op, who, function, x, gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ACTIVATIONS)
def test_right_ones_are_let_in(op: str, dtype: torch.dtype) -> None:
    check(op, "fusedtrain", activations.ours(op), dtype)
    check(op, "eager", ACTIVATIONS[op].eager, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("who", ["fusedtrain", "compile"])
def test_wrong_ones_are_not(who: str, dtype: torch.dtype) -> None:
    check("mish", who, F.mish, dtype)
    # Two percent are what rounding may do to a rival in bfloat16.
    allowed = {"output", "gradient"} if (who, dtype) == ("compile", torch.bfloat16) else set()
    for name in WRONG.keys() - allowed:
        with pytest.raises(NotTheJob):
            check("mish", who, WRONG[name], dtype)


def test_who_is_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case, other = bench.select(Options(quick=True))[:2]
    assert case.op == other.op == "relu"
    case = replace(case, compiled=True)
    monkeypatch.setattr(activations, "compiled", lambda function: WRONG["no-op"])
    with pytest.warns(UserWarning, match="compile left out: wrong forward"):
        assert list(measured(bench, case).ns)[:2] == ["fusedtrain", "eager"]
    monkeypatch.setattr(activations, "ours", lambda op: WRONG["no-op"])
    with pytest.raises(pytest.fail.Exception, match=r"wrong forward.*\. Not timed"):
        measured(bench, case)


def test_selection() -> None:
    cases = bench.select(Options())
    assert {case.op for case in cases} == set(ACTIVATIONS)
    assert {case.op for case in cases if case.compiled} == set(bench.CHOSEN)
    dtypes = {case.dtype for case in bench.select(Options(float64=True))}
    assert dtypes == {*bench.DTYPES, torch.float64}


def test_rows() -> None:
    for case in bench.select(Options(quick=True, ops=("mish",))):
        row = measured(bench, case)
        assert (row.op, row["pass"], row.dtype, row.numel) == (
            *("mish", case.pass_name, "float32", 2**16),
        )
        assert row["bytes"] == bench.TENSORS[case.pass_name] * 4 * 2**16
        assert row["gb_per_s"]["fusedtrain"] == row["bytes"] / row.ns["fusedtrain"]
        copy = 2 * 4 * 2**16 / row.ns["copy_fresh"]
        assert row["percent_of_copy"] == pytest.approx(100 * row["gb_per_s"]["fusedtrain"] / copy)
