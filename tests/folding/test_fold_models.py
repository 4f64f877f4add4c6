"""fold_conv_bn of whole models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.folding import assert_folds, difference, waken
from helpers.models import build, but_long, timm

pytestmark = pytest.mark.usefixtures("one_thread")
# Norms folded, norms left (they do not follow a convolution), activations fused.
MODELS = {
    "torchvision:resnet18": (20, 0, 17),
    "torchvision:resnet50": (53, 0, 49),
    "torchvision:mobilenet_v3_large": (46, 0, 47),
    "torchvision:efficientnet_b0": (49, 0, 65),
    "torchvision:densenet121": (59, 62, 59),
    "torchvision:regnet_y_400mf": (53, 0, 65),
    "torchvision:shufflenet_v2_x1_0": (56, 0, 37),
    "torchvision:googlenet": (59, 0, 59),
    "torchvision:inception_v3": (96, 0, 96),
    "timm:resnet18": (20, 0, 17),
    "timm:resnet50": (53, 0, 49),
    "timm:mobilenetv3_large_100": (46, 0, 58),
    "timm:efficientnet_b0": (49, 0, 74),
    "timm:tf_efficientnet_b0": (49, 0, 69),
    "timm:densenet121": (59, 62, 59),
    "timm:regnety_004": (53, 0, 49),
}


LONG = (
    "torchvision:resnet50", "torchvision:efficientnet_b0", "torchvision:regnet_y_400mf",
    "torchvision:googlenet", "torchvision:inception_v3", "timm:resnet18", "timm:resnet50",
    "timm:mobilenetv3_large_100", "timm:densenet121",
)  # fmt: skip


@pytest.mark.parametrize("name", but_long(MODELS, *LONG))
@pytest.mark.filterwarnings("ignore:The default weight initialization")
def test_models(name: str) -> None:
    """1e-5 of the largest output; 2e-6 was the most that was seen (Inception v3)."""
    model = waken(build(name))
    size = 128 if "inception" in name else 64
    x = torch.randn(2, 3, size, size)
    expected = model(x)
    folded, report = fusedtrain.fold_conv_bn(model, x, tolerance=1e-5)
    assert (len(report), len(report.left), len(report.fused)) == MODELS[name]
    assert torch.equal(model(x), expected)
    names = {k.rpartition(".")[0] for k in model.state_dict()}
    assert {k.rpartition(".")[0] for k in folded.state_dict()} <= names
    lasting = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert difference(folded(lasting), expected) < 1e-5


def test_norm_with_activation_becomes_the_activation() -> None:
    timm()
    from timm.layers import BatchNormAct2d

    for norm, kind in ((BatchNormAct2d(4, act_layer=nn.SiLU), nn.SiLU),
                       (BatchNormAct2d(4, apply_act=False), nn.Identity)):  # fmt: skip
        model = waken(nn.Sequential(nn.Conv2d(4, 4, 1), norm)).double()
        folded = assert_folds(model, torch.randn(2, 4, 5, 5).double())
        assert type(folded[1]) is kind
