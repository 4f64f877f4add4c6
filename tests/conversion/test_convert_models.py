"""convert and revert of activations in whole models; scripted, traced and compiled ones."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import fusedtrain
from fusedtrain import nn as fused_nn
from helpers.conversion import left_of, output_and_gradients, small_linear
from helpers.models import Parts, build, but_long
from helpers.processes import python

# Model, what is converted in it, and the relative tolerance of float64 gradients: 1.7e-11 is the
# largest difference measured (EfficientNet, AVX512). MobileNetV3 differs by 3.3e-8, all of it from
# Hardsigmoid: torch's backward multiplies by 1/6 rounded to float32, in float64 as well.
MODELS = {
    "torchvision:resnet18": ({"ReLU": 9, "MaxPool2d": 1}, 1e-10),
    "torchvision:resnet50": ({"ReLU": 17, "MaxPool2d": 1}, 1e-10),
    "torchvision:mobilenet_v3_small": (
        {"Hardswish": 19, "ReLU": 5, "Hardsigmoid": 9, "DepthwiseConv2d": 11},
        1e-7,
    ),
    "torchvision:efficientnet_b0": ({"SiLU": 49, "Sigmoid": 16, "DepthwiseConv2d": 16}, 1e-10),
    "timm:efficientnet_b0": ({"SiLU": 49, "Sigmoid": 16, "DepthwiseConv2d": 16}, 1e-10),
    "torchvision:convnext_tiny": ({"GELU": 18, "DepthwiseConv2d": 18}, 1e-10),
    "timm:convnext_atto": ({"GELU": 12, "DepthwiseConv2d": 12}, 1e-10),
    "timm:caformer_s18": ({"StarReLU": 24, "ReLUSquared": 1, "DepthwiseConv2d": 6}, 1e-10),
}

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(Parts):
    """No nn.Sequential: torch.compile skips the frames of torch.nn itself."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.linear(x))
        return y


def difference(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    return float((a - b).norm() / max(float(a.norm()), floor))


# The second of two models with the same activations.
LONG = ("torchvision:efficientnet_b0", "torchvision:convnext_tiny", "torchvision:resnet50")


@pytest.mark.parametrize("name", but_long(MODELS, *LONG))
def test_model_and_revert(name: str) -> None:
    counts, tolerance = MODELS[name]
    stock = build(name, torch.float64)
    fused = copy.deepcopy(stock)
    report = fusedtrain.convert(fused)
    assert Counter(entry.target for entry in report.converted) == {
        f"fusedtrain.nn.{kind}": count for kind, count in counts.items()
    }
    assert not left_of(report)
    assert list(fused.state_dict()) == list(stock.state_dict())
    for key, value in stock.state_dict().items():
        assert torch.equal(fused.state_dict()[key], value), key

    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    expected, expected_gradients = output_and_gradients(stock, x)
    output, gradients = output_and_gradients(fused, x)
    assert difference(expected, output) < 1e-11  # measured: 5.3e-13
    assert gradients.keys() == expected_gradients.keys()
    # Biases before batch norm have no gradient but rounding: 1e-3 of the largest is the floor.
    floor = 1e-3 * max(float(gradient.norm()) for gradient in expected_gradients.values())
    for key, gradient in expected_gradients.items():
        assert difference(gradient, gradients[key], floor) < tolerance, key
    for key, value in stock.state_dict().items():  # the running statistics now
        torch.testing.assert_close(fused.state_dict()[key], value, rtol=1e-10, atol=1e-11)

    assert fusedtrain.revert(fused) == len(report) > 0
    fused.load_state_dict(stock.state_dict())
    again, again_gradients = output_and_gradients(fused, x)
    assert torch.equal(again, expected)
    for key, gradient in expected_gradients.items():
        assert torch.equal(again_gradients[key], gradient), key


@pytest.mark.parametrize("name", but_long(MODELS, *(MODELS.keys() - {"timm:efficientnet_b0"})))
def test_model_float32(name: str) -> None:
    stock = build(name)
    fused = copy.deepcopy(stock)
    # Other rounding in batch norm grows to 3e-2 in ResNet-50: see test_convert_norm_models.py.
    fusedtrain.convert(fused, exclude=[nn.BatchNorm2d])
    x = torch.randn(2, 3, 64, 64)
    expected, expected_gradients = output_and_gradients(stock, x)
    output, gradients = output_and_gradients(fused, x)
    # Largest measured: 8.6e-6 and 3.3e-5 (EfficientNet), over all gradients taken as one vector.
    assert difference(expected, output) < 5e-5
    total = torch.cat([gradient.flatten() for gradient in expected_gradients.values()])
    assert difference(total, torch.cat([g.flatten() for g in gradients.values()])) < 2e-4


@pytest.mark.parametrize("kind", ["Mish", "GELU", "PReLU", "Hardswish"])
def test_compile_of_a_converted_model(kind: str) -> None:
    torch._dynamo.reset()  # others compile nn.Sequential's forward, which has a limit
    model = small_linear(getattr(nn, kind)())
    x = torch.randn(4, 5)
    expected, gradients = output_and_gradients(model, x)
    fusedtrain.convert(model)
    output, fused_gradients = output_and_gradients(model, x)
    torch.testing.assert_close(output, expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(fused_gradients, gradients)


@pytest.mark.parametrize("wrapped", [True, False], ids=["torch.compile", "module.compile"])
def test_compiled_graphs_do_not_go_stale(wrapped: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    model = compiled = Net(linear=nn.Linear(5, 5), act=nn.SiLU())
    if wrapped:
        compiled = torch.compile(model, backend=counter)
    else:
        model.compile(backend=counter)
    x = torch.randn(4, 5)
    expected = compiled(x)
    report = fusedtrain.convert(compiled)
    assert [entry.name for entry in report.converted] == ["_orig_mod.act" if wrapped else "act"]
    assert type(model.act) is fused_nn.SiLU
    assert counter.frame_count == 1
    torch.testing.assert_close(compiled(x), expected)
    assert counter.frame_count == 2
    assert fusedtrain.revert(compiled) == 1
    assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 2  # the first graph serves again


def test_import_leaves_timm_alone() -> None:
    run = python("import sys, fusedtrain; assert not {'timm', 'torchvision'} & sys.modules.keys()")
    assert run.returncode == 0, run.stderr
