"""The shapes that benchmarks take from real networks are those of torchvision, the ops of norms
those of timm."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from benchmarks.harness.apex import norm_places
from benchmarks.harness.shapes import MODELS, NORM_NETWORKS, distinct_norms, norms, shapes
from helpers.models import timm, torchvision


def of_torchvision(model: str) -> nn.Module:
    models = importlib.import_module(torchvision().__name__ + ".models")
    with torch.device("meta"):
        network: nn.Module = getattr(models, model)()
    return network


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_torchvision(model: str) -> None:
    assert shapes(model) == [tuple(p.shape) for p in of_torchvision(model).parameters()]


@pytest.mark.parametrize("model", NORM_NETWORKS)
def test_batch_norms_are_found_among_parameters(model: str) -> None:
    network = of_torchvision(model)
    batch_norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    ids = {id(p) for norm in batch_norms for p in norm.parameters()}
    assert norm_places(shapes(model)) == [id(p) in ids for p in network.parameters()]


def _seen(network: nn.Module) -> list[tuple[tuple[int, ...], nn.Module]]:
    """Shape of the input of each batch norm, in the order of the calls."""
    inputs_of: list[tuple[tuple[int, ...], nn.Module]] = []
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(
                lambda module, inputs, _: inputs_of.append((tuple(inputs[0].shape[1:]), module))
            )
    network.train()(torch.empty(8, 3, 224, 224, device="meta"))
    return inputs_of


@pytest.mark.parametrize("model", NORM_NETWORKS)
def test_norms_are_those_of_torchvision(model: str) -> None:
    seen = [shape for shape, _ in _seen(of_torchvision(model))]
    assert [layer[1:] for layer in norms(model)] == seen


def test_norms_and_activations_are_those_of_timm() -> None:
    with torch.device("meta"):
        network = timm().create_model("efficientnet_b0")
    acts = {"SiLU": "bn_silu", "Identity": "bn"}
    seen = [(acts[type(norm.act).__name__], *shape) for shape, norm in _seen(network)]
    assert [(layer.op.removesuffix("_add"), *layer[1:]) for layer in norms("efficientnet_b0")] == (
        seen
    )
    skips = sum(getattr(block, "has_skip", False) for block in network.modules())
    assert sum(layer.op == "bn_add" for layer in norms("efficientnet_b0")) == skips


def test_norms_of_resnet50() -> None:
    seen = norms("resnet50")
    assert len(seen) == 53
    # 16 blocks add, 4 of them after a convolution and norm of the shortcut.
    assert sum(layer.op == "bn_add_relu" for layer in seen) == 16
    assert sum(layer.op == "bn" for layer in seen) == 4
    assert len(distinct_norms("resnet50")) == len(set(seen))
