"""Torchvision's ResNet with meters, checkpoints of whole runs and `--resume`."""

from __future__ import annotations

import importlib
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import fusedtrain
from helpers.models import torchvision

from .harness import Part, Run, images

EPOCHS = 2


class AverageMeter:
    def __init__(self, name: str) -> None:
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value: float, n: int = 1) -> None:
        self.sum += value * n
        self.count += n

    @property
    def avg(self) -> float:
        return self.sum / self.count


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).sum(0) * (100.0 / target.size(0)) for k in topk]


def train(
    loader: DataLoader, model: nn.Module, criterion: nn.Module, optimizer: Any
) -> list[float]:
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    model.train()
    each = []
    for input, target in loader:
        output = model(input)
        loss = criterion(output, target)
        (acc1,) = accuracy(output, target)
        losses.update(loss.item(), input.size(0))
        top1.update(acc1.item(), input.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        each.append(loss.item())
    return [*each, losses.avg]


def validate(loader: DataLoader, model: nn.Module, criterion: nn.Module) -> float:
    losses = AverageMeter("Loss")
    model.eval()
    with torch.no_grad():
        for input, target in loader:
            losses.update(criterion(model(input), target).item(), input.size(0))
    return losses.avg


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
    start_epoch = 0
    if resume:
        checkpoint = torch.load(io.BytesIO(resume))
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    dataset = images(12, 32)
    loader = DataLoader(dataset, batch_size=6, shuffle=True)
    losses: list[float] = []
    saved = b""
    for epoch in range(start_epoch, EPOCHS):
        torch.manual_seed(epoch)  # a resumed run sees the same batches
        losses += train(loader, model, criterion, optimizer)
        losses.append(validate(loader, model, criterion))
        scheduler.step()
        if epoch == 0:
            file = io.BytesIO()
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            torch.save(state, file)
            saved = file.getvalue()
    part = Part(model, optimizer, dataset.tensors[0][:4], report)
    return Run(
        {"model": part},
        losses,
        lambda: train(loader, model, criterion, optimizer),
        checkpoint=saved,
    )
