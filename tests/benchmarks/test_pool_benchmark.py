"""The benchmark of max pooling: who is wrong is not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import bench_pool as bench
from benchmarks.harness.cases import LAYOUTS, Options
from fusedtrain.advisor.bench.gate import NotTheJob
from helpers.benchmarks import Off, measured, mistakes

LAYERS = (*bench.QUICK, bench.Layer(8, 14, 2, 2), bench.Layer(8, 7, 3, 1, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_right_ones_pass_and_wrong_ones_do_not(layer: Any, dtype: torch.dtype, layout: str) -> None:
    x, gradient = bench.tensors(layer, 2, dtype, layout, "cpu")
    bench.check(layer.ours, layer, x, gradient, bits=True)
    bench.check(layer.eager, layer, x, gradient, bits=False)
    wrong = mistakes(layer.eager)
    wrong["average"] = lambda x: torch.nn.functional.avg_pool2d(x, *layer.window)
    wrong["layout"] = lambda x: layer.eager(x).transpose(2, 3)
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
        cases = bench.select(Options(device))
        assert {case.layer for case in cases if case.compiled} == set(bench.LAYERS)
        assert {case.dtype for case in cases} == set(bench.DTYPES[device])
    assert len(bench.select(Options(quick=True))) == 6


def test_bytes_that_must_be_moved() -> None:
    """Input, a quarter as many outputs, and 2 bits of each."""
    layer = bench.Layer(8, 14, 2, 2)
    assert layer.tensors("forward", torch.float32) == 1 + 0.25 + 0.25 * 2 / 32
    assert layer.tensors("forward+backward", torch.float32) == 2.53125
    stem = bench.Layer(64, 112, 3, 2, 1)
    assert stem.tensors("backward", torch.bfloat16) == 1 + 0.25 + 0.25 * 4 / 16


def test_rows() -> None:
    rows = [measured(bench, case) for case in bench.select(Options(quick=True))]
    assert {row["pass"] for row in rows} == {"forward", "backward", "forward+backward"}
    assert {row.layout for row in rows} == {"contiguous", "channels_last"}
    assert all(set(row.ratio) == {"eager"} for row in rows)
    # A quarter as many outputs as inputs, of 4 bits; eager: the input and 8 bytes an output.
    (codes, eager), *others = {(row["kept"]["fusedtrain"], row["kept"]["eager"]) for row in rows}
    assert not others
    assert 0.125 <= codes < 0.13
    assert eager == 6
