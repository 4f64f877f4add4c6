"""A model of timm with what timm has for its training: the optimizer's factory, the loss scaler,
averages, a learning rate by step, mixed images."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.data import DataLoader

import fusedtrain
from helpers.models import timm

from .harness import Part, Run, images


def main(fused: str = "", name: str = "test_efficientnet") -> Run:
    package: Any = timm()
    utils, scheduling, data, loss, optim = (
        importlib.import_module(f"timm.{part}")
        for part in ("utils", "scheduler", "data", "loss", "optim")
    )
    utils.random_seed(42)
    model = package.create_model(name, num_classes=10, drop_rate=0.1, drop_path_rate=0.2)
    model, report = model.to(memory_format=torch.channels_last), None
    if fused:

        def example() -> torch.Tensor:
            return torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)

        report = fusedtrain.convert(model, example, memory=fused)
        fusedtrain.integrations.timm.register()
    decay = 0.9
    arguments = {"opt": "fusedtrain-adamw", "ema_decay": decay} if fused else {"opt": "adamw"}
    optimizer = optim.create_optimizer_v2(model, lr=1e-3, weight_decay=0.05, **arguments)
    model_ema = None if fused else utils.ModelEmaV3(model, decay=decay)
    loss_scaler = utils.NativeScaler(device="cpu")
    mixup = data.Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=10)
    train_loss_fn = loss.SoftTargetCrossEntropy()
    lr_scheduler = scheduling.CosineLRScheduler(optimizer, t_initial=20, t_in_epochs=False)
    dataset = images(16, 32)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)

    def train_one_epoch(epoch: int) -> list[float]:
        utils.random_seed(epoch)
        model.train()
        losses = []
        for number, (input, target) in enumerate(loader):
            input, target = mixup(input, target)
            input = input.to(target.dtype, memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16):
                value = train_loss_fn(model(input), target)
            loss_scaler(
                value, optimizer, clip_grad=1.0, clip_mode="norm", parameters=model.parameters()
            )
            optimizer.zero_grad()
            if model_ema is not None:
                model_ema.update(model)
            lr_scheduler.step_update(num_updates=epoch * len(loader) + number + 1)
            losses.append(value.item())
        return losses

    losses = [*train_one_epoch(0), *train_one_epoch(1)]
    if fused:
        averages = dict(optimizer.averaged_parameters())
        named = {name: averages[parameter] for name, parameter in model.named_parameters()}
    else:
        named = dict(model_ema.module.named_parameters())
    part = Part(model, optimizer, dataset.tensors[0][:4], report)
    return Run({"model": part}, losses, lambda: train_one_epoch(2), named)
