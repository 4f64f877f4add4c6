"""Torchvision's ResNet with validation, checkpoints of whole runs and `--resume`."""

from __future__ import annotations

import importlib

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import fusedtrain
from helpers.models import torchvision

from .harness import Part, Run, epoch, epochs, images, validate


def make_model() -> nn.Module:
    resnet = importlib.import_module(f"{torchvision().__name__}.models.resnet")
    model = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1])
    model.layer4, model.fc = nn.Identity(), nn.Linear(256, 10)  # for small images
    return model


def main(fused: str = "", resume: bytes = b"", distributed: bool = False) -> Run:
    torch.manual_seed(1)
    model, report = make_model(), None
    if fused:
        report = fusedtrain.convert(model, lambda: torch.randn(4, 3, 32, 32), memory=fused)
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    SGD = fusedtrain.optim.SGD if fused else torch.optim.SGD
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    dataset = images(12, 32)
    loader = DataLoader(dataset, batch_size=6, shuffle=True)

    def train() -> list[float]:
        return epoch(model, loader, optimizer, criterion)

    def run() -> list[float]:
        losses = [*train(), validate(model, loader, criterion)]
        scheduler.step()
        return losses

    parts = {"state_dict": model, "optimizer": optimizer, "scheduler": scheduler}
    losses, checkpoint = epochs(parts, resume, run)
    part = Part(model, optimizer, dataset.tensors[0][:4], report)
    return Run({"model": part}, losses, train, checkpoint=checkpoint)
