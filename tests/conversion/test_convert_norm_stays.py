"""All that can be done with a model still works after batch norms are converted."""

from __future__ import annotations

import copy
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain import nn as fused_nn
from fusedtrain._graph.modules import has_own_forward
from helpers.conversion import (
    Block,
    Calls,
    assert_same,
    compared,
    image,
    kinds,
    results,
    small,
    snapshot,
)
from helpers.models import model_of, timm

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("converted", [False, True])
def test_block_survives(converted: bool) -> None:
    """deepcopy, pickle, torch.save, torch.compile, torch.export, TorchScript, torch.fx, DDP."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(nn.SiLU()), Block()).double(), image(channels=4).double()
    stock = copy.deepcopy(model)
    if converted:
        fusedtrain.convert(model)
    expected = results(copy.deepcopy(stock), x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert_same(results(duplicate, x), expected, 1e-12)
        for block in duplicate:
            if converted:
                assert block.forward.__self__ is block
        duplicate.load_state_dict(stock.state_dict())
        assert bool(fusedtrain.revert(duplicate)) == converted
        assert_same(results(duplicate, x), expected, 0.0)
    assert_same(results(copy.deepcopy(model), x), expected, 1e-12)

    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    assert_same({"": compiled(x)}, {"": expected["output 0"]}, 1e-12)
    stock.eval()
    model.eval()
    with torch.no_grad():
        evaluated = {"": stock(x)}
        assert_same({"": torch.export.export(model, (x,)).module()(x)}, evaluated, 1e-12)
        assert_same({"": torch.jit.script(model)(x)}, evaluated, 1e-12)
        assert_same({"": torch.jit.trace(model, x)(x)}, evaluated, 1e-12)
        assert_same({"": torch.fx.symbolic_trace(model)(x)}, evaluated, 1e-12)


def test_compiled_graphs_follow_the_mode_of_training() -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(Block(drop=fused_nn.DropPath(0.5))), image(channels=4)
    fusedtrain.convert(model)
    stock = copy.deepcopy(model)
    fusedtrain.revert(stock)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mode in (True, False, True):
        model.train(mode)
        stock.train(mode)
        torch.manual_seed(0)
        actual = compiled(x)
        torch.manual_seed(0)
        assert_same({"": actual}, {"": stock(x)}, 1e-5)


def _distributed_rank(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=1)
    model, x = nn.Sequential(Block(), Block()), image(channels=4)
    stock = copy.deepcopy(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert len(fusedtrain.convert(wrapped).norms) == 4
    actual = {key.replace("module.", ""): t for key, t in results(wrapped, x).items()}
    assert_same(actual, results(stock, x), 1e-4)
    assert fusedtrain.revert(wrapped)
    # Where the group was destroyed in the process of the tests, gloo's thread and the destructor of
    # the wrapper waited for each other, once in 20 runs.
    os._exit(0)


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        _distributed_rank, (str(tmp_path),), 1, start_method="spawn"
    )


def test_checkpoint_moves_statistics_once() -> None:
    x = image(channels=4)
    model = model_of(lambda self, x: checkpoint(self.block, x, use_reentrant=False), block=Block())
    report = fusedtrain.convert(model, x)
    assert len(report.norms) == 2
    assert int(model.block.bn1.num_batches_tracked) == 0
    model(x).sum().backward()
    assert int(model.block.bn1.num_batches_tracked) == 1


def test_optimizer_and_parameters_stay() -> None:
    model, x = nn.Sequential(Block()), image(channels=4)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    gradients = [p.grad for p in parameters]
    fusedtrain.convert(model, x)
    assert all(a is b for a, b in zip(model.parameters(), parameters))
    assert all(p.grad is g for p, g in zip(parameters, gradients))
    optimizer.step()


def test_twice_and_back_and_again() -> None:
    model = nn.Sequential(Block(), small(), Calls(lambda _, y: F.relu(y)))
    original = snapshot(model)
    assert fusedtrain.revert(model) == 0
    first = fusedtrain.convert(model)
    converted = [(name, kind, attributes.keys()) for name, kind, attributes in snapshot(model)]
    second = fusedtrain.convert(model)
    assert len(second) == 0
    assert second.already == len(first.norms) + len(first.converted)
    assert [(n, k, a.keys()) for n, k, a in snapshot(model)] == converted
    for _ in range(2):
        assert fusedtrain.revert(model) == len(first)
        assert fusedtrain.revert(model) == 0
        assert snapshot(model) == original
        assert len(fusedtrain.convert(model)) == len(first)


def test_a_user_s_own_fused_norm() -> None:
    model = Block()
    model.bn2 = fused_nn.BatchNormAct2d(4, apply_act=False)
    model.bn1 = fused_nn.BatchNormAct2d(4, apply_act=False)
    x = image(channels=4)
    assert kinds(compared(model, x, x)) == {"ReLU": 1, "add + ReLU": 1}
    assert fusedtrain.convert(nn.Sequential(fused_nn.BatchNormAct2d(4))).already == 1


def test_timm_norm() -> None:
    norm = timm().layers.BatchNormAct2d(4, act_layer=nn.SiLU)
    drop = timm().layers.BatchNormAct2d(4, drop_layer=lambda: nn.Dropout(0.0))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, drop)
    report = compared(model, image(), image(), 1e-4)
    assert [entry.source for entry in report.norms] == ["timm.layers.norm_act.BatchNormAct2d"] * 2
    fusedtrain.convert(model)
    assert norm.act is model[1]._modules["act"]


def test_synchronised_norms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.SiLU()).eval()
    report = compared(model, image(), image(), modes=[False])
    assert report.norms[0].target == "fusedtrain.functional.batch_norm_act"

    model = nn.Sequential(Block(), small(nn.SiLU()))
    model[1][0] = nn.Conv2d(4, 4, 3)
    stock, x = copy.deepcopy(model), image(channels=4)
    fused_nn.convert_sync_batchnorm(model[1])
    fusedtrain.convert(model)
    fused_nn.convert_sync_batchnorm(model[0])
    assert type(model[0].bn2) is type(model[1][1]) is fused_nn.SyncBatchNormAct
    assert_same(results(model, x), results(stock, x), 1e-4)  # no process group: one rank


def test_a_shared_activation_that_also_works_elsewhere() -> None:
    class Mixed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.act(x * 1.5))

    model, x = Mixed(nn.SiLU()), image(channels=4)
    assert kinds(compared(model, x, x, 1e-4)) == {"SiLU": 1, "add + SiLU": 1}
    fusedtrain.convert(model)
    assert not has_own_forward(model.act)
