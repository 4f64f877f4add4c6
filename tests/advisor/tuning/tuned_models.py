"""Models and loaders that the tests tune; trials import this file by its path."""

from __future__ import annotations

import time

import torch
from torch import nn


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def build_loader(batch_size, num_workers, pin_memory):
    images = torch.randn(16, 3, 8, 8)
    data = torch.utils.data.TensorDataset(images, torch.arange(16) % 5)
    return torch.utils.data.DataLoader(
        data, batch_size, num_workers=num_workers, pin_memory=pin_memory
    )


class Moody(nn.Module):
    """Has other numbers in channels_last, and raises under autocast."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no autocast for this model")
        factor = 1.0 if x.is_contiguous() else 1.01
        return self.last(factor * self.conv(x).mean((2, 3)))


class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 5)

    def forward(self, x):
        raise RuntimeError("the layer is broken")


def sleep():
    print("going to sleep")
    time.sleep(60)


class Summing(nn.Module):
    """Returns a number for each sample."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.weight * x.sum((1, 2, 3))


def time_of_day():
    return time.time()
