"""Digits by a small convolutional network: functions in the forward, Adadelta, StepLR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import fusedtrain

from .harness import Part, Run, epoch, images, validate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(128, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.fc1(x)
        x = F.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    dataset = images(32, 12, channels=1)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model, report = Net(), None
    if fused:
        report = fusedtrain.convert(model, lambda: torch.randn(4, 1, 12, 12), memory=fused)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)  # fusedtrain has no Adadelta
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

    def train() -> list[float]:
        return epoch(model, loader, optimizer, F.nll_loss)

    losses = []
    for _ in range(2):
        losses += [*train(), validate(model, loader, F.nll_loss)]
        scheduler.step()
    part = Part(model, optimizer, dataset.tensors[0][:4], report)
    return Run({"model": part}, losses, train)
