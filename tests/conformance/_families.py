"""Families of timm and torchvision, each as small as its constructor allows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _models import timm, torchvision
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    name: str  # "timm:resnet18"
    size: int = 32
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        """In float32, seeded; no parameter is 0, and no running statistic 0 or 1."""
        library, _, name = self.name.partition(":")
        torch.manual_seed(0)
        if library == "timm":
            model = timm().create_model(name, num_classes=10, **self.options)
        else:
            models = importlib.import_module(torchvision().__name__ + ".models")
            model = (
                _TORCHVISION[name](models, **self.options)
                if name in _TORCHVISION
                else (models.get_model(name, num_classes=10, **self.options))
            )
        _waken(model)
        return model

    def example(self) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randn(2, 3, self.size, self.size, generator=generator)


def _waken(model: nn.Module) -> None:
    """Layer scales of 1e-6 and last norms of 0 would hide a branch, and a bias of 0 its loss."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rpartition(".")[2]
            if parameter.dim() < 2 or last in ("gamma", "layer_scale"):
                mean = 0.0 if last == "bias" else 1.0
                parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)


def _inception(models: Any, **options: Any) -> nn.Module:
    return models.googlenet(num_classes=10, aux_logits=False, init_weights=True, **options)


_TORCHVISION: dict[str, Callable[..., nn.Module]] = {
    "googlenet": _inception,
    "resnet_basic": lambda m, **o: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10, **o),
    "resnext": lambda m, **o: m.ResNet(
        m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, groups=4, width_per_group=16, **o
    ),
    "densenet": lambda m, **o: m.DenseNet(8, (2, 2, 2, 2), 16, num_classes=10, **o),
    "convnext": lambda m, **o: m.ConvNeXt(
        [
            m.convnext.CNBlockConfig(16, 32, 1),
            m.convnext.CNBlockConfig(32, 64, 1),
            m.convnext.CNBlockConfig(64, None, 1),
        ],
        num_classes=10, stochastic_depth_prob=0.5, **o,
    ),
    "mobilenet_v2": lambda m, **o: m.mobilenet_v2(width_mult=0.25, num_classes=10, **o),
    "vgg_bn": lambda m, **o: nn.Sequential(
        m.vgg.make_layers([16, "M", 32, "M", 32, 32, "M"], batch_norm=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ),
}  # fmt: skip


ONE = {"layers": (1, 1, 1, 1)}
SHORT = [
    Family("timm:test_byobnet", 64),
    Family("timm:test_convnext", 64),
]
LONG = []
FAMILIES = [*SHORT, *LONG]
