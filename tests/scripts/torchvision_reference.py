"""Torchvision's recipe of classification: parameter groups by the class of a norm, warm-up,
averages, mixed precision, accumulated gradients, checkpoints."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import fusedtrain
from helpers.models import torchvision

from .harness import Part, Run, epochs, images


class ExponentialMovingAverage(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model: nn.Module, decay: float) -> None:
        def average(ours: torch.Tensor, new: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            return decay * ours + (1 - decay) * new

        super().__init__(model, avg_fn=average, use_buffers=True)


def set_weight_decay(
    model: nn.Module, weight_decay: float, norm_decay: float
) -> list[dict[str, Any]]:
    norm_classes = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
    params: dict[str, list[nn.Parameter]] = {"other": [], "norm": []}

    def add(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            params["norm" if isinstance(module, norm_classes) else "other"].append(parameter)
        for child in module.children():
            add(child)

    add(model)
    decays = {"other": weight_decay, "norm": norm_decay}
    return [{"params": params[key], "weight_decay": decays[key]} for key in params if params[key]]


def make_model() -> nn.Module:
    module = importlib.import_module(f"{torchvision().__name__}.models.mobilenetv3")
    setting, _ = module._mobilenet_v3_conf("mobilenet_v3_small", width_mult=0.25)
    return module.MobileNetV3(setting[:6], 32, num_classes=10, dropout=0.1)


def main(fused: str = "", resume: bytes = b"") -> Run:
    torch.manual_seed(1)
    model, report = make_model(), None
    if fused:
        report = fusedtrain.convert(model, lambda: torch.randn(4, 3, 32, 32), memory=fused)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    parameters = set_weight_decay(model, 1e-4, 0.0)
    options = {"lr": 2e-3, "momentum": 0.9, "weight_decay": 1e-4, "eps": 0.0316, "alpha": 0.9}
    if fused:
        optimizer = fusedtrain.optim.RMSprop(parameters, **options, max_grad_norm=1.0)
    else:
        optimizer = torch.optim.RMSprop(parameters, **options)
    scaler = (fusedtrain.amp if fused else torch.amp).GradScaler("cpu")
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=1),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3),
        ],
        milestones=[1],
    )
    model_ema = ExponentialMovingAverage(model, decay=0.9)
    dataset = images(24, 32)
    loader = DataLoader(dataset, batch_size=6, shuffle=True)
    accumulation = 2

    def train_one_epoch() -> list[float]:
        model.train()
        losses = []
        for i, (image, target) in enumerate(loader, 1):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(image)
                loss = criterion(output, target)
            scaler.scale(loss / accumulation).backward()
            losses.append(loss.item())
            if i % accumulation:
                continue
            if not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            model_ema.update_parameters(model)
        lr_scheduler.step()
        return losses

    def evaluate(net: nn.Module) -> float:
        net.eval()
        with torch.inference_mode():
            return criterion(net(dataset.tensors[0]), dataset.tensors[1]).item()

    parts = {
        "model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler,
        "model_ema": model_ema, "scaler": scaler,
    }  # fmt: skip
    losses, checkpoint = epochs(
        parts, resume, lambda: [*train_one_epoch(), evaluate(model), evaluate(model_ema)]
    )
    averages = {name.removeprefix("module."): value for name, value in model_ema.named_parameters()}
    part = Part(model, optimizer, dataset.tensors[0][:4], report)
    return Run({"model": part}, losses, train_one_epoch, averages, checkpoint)
