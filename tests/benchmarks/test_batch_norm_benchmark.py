"""The benchmark of batch norm: its bytes, its gate, its cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import bench_batch_norm as bench
from benchmarks.harness.cases import Options
from benchmarks.harness.shapes import NORM_NETWORKS, norms
from fusedtrain.advisor.bench.gate import NotTheJob
from fusedtrain.advisor.bench.norms import CONTESTANTS, OPS, Contestant, check, exact
from helpers.benchmarks import measured


@pytest.mark.parametrize(
    ("op", "forward", "both"),
    [
        ("bn_relu", 3, 8),
        ("bn_silu", 3, 8),
        ("bn_add_relu", 4, 11),
        ("bn_add", 4, 9),
        ("bn", 3, 8),
        ("frozen_bn_relu", 2, 5),
    ],
)
def test_least_tensors(op: str, forward: int, both: int) -> None:
    assert OPS[op].tensors("forward") == forward
    assert OPS[op].tensors("forward+backward") == both


# --- the gate ---

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _tensors(op: str, dtype: torch.dtype, layout: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    x, residual, gradient = (
        torch.randn(4, 6, 9, 7).to(dtype).contiguous(memory_format=layout) for _ in range(3)
    )
    return x, residual if OPS[op].add else None, gradient


def _check(op: str, contestant: Contestant, dtype: torch.dtype, layout: Any) -> None:
    x, residual, gradient = _tensors(op, dtype, layout)
    check(contestant, exact(OPS[op], x, residual, gradient), x, residual)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("who", ["fusedtrain", "eager"])
@pytest.mark.parametrize("op", OPS)
def test_gate_accepts_right_contestants(op: str, who: str, dtype: torch.dtype, layout: Any) -> None:
    _check(op, CONTESTANTS[who](OPS[op], 6, "cpu"), dtype, layout)


def _without_gradient_of_statistics(x: Tensor, norm: Any) -> Tensor:
    with torch.no_grad():
        mean, var = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, correction=0)
        norm(x)
    weight, bias = (p.view(1, -1, 1, 1) for p in (norm.weight, norm.bias))
    return ((x - mean) * torch.rsqrt(var + norm.eps) * weight + bias).relu().to(x.dtype)


MISTAKES: dict[str, tuple[Callable[[Tensor, Any], Tensor], str]] = {
    "no-op": (lambda x, norm: x * 1, "wrong output"),
    "no activation": (lambda x, norm: norm(x), "wrong output"),
    "another one": (lambda x, norm: nn.functional.silu(norm(x)), "wrong output"),
    "sign": (lambda x, norm: -norm(x).relu(), "wrong output"),
    "2 percent": (lambda x, norm: 1.02 * norm(x).relu(), "wrong output"),
    "gradient of the input": (lambda x, norm: norm(x.detach()).relu(), "no gradient of input"),
    "fixed statistics": (_without_gradient_of_statistics, "wrong gradient of input"),
    "nan": (lambda x, norm: norm(x).relu() * torch.nan, "wrong output"),
    "dtype": (lambda x, norm: norm(x).relu().double(), "returned torch.float64"),
    "layout": (lambda x, norm: norm(x).relu().contiguous(), "returned"),
    "statistics": (lambda x, norm: norm.eval()(x).relu(), "wrong output"),
    "no graph": (lambda x, norm: norm(x).relu().detach(), "does not require"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_gate_refuses_a_wrong_contestant(mistake: str, dtype: torch.dtype) -> None:
    function, message = MISTAKES[mistake]
    norm = CONTESTANTS["eager"](OPS["bn_relu"], 6, "cpu").norm
    wrong = Contestant(norm, lambda x, residual: function(x, norm))
    with pytest.raises(NotTheJob, match=message):
        _check("bn_relu", wrong, dtype, torch.channels_last)


def test_gate_refuses_who_leaves_the_running_statistics() -> None:
    right = CONTESTANTS["eager"](OPS["bn_relu"], 6, "cpu")

    def function(x: Tensor, residual: Tensor | None) -> Tensor:
        kept = right.norm.running_var.clone()
        output = right.function(x, residual)
        right.norm.running_var.data = kept
        return output

    with pytest.raises(NotTheJob, match="wrong running_var"):
        _check("bn_relu", Contestant(right.norm, function), torch.float32, torch.channels_last)


def test_gate_refuses_who_does_not_add() -> None:
    right = CONTESTANTS["eager"](OPS["bn_add_relu"], 6, "cpu")
    wrong = Contestant(right.norm, lambda x, residual: right.function(x, 1.02 * residual))
    with pytest.raises(NotTheJob, match="wrong output"):
        _check("bn_add_relu", wrong, torch.bfloat16, torch.contiguous_format)


# --- what is run ---


def test_selection() -> None:
    cases = bench.select(Options())
    assert {case.op for case in cases if not case.model} == set(bench.STANDARD)
    of_networks = [case for case in cases if case.model]
    assert not any(case.compiled for case in of_networks)
    assert {case.layout for case in of_networks} == {"contiguous", "channels_last"}
    for network in NORM_NETWORKS:
        layers = {(c.op, *c.shape[1:]) for c in of_networks if c.model == network}
        assert layers == set(norms(network))
    # Where ratios to torch.compile are quoted.
    assert {(c.op, c.layout) for c in cases if c.compiled} == {
        (op, layout)
        for op in ("bn_relu", "bn_silu", "bn_add_relu")
        for layout in ("contiguous", "channels_last")
    }
    assert {c.model for c in bench.select(Options(models=("resnet50",)))} == {"resnet50"}
    on_cuda = [case for case in bench.select(Options("cuda")) if case.model]
    assert {(c.shape[0], c.dtype) for c in on_cuda} == {(256, torch.bfloat16)}
    assert len(bench.select(Options(quick=True))) == 4
    assert len(bench.select(Options(quick=True, models=("resnet50",)))) == 2


def test_rows() -> None:
    for case in bench.select(Options(quick=True, ops=("bn_add_relu",))):
        row = measured(bench, case)
        assert (row.op, row.model, row.layout) == ("bn_add_relu", "", case.layout)
        assert row["bytes"] == 11 * 4 * torch.Size(row["shape"]).numel()
        assert row.ns.keys() == {"fusedtrain", "eager", "copy", "copy_fresh"}
