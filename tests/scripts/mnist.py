"""Digits by a small convolutional network: functions in the forward, Adadelta, StepLR."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import fusedtrain

from .harness import Part, Run, images


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


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> list[float]:
    model.train()
    losses = []
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    total = 0.0
    with torch.no_grad():
        for data, target in loader:
            total += F.nll_loss(model(data), target, reduction="sum").item()
    return total / len(loader.dataset)


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    dataset = images(32, 12, channels=1)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model, report = Net(), None
    if fused:
        report = fusedtrain.convert(model, lambda: torch.randn(4, 1, 12, 12), memory=fused)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)  # fusedtrain has no Adadelta
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for _ in range(2):
        losses += train(model, loader, optimizer)
        losses.append(test(model, loader))
        scheduler.step()
    part = Part(model, optimizer, dataset.tensors[0][:4], report)
    return Run({"model": part}, losses, lambda: train(model, loader, optimizer))
