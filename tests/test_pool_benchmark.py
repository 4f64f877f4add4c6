"""The benchmark of max pooling: who is wrong is not timed; its rows reach the report."""

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

from benchmarks import report  # noqa: E402
from benchmarks._guards import NotTheJob  # noqa: E402
from benchmarks._rows import load  # noqa: E402

bench: Any = importlib.import_module("benchmarks.bench_pool")

LAYERS = (*bench.QUICK, bench.Layer(8, 14, 2, 2), bench.Layer(8, 7, 3, 1, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Off(torch.autograd.Function):
    """The identity with a gradient that is off by 2 %."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1.02


@pytest.mark.parametrize("layout", bench.LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_right_ones_pass_and_wrong_ones_do_not(layer: Any, dtype: torch.dtype, layout: str) -> None:
    x, gradient = bench.tensors(layer, 2, dtype, layout, "cpu")
    bench.check(layer.ours, layer, x, gradient, bits=True)
    bench.check(layer.eager, layer, x, gradient, bits=False)
    wrong = {
        "output": lambda x: layer.eager(x) * 1.02,
        "gradient": lambda x: layer.eager(Off.apply(x)),
        "sign": lambda x: -layer.eager(x),
        "average": lambda x: torch.nn.functional.avg_pool2d(x, *layer.window),
        "nan": lambda x: layer.eager(x) * torch.nan,
        "dtype": lambda x: layer.eager(x).double(),
        "layout": lambda x: layer.eager(x).transpose(2, 3),
    }
    for function in wrong.values():
        for bits in (False, True):
            with pytest.raises(NotTheJob):
                bench.check(function, layer, x, gradient, bits=bits)


def test_ours_has_torchs_bits() -> None:
    """One ulp in one element is refused."""
    layer = bench.QUICK[0]
    x, gradient = bench.tensors(layer, 2, torch.float32, "contiguous", "cpu")

    class Ulp(Off):
        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            grad = grad.clone()
            place = grad.abs().argmax()
            grad.view(-1)[place] *= 1 + 2**-23
            return grad

    function = lambda x: layer.eager(Ulp.apply(x))  # noqa: E731
    bench.check(function, layer, x, gradient, bits=False)
    with pytest.raises(NotTheJob, match="wrong gradient"):
        bench.check(function, layer, x, gradient, bits=True)


def test_cases() -> None:
    for device in ("cpu", "cuda"):
        cases = bench.select(device)
        assert len(set(map(str, cases))) == len(cases)
        assert {case.layer for case in cases if case.compiled} == set(bench.LAYERS)
        assert {case.dtype for case in cases} == set(bench.DTYPES[device])
    assert len(bench.select(quick=True)) == 6
    assert not any(case.compiled for case in bench.select(full=True, compiled=False))


def test_bytes_that_must_be_moved() -> None:
    """Input, a quarter as many outputs, and 2 bits of each."""
    layer = bench.Layer(8, 14, 2, 2)
    assert layer.tensors("forward", torch.float32) == 1 + 0.25 + 0.25 * 2 / 32
    assert layer.tensors("forward+backward", torch.float32) == 2.53125
    stem = bench.Layer(64, 112, 3, 2, 1)
    assert stem.tensors("backward", torch.bfloat16) == 1 + 0.25 + 0.25 * 4 / 16


def test_a_quick_run_reaches_the_report(tmp_path: Path, capsys: Any) -> None:
    environment = os.environ | {"RESULTS_DIR": str(tmp_path)}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "--quick", "--family", "pool"],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(tmp_path.glob("*-pool.png"))
    (path,) = tmp_path.glob("*.json")
    rows = load([path])
    assert {row.pass_name for row in rows} == {"forward", "backward", "forward+backward"}
    assert {row.layout for row in rows} == {"contiguous", "channels_last"}
    assert all(row.family == "pool" and set(row.ratio) == {"eager"} for row in rows)
    # A quarter as many outputs as inputs, of 4 bits; eager: the input and 8 bytes an output.
    (codes, eager), *others = {(row.kept["fusedtrain"], row.kept["eager"]) for row in rows}  # type: ignore[index]
    assert not others
    assert 0.125 <= codes < 0.13
    assert eager == 6
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "float32, batch 8 (" in text
    (line,) = (x for x in text.splitlines() if "28 contiguous" in x and "│ backward" in x)
    assert line.split("│")[-3].strip() == "0.125 / 6"
    assert "vs exact" not in text
    assert report.main([str(path), "--markdown"]) == 0
    header, _, *lines = (x for x in capsys.readouterr().out.splitlines() if x.startswith("|"))
    assert header.endswith("| kept B / eager's |")
    assert {line.split("|")[1].strip() for line in lines} == {
        "max_pool2d 3x3/2 16x28x28 contiguous", "max_pool2d 3x3/2 16x28x28 channels_last"
    }  # fmt: skip
