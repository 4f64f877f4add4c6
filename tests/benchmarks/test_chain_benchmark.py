"""The benchmark of the pointwise chains: who is wrong is not timed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import bench_chains as bench
from benchmarks.harness.cases import Options, Work
from fusedtrain.advisor.bench.chains import CHAINS, check, tensors_of
from fusedtrain.advisor.bench.gate import NotTheJob
from helpers.benchmarks import measured, mistakes


def tensors(name: str, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, ...], Tensor]:
    """Few, but enough to tell the rate of dropout; an image has 96 channels of 56 x 56."""
    return tensors_of(Work("cpu", dtype), name, 2**14, "contiguous")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_right_ones_pass(name: str, dtype: torch.dtype) -> None:
    arguments, grad = tensors(name, dtype)
    for function in (CHAINS[name].ours, CHAINS[name].eager):
        check(CHAINS[name], function, arguments, grad)


@pytest.mark.parametrize("name", CHAINS)
def test_wrong_ones_do_not(name: str) -> None:
    arguments, grad = tensors(name)
    chain = CHAINS[name]
    wrong = mistakes(chain.eager)
    if chain.drops:
        wrong["rate"] = lambda *t: torch.nn.functional.dropout(chain.eager(*t), 0.05)
        wrong["nothing dropped"] = lambda *t: torch.nn.functional.gelu(sum(t))
    for function in wrong.values():
        with pytest.raises(NotTheJob):
            check(chain, function, arguments, grad)


def test_cases() -> None:
    for device in ("cpu", "cuda"):
        cases = bench.select(Options(device))
        assert {case.op for case in cases} == set(CHAINS)
        assert {case.op for case in cases if case.compiled} == set(CHAINS)
    assert len(bench.select(Options(quick=True))) < 25


def test_rows() -> None:
    cases = bench.select(Options(quick=True, compiled=False, ops=("swiglu", "se_gate")))
    rows = [measured(bench, case) for case in cases]
    assert {row.op for row in rows} == {"swiglu", "se_gate"}
    assert {row.layout for row in rows} == {"", "contiguous", "channels_last"}
    assert {row["pass"] for row in rows} == set(bench.PASSES)
    assert rows[1]["bytes"] == 4 * rows[1].numel * sum(CHAINS["swiglu"].tensors)
