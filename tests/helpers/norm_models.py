"""Models with batch norm, as narrow and short as their constructors allow."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.models import build, timm, torchvision


def _models(name: str) -> Any:
    return importlib.import_module(f"{torchvision().__name__}.models.{name}")


class UNet(nn.Module):
    """arXiv:1505.04597 with batch norm, of two levels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inc, self.down1 = self.double(3, width), self.double(width, 2 * width)
        self.down2, self.pool = self.double(2 * width, 4 * width), nn.MaxPool2d(2)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.conv1, self.conv2 = self.double(4 * width, 2 * width), self.double(2 * width, width)
        self.outc = nn.Conv2d(width, 2, 1)

    @staticmethod
    def double(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(self.pool(x1))
        x3 = self.down2(self.pool(x2))
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        output: Tensor = self.outc(x)
        return output


def _resnet(block: str, layers: list[int]) -> nn.Module:
    resnet = _models("resnet")
    return resnet.ResNet(getattr(resnet, block), layers, num_classes=10, width_per_group=64)


def _regnet() -> nn.Module:
    regnet = _models("regnet")
    params = regnet.BlockParams([1, 2], [16, 32], [8, 8], [1.0, 1.0], [2, 2], 0.25)
    return regnet.RegNet(params, num_classes=10)


def _timm_regnet() -> nn.Module:
    regnet = timm().models.regnet
    config = regnet.RegNetCfg(depth=4, w0=24, wa=24.0, wm=1.6, group_size=8, se_ratio=0.25)
    return regnet.RegNet(config, num_classes=10)


def _mobilenet_v2() -> nn.Module:
    setting = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 3, 2]]
    return _models("mobilenetv2").MobileNetV2(10, 0.25, setting, dropout=0.0)


def _mobilenet_v3() -> nn.Module:
    mobilenet = _models("mobilenetv3")
    setting, _ = mobilenet._mobilenet_v3_conf("mobilenet_v3_small")
    return mobilenet.MobileNetV3(setting[:6], 64, 10, dropout=0.0)


def _timm_efficientnet() -> nn.Module:
    """Blocks of EfficientNet, and of the second version."""
    timm()
    builder = importlib.import_module("timm.models._efficientnet_builder")
    blocks = builder.decode_arch_def(
        [["ds_r1_k3_s1_e1_c8_se0.25"], ["er_r2_k3_s2_e4_c16"], ["ir_r3_k3_s2_e4_c24_se0.25"]]
    )
    return timm().models.efficientnet.EfficientNet(
        blocks, num_classes=10, num_features=32, stem_size=8, act_layer=nn.SiLU,
        drop_path_rate=0.2,
    )  # fmt: skip


def _efficientnet() -> nn.Module:
    efficientnet = _models("efficientnet")
    plain, fused = efficientnet.MBConvConfig, efficientnet.FusedMBConvConfig
    setting = [fused(2, 3, 1, 8, 8, 1), fused(2, 3, 2, 8, 16, 2), plain(4, 3, 2, 16, 24, 2)]
    return efficientnet.EfficientNet(setting, 0.0, 0.3, num_classes=10, last_channel=64)


def _convnext() -> nn.Module:
    convnext = _models("convnext")
    setting = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    return convnext.ConvNeXt(setting, num_classes=10)


def _vgg() -> nn.Module:
    vgg = _models("vgg")
    features = vgg.make_layers([8, "M", 16, "M", 16, 16], batch_norm=True)
    model = vgg.VGG(features, num_classes=10, dropout=0.0)
    model.classifier = nn.Linear(16 * 49, 10)
    return model


def _googlenet() -> nn.Module:
    return _models("googlenet").GoogLeNet(10, aux_logits=True, init_weights=False, dropout=0.0)


def _inception() -> nn.Module:
    return _models("inception").Inception3(10, aux_logits=False, init_weights=False, dropout=0.0)


def _densenet(*blocks: int, **options: Any) -> nn.Module:
    densenet = _models("densenet")
    return densenet.DenseNet(8, blocks, num_init_features=16, num_classes=10, **options)


def _shufflenet() -> nn.Module:
    return _models("shufflenetv2").ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], num_classes=10)


# Name -> how it is made, and how many batch norms take over what. "": it is part of them already.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "torchvision ResNet, basic": (
        lambda: _resnet("BasicBlock", [1, 2, 1, 1]), {"ReLU": 6, "add + ReLU": 5},
    ),
    "torchvision ResNet, bottleneck": (
        lambda: _resnet("Bottleneck", [1, 1, 1, 1]), {"ReLU": 9, "add + ReLU": 4},
    ),
    "torchvision RegNet": (
        _regnet, {"ReLU": 7, "add + ReLU": 3},
    ),
    "torchvision MobileNetV2": (
        _mobilenet_v2, {"ReLU6": 13, "add": 4},
    ),
    "torchvision MobileNetV3": (
        _mobilenet_v3, {"Hardswish": 8, "ReLU": 5, "add": 3},
    ),
    "torchvision EfficientNetV2": (
        _efficientnet, {"SiLU": 9, "StochasticDepth + add": 3},
    ),
    "torchvision DenseNet": (lambda: _densenet(2, 2), {"ReLU": 11}),
    "torchvision DenseNet, checkpointed": (
        lambda: _densenet(2, memory_efficient=True), {"ReLU": 2},  # 4 under checkpoint stay
    ),
    "torchvision VGG": (_vgg, {"ReLU": 4}),
    "torchvision GoogLeNet": (_googlenet, {"ReLU": 59}),
    "torchvision Inception": (_inception, {"ReLU": 94}),
    "torchvision ShuffleNet": (_shufflenet, {"ReLU": 17}),
    "torchvision ConvNeXt": (_convnext, {}),
    "timm ResNet": (
        lambda: timm().create_model("resnet14t", num_classes=10, drop_path_rate=0.2),
        {"ReLU": 11, "add + ReLU": 1, "DropPath + add + ReLU": 3},
    ),
    "timm EfficientNet": (
        _timm_efficientnet, {"": 11, "add": 1, "DropPath + add": 3},
    ),
    "timm EfficientNetV2": (lambda: build("timm:tf_efficientnetv2_b0"), {"": 39, "add": 15}),
    "timm RegNet": (_timm_regnet, {"": 9, "add + ReLU": 4}),
    "timm MobileNetV3": (lambda: build("timm:mobilenetv3_small_100"), {"": 23, "add": 6}),
    "timm DenseNet": (
        lambda: timm().models.densenet.DenseNet(8, (2, 2), num_classes=10), {"": 11},
    ),
    "U-Net": (UNet, {"ReLU": 10}),
}  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchvision: how weights will be made one day
        return MODELS[name][0]().to(dtype).train()
