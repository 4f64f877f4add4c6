"""An EfficientNet of small images, written by hand: swish as a formula, stochastic depth as a
function that writes over its argument, first norms that are built and never called."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fusedtrain

from .harness import Part, Run, epoch, images

# Expansion, width, blocks, kernel, stride of the stages.
STAGES = [
    (1, 4, 1, 3, 1),
    (6, 6, 2, 3, 2),
    (6, 8, 2, 5, 2),
    (6, 10, 3, 3, 2),
    (6, 12, 3, 5, 1),
    (6, 14, 4, 5, 2),
    (6, 16, 1, 3, 1),
]


def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def drop_connect(x: Tensor, drop_ratio: float) -> Tensor:
    keep_ratio = 1.0 - drop_ratio
    mask = torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
    mask.bernoulli_(keep_ratio)
    x.div_(keep_ratio)
    x.mul_(mask)
    return x


class SE(nn.Module):
    def __init__(self, in_channels: int, se_channels: int) -> None:
        super().__init__()
        self.se1 = nn.Conv2d(in_channels, se_channels, kernel_size=1, bias=True)
        self.se2 = nn.Conv2d(se_channels, in_channels, kernel_size=1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        out = F.adaptive_avg_pool2d(x, (1, 1))
        out = swish(self.se1(out))
        out = self.se2(out).sigmoid()
        out = x * out
        return out


class Block(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, expand: int, drop_rate: float
    ) -> None:
        super().__init__()
        self.drop_rate, self.expand_ratio = drop_rate, expand
        channels = expand * inputs
        self.conv1 = nn.Conv2d(inputs, channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(
            channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False
        )
        self.bn2 = nn.BatchNorm2d(channels)
        self.se = SE(channels, max(1, inputs // 4))
        self.conv3 = nn.Conv2d(channels, outputs, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.has_skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.expand_ratio == 1 else swish(self.bn1(self.conv1(x)))
        out = swish(self.bn2(self.conv2(out)))
        out = self.se(out)
        out = self.bn3(self.conv3(out))
        if self.has_skip:
            if self.training and self.drop_rate > 0:
                out = drop_connect(out, self.drop_rate)
            out = out + x
        return out


class BlockWithDropPath(Block):
    """The same with stochastic depth as a module, as docs/convert.md asks for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.drop_path = fusedtrain.nn.DropPath(self.drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.expand_ratio == 1 else swish(self.bn1(self.conv1(x)))
        out = swish(self.bn2(self.conv2(out)))
        out = self.se(out)
        out = self.bn3(self.conv3(out))
        if self.has_skip:
            out = self.drop_path(out) + x
        return out


class EfficientNet(nn.Module):
    def __init__(
        self, stages: int = len(STAGES), num_classes: int = 10, block: type[Block] = Block
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        layers: list[nn.Module] = []
        inputs, total = 8, sum(stage[2] for stage in STAGES)
        for expand, outputs, count, kernel, first_stride in STAGES[:stages]:
            for stride in [first_stride] + [1] * (count - 1):
                drop_rate = 0.2 * len(layers) / total
                layers.append(block(inputs, outputs, kernel, stride, expand, drop_rate))
                inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.linear = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = swish(self.bn1(self.conv1(x)))
        out = self.layers(out)
        out = F.adaptive_avg_pool2d(out, 1)
        out = out.view(out.size(0), -1)
        if self.training:
            out = F.dropout(out, p=0.2)
        return self.linear(out)


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    dataset = images(16, 32)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    net, report = EfficientNet(), None
    if fused:
        report = fusedtrain.convert(net, lambda: torch.randn(8, 3, 32, 32), memory=fused)
    criterion = nn.CrossEntropyLoss()
    SGD = fusedtrain.optim.SGD if fused else torch.optim.SGD
    optimizer = SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

    def train() -> list[float]:
        return epoch(net, loader, optimizer, criterion)

    losses = train()
    scheduler.step()
    return Run({"net": Part(net, optimizer, dataset.tensors[0][:8], report)}, losses, train)
