"""Batch norm over two gloo ranks, against one batch norm that sees the batches of both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedtrain
from fusedtrain.nn import (
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAddAct,
    SyncBatchNormAct,
    convert_sync_batchnorm,
)
from helpers.models import model_of, timm
from helpers.rank_processes import results_of_two_ranks

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="needs a torch with torch.distributed"
)

# How many of 9 samples the first rank has.
SPLITS = {"equal halves, almost": 4, "unequal": 2, "all": 9}
CASES: dict[str, dict[str, Any]] = {
    "relu": {},
    "silu": {"act_layer": nn.SiLU},
    "none": {"apply_act": False},
    "not affine": {"act_layer": nn.SiLU, "affine": False},
    "cumulative": {"momentum": None},
    "not tracking": {"track_running_stats": False},
    "an activation of its own": {"act_layer": lambda: model_of(lambda self, input: input * 0.5)},
}


def _batch(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(  # type: ignore[return-value]
        torch.randn(9, 5, 4, 3, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(3)
    )


def _run(norm: nn.Module, adds: bool, samples: slice, dtype: torch.dtype) -> dict[str, Any]:
    """Outputs, gradients and buffers of two training steps and an evaluation."""
    x, residual, grad = (t[samples] for t in _batch(dtype))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for p in norm.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    results: dict[str, Any] = {}
    for step in range(2):
        leaves = [(x + step).requires_grad_(), residual.clone().requires_grad_()]
        y = norm(leaves[0], leaves[1]) if adds else norm(leaves[0])
        y.backward(grad)
        results[f"{step}"] = [y.detach(), leaves[0].grad]
        if adds:
            results[f"{step}"].append(leaves[1].grad)
    results["affine"] = [p.grad for p in norm.parameters()]
    results["buffers"] = [b.clone() for b in norm.buffers()]
    norm.eval()
    # Without running statistics the rank's own batch has to do, as in torch.nn.SyncBatchNorm.
    if norm.running_mean is not None:
        results["eval"] = [norm(x, residual) if adds else norm(x)]
    return results


def _norm(case: str, adds: bool, sync: bool, dtype: torch.dtype) -> nn.Module:
    cls = SyncBatchNormAct if sync else (BatchNormAddAct if adds else BatchNormAct2d)
    return cls(5, **CASES[case]).to(torch.float64 if dtype is torch.float64 else torch.float32)


def _on_a_rank(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for case in CASES:
        for adds in (False, True):
            for split, first in SPLITS.items():
                for dtype in (torch.float64, torch.float32, torch.bfloat16):
                    mine = slice(0, first) if rank == 0 else slice(first, 9)
                    norm = _norm(case, adds, True, dtype)
                    results[case, adds, split, dtype] = _run(norm, adds, mine, dtype)
    results["ddp"] = _data_parallel(rank)
    norm, x = BatchNormAct2d(3), torch.randn(2, 3, 2, 2, requires_grad=True)
    convert_sync_batchnorm(norm)
    y = norm(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        results["double backward"] = str(error)
    for name, arguments in {
        "channels": (torch.randn(2, 4, 2, 2),),
        "residual": (torch.randn(2, 3, 2, 2), torch.randn(1, 3, 2, 2)),
    }.items():
        before = norm.running_mean.clone()
        with pytest.raises(RuntimeError, match="SyncBatchNormAct"):
            norm(*arguments)
        assert torch.equal(norm.running_mean, before), name
    results["compiled"] = _compiled(rank)
    return results


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(5, 6, 3, bias=False), BatchNormAct2d(6, act_layer=nn.SiLU), nn.Conv2d(6, 4, 1)
    ).double()


def _data_parallel(rank: int) -> list[Tensor]:
    model = convert_sync_batchnorm(_model())
    parallel = nn.parallel.DistributedDataParallel(model)
    x = _batch(torch.float64)[0][:8]  # DDP averages over ranks: equal halves
    mine = x[:4] if rank == 0 else x[4:]
    parallel(mine).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _compiled(rank: int) -> bool:
    """Whether torch.compile changes anything."""
    results = []
    for compiled in (False, True):
        norm = _norm("silu", False, True, torch.float64)
        call = torch.compile(norm, backend="eager") if compiled else norm
        x = _batch(torch.float64)[0][rank : 4 + 3 * rank].requires_grad_()
        y = call(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, norm.running_var])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return results_of_two_ranks(_on_a_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("adds", [False, True], ids=["", "add"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_do_what_one_batch_norm_does(
    ranks: list[dict[Any, Any]], case: str, adds: bool, split: str, dtype: torch.dtype
) -> None:
    a, b = (rank[case, adds, split, dtype] for rank in ranks)
    want = _run(_norm(case, adds, False, dtype), adds, slice(0, 9), dtype)
    limits = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}
    close: dict[str, Any] = {"rtol": limits[dtype], "atol": limits[dtype]}
    for step in want.keys() - {"affine", "buffers"}:
        for mine, others, whole in zip(a[step], b[step], want[step], strict=True):
            torch.testing.assert_close(torch.cat([mine, others]), whole, **close)
    for mine, others, whole in zip(a["affine"], b["affine"], want["affine"], strict=True):
        torch.testing.assert_close(mine + others, whole, **close)
    # Statistics are computed in float32 at least, whatever the input.
    close = {"rtol": min(limits[dtype], 1e-5), "atol": min(limits[dtype], 1e-6)}
    for mine, others, whole in zip(a["buffers"], b["buffers"], want["buffers"], strict=True):
        assert torch.equal(mine, others)
        torch.testing.assert_close(mine, whole, **close)


def test_under_distributed_data_parallel(ranks: list[dict[Any, Any]]) -> None:
    model = _model()
    model(_batch(torch.float64)[0][:8]).square().mean().backward()
    gradients = [p.grad for p in model.parameters()]
    for mine, others, whole in zip(ranks[0]["ddp"], ranks[1]["ddp"], gradients, strict=True):
        assert torch.equal(mine, others)
        torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-12)


def test_torch_compile_changes_nothing(ranks: list[dict[Any, Any]]) -> None:
    assert ranks[0]["compiled"]
    assert ranks[1]["compiled"]


def test_double_backward_is_refused(ranks: list[dict[Any, Any]]) -> None:
    assert "once_differentiable" in ranks[0]["double backward"]


def test_one_rank_is_an_ordinary_batch_norm() -> None:
    torch.manual_seed(0)
    for norm, shape in ((BatchNormAct1d(3), (4, 3)), (BatchNormAct2d(3), (4, 3, 2, 2))):
        sync = convert_sync_batchnorm(copy.deepcopy(norm))
        x = torch.randn(shape)
        assert torch.equal(sync(x), norm(x))
        assert torch.equal(sync.running_var, norm.running_var)


def test_conversion_keeps_activations_parameters_hooks_and_names() -> None:
    called = []
    model = nn.Sequential(
        nn.BatchNorm2d(3),
        BatchNormAct2d(3, act_layer=nn.SiLU),
        timm().layers.BatchNormAct2d(3, act_layer=nn.GELU),
        nn.SyncBatchNorm(3),
        nn.ReLU(),
    ).eval()
    model[1].register_forward_hook(lambda *_: called.append(1))
    x = torch.randn(2, 3, 4, 4)
    want = model[:3](x)
    parameters, keys = list(model.parameters()), list(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    assert convert_sync_batchnorm(model, "group") is model
    assert all(type(m) is SyncBatchNormAct and m.process_group == "group" for m in model[:4])
    assert [name for name, _ in model.named_modules()] == names
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model[:3](x), want)
    assert called == [1, 1]
    copy.deepcopy(model)


def test_a_subclass_is_left_with_a_warning() -> None:
    class Mine(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model = nn.Sequential(Mine(3))
    with pytest.warns(UserWarning, match="0: .*Mine has a forward of its own"):
        fusedtrain.nn.convert_sync_batchnorm(model)
    assert type(model[0]) is Mine


def test_torchs_conversion_is_refused_where_it_would_drop_the_activation() -> None:
    """pytorch#187298: a batch norm subclass becomes a SyncBatchNorm without what it added."""
    stock = nn.SyncBatchNorm.convert_sync_batchnorm(timm().layers.BatchNormAct2d(3))
    assert type(stock) is nn.SyncBatchNorm  # timm's ReLU is gone
    norm = BatchNormAct2d(3)
    with pytest.raises(RuntimeError, match=r"fusedtrain\.nn\.convert_sync_batchnorm"):
        nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm))
    assert not hasattr(norm, "qconfig")
    norm.qconfig = "of torch.ao"
    assert norm.qconfig == "of torch.ao"
