"""A small ResNet for images of 16 to 32 pixels (He et al. 2015, arXiv:1512.03385, section 4.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.experiments.experiment import Settings


class Block(nn.Module):
    """Two convolutions with batch norm, and the sum with the input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def small_resnet(settings: Settings, width: int, depth: int = 1, classes: int = 10) -> nn.Module:
    """``6 depth + 2`` layers, the first of ``width`` channels, on the device of the settings."""
    torch.manual_seed(settings.seed)
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    inputs = width
    for stage in range(3):
        for number in range(depth):
            outputs = width << stage
            layers.append(Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    model: nn.Module = nn.Sequential(*layers, *head).to(settings.device)
    return model
