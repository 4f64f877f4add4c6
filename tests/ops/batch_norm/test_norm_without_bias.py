"""Batch norms with a weight and no bias: `bias=False`, which torch's own have from 2.13 on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain import functional as F, nn as fnn

NORMS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "BatchNormAct1d": (fnn.BatchNormAct1d, (5, 4, 3)),
    "BatchNormAct2d": (fnn.BatchNormAct2d, (3, 4, 5, 2)),
    "BatchNormAct3d": (fnn.BatchNormAct3d, (2, 4, 3, 2, 2)),
    "BatchNormAddAct": (fnn.BatchNormAddAct, (3, 4, 5, 2)),
    "SyncBatchNormAct": (fnn.SyncBatchNormAct, (3, 4, 5, 2)),
}
ACTS = {"relu": nn.ReLU, "silu": nn.SiLU, "none": nn.Identity}


def biasless(features: int) -> nn.BatchNorm2d:
    """torch's, of any version."""
    norm = nn.BatchNorm2d(features)
    norm.register_parameter("bias", None)
    randomize(norm)
    return norm


def randomize(norm: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        norm.weight.uniform_(-1.5, 1.5, generator=generator)
        norm.running_mean.normal_(generator=generator)
        norm.running_var.uniform_(0.5, 2, generator=generator)


def same(ours: nn.Module, theirs: nn.Module, x: Tensor, tolerance: float = 1e-10) -> None:
    """Outputs, gradients by name, and buffers after the forward."""
    results = []
    for model in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        wanted = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(y, [leaf, *wanted.values()], torch.cos(y.detach()))
        gradients = dict(zip(["input", *wanted], grads, strict=True))
        results.append({"output": y.detach()} | gradients | dict(model.named_buffers()))
    assert results[0].keys() >= {"output", "input"}
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_numbers(name: str, training: bool, act: str) -> None:
    make, shape = NORMS[name]
    norm = make(4, act_layer=ACTS[act], bias=False, dtype=torch.float64).train(training)
    assert norm.bias is None
    assert list(dict(norm.named_parameters())) == ["weight"]
    randomize(norm)
    generator = torch.Generator().manual_seed(2)
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    results = []
    for fused in (True, False):
        x, r = (t.clone().requires_grad_() for t in leaves)
        twin = copy.deepcopy(norm)
        mean, var, weight = twin.running_mean, twin.running_var, twin.weight
        if fused:
            y = twin(x, r)
        else:
            y = ACTS[act]()(nn.functional.batch_norm(x, mean, var, weight, None, training) + r)
        grads = torch.autograd.grad(y, [x, r, weight], torch.cos(y.detach()))
        results.append((y.detach(), *grads, mean, var))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", NORMS)
def test_the_argument(name: str) -> None:
    make, _ = NORMS[name]
    norm = make(3, bias=False)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(3))
    assert "bias" not in norm.state_dict()
    copy.deepcopy(make(3, bias=False)).load_state_dict(norm.state_dict())
    assert make(3, affine=False, bias=False).weight is None
    assert torch.equal(make(3).bias, torch.zeros(3))
    with pytest.raises(TypeError):
        make(3, bais=False)


def test_conv_bn_act_hands_it_on() -> None:
    assert fnn.ConvBnAct(3, 4, 1, norm_kwargs={"bias": False}).bn.bias is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = biasless(4)
        self.act = nn.SiLU()
        self.last = nn.Conv2d(4, 4, 3, bias=False)
        self.norm2 = biasless(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x)))
        return torch.relu(self.norm2(self.last(y)) + y[:, :, 1:-1, 1:-1])


def block(training: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Block().double().train(training), torch.randn(2, 3, 9, 9, dtype=torch.float64)


@pytest.mark.parametrize("memory", ["store", "recompute"])
@pytest.mark.parametrize("training", [True, False])
def test_convert(training: bool, memory: str) -> None:
    model, x = block(training)
    fused = copy.deepcopy(model)
    assert "norm" in [norm.name for norm in fusedtrain.convert(fused, memory=memory).norms]
    same(fused, copy.deepcopy(model), x)
    fusedtrain.revert(fused)
    assert type(fused.norm) is nn.BatchNorm2d
    assert fused.norm.bias is None


def test_convert_sync_batchnorm() -> None:
    model, x = block(True)
    converted = fnn.convert_sync_batchnorm(copy.deepcopy(model))
    assert isinstance(converted.norm, fnn.SyncBatchNormAct)
    assert converted.norm.bias is None
    same(converted, copy.deepcopy(model), x)


def test_fold() -> None:
    model, x = block(False)
    folded, _ = fusedtrain.fold_conv_bn(model, x)
    torch.testing.assert_close(folded(x), model(x))
    assert folded.last.bias is not None  # the mean has to go somewhere


def test_fold_frozen_norms() -> None:
    model, x = block(False)
    tuned = copy.deepcopy(model)
    assert len(fusedtrain.fold_frozen_norms(tuned)) == 2
    same(tuned, model, x)


def test_drop_redundant_bias() -> None:
    model, x = block(True)
    model.act = nn.Identity()
    lean = copy.deepcopy(model)
    fusedtrain.drop_redundant_bias(lean)
    assert not lean.conv.bias.requires_grad
    torch.testing.assert_close(lean(x), model(x))


def test_in_place_and_functional() -> None:
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    weight = torch.tensor([1.2, -0.7, 0.5, 2.0], dtype=torch.float64)
    results = []
    for overwrite in (True, False):
        leaf, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = F.batch_norm_act(
            leaf * 1, None, None, w, None, True, activation="leaky_relu", overwrite_input=overwrite
        )
        results.append((y.detach(), *torch.autograd.grad(y, (leaf, w), torch.cos(y.detach()))))
    torch.testing.assert_close(*results)


def test_torchscript() -> None:
    norm = fnn.BatchNormAct2d(4, bias=False).eval()
    x = torch.randn(2, 4, 3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.jit.script(norm)(x), norm(x))
