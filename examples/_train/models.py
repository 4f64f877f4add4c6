"""Stock networks, most of them torchvision's, with stems adapted to images of 28 or 32 pixels."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

MODELS = ("resnet18", "resnet50", "efficientnet_b0", "mobilenetv3", "convnext", "darknet19")

# Names that torchvision registers fake kernels for while it is imported.
_TORCHVISION_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []


def import_torchvision() -> ModuleType:
    """Import torchvision, also beside a torch build that cannot load its C++ operators.

    The PyPI wheel's operators need a CUDA torch. Its models and data sets are pure Python, but
    importing them registers fake kernels for two of those operators, which fails while the
    names are unknown; declaring the names first is enough.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    _declared.append(library)  # the names vanish with the object
    for schema in _TORCHVISION_OPS:
        library.define(schema)
    return importlib.import_module("torchvision")


def build_model(name: str, classes: int, width: int = 64) -> nn.Module:
    """One of ``MODELS``, randomly initialised; ``width`` 64 is the published size."""
    if name in ("resnet18", "resnet50"):
        return _resnet(name, classes, width)
    if name == "darknet19":
        return _darknet19(classes, width)
    models = import_torchvision().models
    if name == "convnext":
        return _convnext(models.convnext, classes, width)
    # The published momentum of 0.01 takes hundreds of steps to give running statistics that
    # evaluation can use; dropout would be noise in the comparison of loss curves.
    options: dict[str, Any] = {"norm_layer": nn.BatchNorm2d, "dropout": 0.0, "num_classes": classes}
    if name == "mobilenetv3":
        model = models.mobilenet_v3_large(width_mult=width / 64, **options)
    elif name == "efficientnet_b0":
        model = models.efficientnet.EfficientNet(
            _efficientnet_b0_blocks(width / 64), stochastic_depth_prob=0.0, **options
        )
    else:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(MODELS)}")
    return _keep_resolution(model, convolutions=2)


def _resnet(name: str, classes: int, width: int) -> nn.Module:
    resnet = import_torchvision().models.resnet

    class CifarResNet(resnet.ResNet):  # type: ignore[name-defined]
        def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Module:
            if planes == 64:
                self.inplanes = width  # the first layer follows the stem
            return super()._make_layer(block, planes * width // 64, *args, **kwargs)

    block, depths = {
        "resnet18": (resnet.BasicBlock, [2, 2, 2, 2]),
        "resnet50": (resnet.Bottleneck, [3, 4, 6, 3]),
    }[name]
    model: Any = CifarResNet(block, depths, num_classes=classes)
    model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.bn1 = nn.BatchNorm2d(width)
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(model.inplanes, classes)
    return model


class DarknetStage(nn.Sequential):
    """Convolutions of 3 x 3 and, between them, of 1 x 1, each with batch norm and LeakyReLU."""

    def __init__(self, inputs: int, sizes: Sequence[int], pooled: bool) -> None:
        layers: list[nn.Module] = [nn.MaxPool2d(2)] if pooled else []
        for i, outputs in enumerate(sizes):
            kernel = 1 if i % 2 else 3
            layers.append(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.LeakyReLU(0.1, inplace=True)]
            inputs = outputs
        super().__init__(*layers)


def _darknet19(classes: int, width: int) -> nn.Module:
    """The network of YOLOv2 (arXiv:1612.08242, table 6), without its first two poolings."""
    stages, inputs = [], 3
    for base, count in ((32, 1), (64, 1), (128, 3), (256, 3), (512, 5), (1024, 5)):
        outputs = max(base * width // 64, 2)
        sizes = [outputs // 2 if i % 2 else outputs for i in range(count)]
        stages.append(DarknetStage(inputs, sizes, pooled=base >= 256))
        inputs = outputs
    head = (nn.Conv2d(inputs, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*stages, *head)


def _convnext(convnext: Any, classes: int, width: int) -> nn.Module:
    """A ConvNeXt of the size that timm calls atto: 40 to 320 channels, patches of 2 x 2 pixels."""
    sizes = [width * factor // 64 for factor in (40, 80, 160, 320)]
    depths = (2, 2, 6, 2)
    blocks = [
        convnext.CNBlockConfig(size, following, depth)
        for size, following, depth in zip(sizes, [*sizes[1:], None], depths)
    ]
    # A layer scale of 1e-6 is for deep networks and long training.
    model: nn.Module = convnext.ConvNeXt(
        blocks, stochastic_depth_prob=0.0, layer_scale=0.1, num_classes=classes
    )
    stem: Any = model.features[0]  # type: ignore[index]
    stem[0] = nn.Conv2d(3, sizes[0], 2, stride=2)
    return model


def _efficientnet_b0_blocks(width_mult: float) -> list[Any]:
    config = import_torchvision().models.efficientnet.MBConvConfig
    # expand ratio, kernel, stride, input channels, output channels, layers
    rows = (
        (1, 3, 1, 32, 16, 1),
        (6, 3, 2, 16, 24, 2),
        (6, 5, 2, 24, 40, 2),
        (6, 3, 2, 40, 80, 3),
        (6, 5, 1, 80, 112, 3),
        (6, 5, 2, 112, 192, 4),
        (6, 3, 1, 192, 320, 1),
    )
    return [config(*row, width_mult=width_mult, depth_mult=1.0) for row in rows]


def _keep_resolution(model: nn.Module, convolutions: int) -> nn.Module:
    """Set the first strided convolutions to stride 1: 32 px end as 4x4 instead of 1x1."""
    strided = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    for convolution in strided[:convolutions]:
        convolution.stride = (1, 1)
    return model
