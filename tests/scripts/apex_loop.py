"""A script in Apex's calls: `amp.initialize`, `scale_loss`, clipped masters, FusedSGD."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fusedtrain
from fusedtrain.apex import amp
from fusedtrain.apex.optimizers import FusedSGD

from .harness import Part, Run, images


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


def make_model() -> nn.Sequential:
    stem = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(*stem, Residual(16), nn.MaxPool2d(2), Residual(16), *head)


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    model, report = make_model(), None
    dataset = images(24, 16)
    if fused:
        report = fusedtrain.convert(model, dataset.tensors[0][:4], memory=fused)
    optimizer = FusedSGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    loader = DataLoader(dataset, batch_size=6, shuffle=True)
    criterion = nn.CrossEntropyLoss()

    def train() -> list[float]:
        model.train()
        losses = []
        for input, target in loader:
            loss = criterion(model(input), target)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    losses = train()
    amp.initialize(model, enabled=False)  # what runs afterwards in this process has no autocast
    return Run({"model": Part(model, optimizer, dataset.tensors[0][:4], report)}, losses, train)
