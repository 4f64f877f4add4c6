"""convert and revert of batch norms in whole models: results, state_dict and modules stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.conversion import assert_same, image, kinds, left_of, results, snapshot
from helpers.models import but_long
from helpers.norm_models import MODELS, make

pytestmark = pytest.mark.usefixtures("one_thread")


# Many norms in blocks that other models have, too.
LONG = (
    "torchvision Inception", "timm EfficientNetV2", "timm MobileNetV3", "torchvision GoogLeNet",
    "torchvision VGG", "torchvision ResNet, bottleneck", "timm DenseNet", "torchvision MobileNetV2",
)  # fmt: skip


@pytest.mark.parametrize("name", but_long(MODELS, *LONG))
def test_model(name: str) -> None:
    stock = make(name, torch.float64)
    fused, expected_kinds = copy.deepcopy(stock), MODELS[name][1]
    keys, names = list(stock.state_dict()), [n for n, _ in stock.named_modules()]
    before = snapshot(fused)
    report = fusedtrain.convert(fused)
    assert kinds(report) == expected_kinds
    assert "checkpointed" in name or not left_of(report)
    assert list(fused.state_dict()) == keys
    assert [n for n, _ in fused.named_modules()] == names
    assert all(isinstance(b, type(a)) for a, b in zip(stock.modules(), fused.modules())
               if type(a).__module__.startswith("torch."))  # fmt: skip

    x = image(80 if "Inception" in name else 64, dtype=torch.float64)
    for tolerance in (1e-7, 1e-5):  # after a step, rounding of the weights has grown
        actual, expected = results(fused, x), results(stock, x)
        if "checkpointed" in name:
            # torch's batch norm moves its statistics twice, ours once.
            for key in dict(stock.named_buffers()):
                assert actual.pop(key) is not expected.pop(key)
        assert_same(actual, expected, tolerance)
        for model in (fused, stock):
            torch.optim.SGD(model.parameters(), lr=1e-6).step()
    fused.load_state_dict(stock.state_dict())
    with torch.no_grad():
        assert_same({"": fused.eval()(x)}, {"": stock.eval()(x)}, 1e-7)

    assert len(fusedtrain.convert(fused)) == 0
    fused.train()
    assert fusedtrain.revert(fused) == len(report) > 0
    assert snapshot(fused) == before
    stock.train()
    fused.load_state_dict(stock.state_dict())
    assert_same(results(fused, x), results(stock, x), 0.0)


PROVEN = ["torchvision ResNet, bottleneck", "torchvision DenseNet, checkpointed",
          "torchvision EfficientNetV2", "timm ResNet", "U-Net"]  # fmt: skip


@pytest.mark.parametrize("name", but_long(PROVEN, "torchvision DenseNet, checkpointed"))
def test_model_with_proof(name: str) -> None:
    model = make(name)
    x = image(64)
    state = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    random_state = torch.get_rng_state()
    report = fusedtrain.convert(model, x)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert kinds(report) == MODELS[name][1]
    assert not left_of(report)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    proof = report.proof
    assert proof is not None
    assert 0 < proof.output_error < 1e-3
    assert proof.output_noise > 0
    assert proof.saved_after <= proof.saved_before
    assert {layer.name for layer in proof.layers} >= {norm.name for norm in report.norms}
    assert f"{proof.saved_before / 1e6:.3g} -> {proof.saved_after / 1e6:.3g} MB" in str(report)


def test_saved_bytes_of_a_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 4, 1))
    report = fusedtrain.convert(model, image(16))
    unit = 2 * 4 * 16 * 16 * 4
    assert report.proof is not None
    vectors = 2 * 4 * 4
    # Eager: the input, the norm's output (for SiLU); the activation's output is the next layer's.
    assert [layer[:3] for layer in report.proof.layers] == [
        ("1", 2 * unit + vectors, unit + vectors)
    ]
    assert report.proof.saved_before - report.proof.saved_after == unit
