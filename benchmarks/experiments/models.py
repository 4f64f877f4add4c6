"""Networks of the experiments, their random images, and the groups of their parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.experiment import Settings
from benchmarks.harness.steps import import_module


def random_batch(
    settings: Settings, batch: int, pixels: int, more_seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Images and labels of 10 classes: time and memory do not depend on what the images show."""
    generator = torch.Generator().manual_seed(settings.seed + more_seed)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    return images.to(settings.device), labels.to(settings.device)


def decayed_groups(params: Iterable[Tensor], decay: float) -> list[dict[str, Any]]:
    """Norms and biases without weight decay, as in the papers on LARS and LAMB."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for param in params:
        groups[param.ndim <= 1]["params"].append(param)
    return groups


def cifar_resnet(name: str, classes: int = 10, width: int = 64) -> nn.Module:
    """A ResNet whose first convolution is 3 x 3 without stride, and without the first pooling.

    Args:
        name: "resnet18" or "resnet50".
        classes: outputs.
        width: channels of the first stage; 64 is the published width.
    """
    resnet = import_module("torchvision.models.resnet")
    blocks: dict[str, tuple[Any, list[int]]] = {
        "resnet18": (resnet.BasicBlock, [2, 2, 2, 2]),
        "resnet50": (resnet.Bottleneck, [3, 4, 6, 3]),
    }
    block, depths = blocks[name]

    class CifarResNet(resnet.ResNet):  # type: ignore[name-defined]
        def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Module:
            if planes == 64:
                self.inplanes = width  # the first stage follows the stem
            return super()._make_layer(block, planes * width // 64, *args, **kwargs)

    model: Any = CifarResNet(block, depths, num_classes=classes)
    model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.bn1 = nn.BatchNorm2d(width)
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(model.inplanes, classes)
    network: nn.Module = model
    return network
