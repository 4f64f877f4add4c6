"""The benchmark of the pointwise chains: who is wrong is not timed; its rows reach the report."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _chain_contestants as contestants  # noqa: E402
from benchmarks._chain_contestants import CHAINS, NotTheJob, check  # noqa: E402
from benchmarks._rows import load  # noqa: E402

bench: Any = importlib.import_module("benchmarks.bench_chains")


class Off(torch.autograd.Function):
    """The identity with a gradient that is off by 2 %."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1.02


def tensors(name: str, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, ...], Tensor]:
    chain = CHAINS[name]
    generator = torch.Generator().manual_seed(0)
    shapes = chain.shapes(contestants._images(2 * 96 * 56 * 56)[0] * 96 * 56 * 56)
    given = tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return given, torch.randn(chain.eager(*given).shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_right_ones_pass(name: str, dtype: torch.dtype) -> None:
    given, grad = tensors(name, dtype)
    for function in (CHAINS[name].ours, CHAINS[name].eager):
        check(CHAINS[name], function, given, grad)


@pytest.mark.parametrize("name", CHAINS)
def test_wrong_ones_do_not(name: str) -> None:
    given, grad = tensors(name)
    chain = CHAINS[name]
    wrong = {
        "output": lambda *t: chain.eager(*t) * 1.02,
        "gradient": lambda *t: chain.eager(Off.apply(t[0]), *t[1:]),
        "sign": lambda *t: -chain.eager(*t),
    }
    if chain.drops:
        wrong["rate"] = lambda *t: torch.nn.functional.dropout(chain.eager(*t), 0.05)
        wrong["nothing dropped"] = lambda *t: torch.nn.functional.gelu(sum(t))
    for function in wrong.values():
        with pytest.raises(NotTheJob):
            check(chain, function, given, grad)


def test_cases() -> None:
    for device in ("cpu", "cuda"):
        names = list(map(str, bench.select(device)))
        assert len(set(names)) == len(names)
        assert {case.op for case in bench.select(device)} == set(CHAINS)
        rivals = [case for case in bench.select(device) if case.compiled]
        assert {case.op for case in rivals} == set(CHAINS)
    assert len(bench.select(quick=True)) < 25


def test_a_quick_run_reaches_the_report(tmp_path: Path) -> None:
    environment = os.environ | {"RESULTS_DIR": str(tmp_path)}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--quick", "--family", "chains", "--op", "swiglu",
         "--op", "se_gate"],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    rows = load(tmp_path.glob("*.json"))
    assert {row.op for row in rows} == {"swiglu", "se_gate"}
    assert {row.layout for row in rows} == {"", "contiguous", "channels_last"}
    assert all(row.family == "chains" and "eager" in row.ratio for row in rows)
    assert list(tmp_path.glob("*-chains.png"))
