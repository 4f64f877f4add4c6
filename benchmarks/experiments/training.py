"""A training step of a ResNet in every precision that the experiments compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from benchmarks.experiments.experiment import Settings
from benchmarks.experiments.models import cifar_resnet, random_batch
from fusedtrain.apex import fp16_utils

SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
LOSS_SCALE = 1024.0  # the first; with 65536 an untrained network overflows, and a step is skipped
EPOCH = 50_000  # images of CIFAR-10
PIXELS = 32

Step = Callable[[Tensor, Tensor], Tensor]  # images, labels -> loss
Maker = Callable[[nn.Module, Settings], Step]


def half(settings: Settings) -> torch.dtype:
    """The 16-bit type of the device: float16 on CUDA, bfloat16 on the CPU."""
    return torch.float16 if settings.device == "cuda" else torch.bfloat16


@dataclass(frozen=True)
class Job:
    """A network ("resnet18" or "resnet50"), channels of its first stage, images of a step."""

    network: str
    width: int
    batch: int

    def model(self, settings: Settings) -> nn.Module:
        """The network with the same weights at each call."""
        torch.manual_seed(settings.seed)
        network = cifar_resnet(self.network, width=self.width).to(settings.device)
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network.train()

    def data(self, settings: Settings) -> tuple[Tensor, Tensor]:
        """Random images and labels."""
        images, labels = random_batch(settings, self.batch, PIXELS, more_seed=1)
        return images.contiguous(memory_format=torch.channels_last), labels


def _scaled_step(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, loss_of: Step
) -> Step:
    """The step under a GradScaler, which may be off."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(images, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def full(model: nn.Module, settings: Settings) -> Step:
    """float32."""
    return autocast(torch.bfloat16, scaled=False, enabled=False)(model, settings)


def autocast(
    dtype: torch.dtype, *, scaled: bool, fused: bool = False, enabled: bool = True
) -> Maker:
    """AMP: autocast, and a GradScaler where ``scaled``; with fusedtrain's network, optimizer and
    scaler where ``fused``."""

    def make(model: nn.Module, settings: Settings) -> Step:
        optimizer: torch.optim.Optimizer
        scaler: torch.amp.GradScaler
        if fused:
            fusedtrain.convert(model, verify=False)
            optimizer = fusedtrain.optim.SGD(model.parameters(), **SGD)
            scaler = fusedtrain.amp.GradScaler(settings.device, LOSS_SCALE, enabled=scaled)
        else:
            optimizer = torch.optim.SGD(model.parameters(), **SGD)
            scaler = torch.amp.GradScaler(settings.device, LOSS_SCALE, enabled=scaled)

        def loss_of(images: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast(settings.device, dtype, enabled=enabled):
                return F.cross_entropy(model(images), labels)

        return _scaled_step(optimizer, scaler, loss_of)

    return make


def masters(model: nn.Module, settings: Settings) -> Step:
    """A 16-bit network with float32 batch norms, and float32 masters, in plain torch.

    A scale of the loss is needed in float16 alone; the scale is static, as in the publications.
    """
    dtype = half(settings)
    network = fp16_utils.convert_network(model, dtype)
    parameters, copies = fp16_utils.prep_param_lists(network)
    optimizer = torch.optim.SGD(copies, **SGD)
    scale = LOSS_SCALE if dtype == torch.float16 else 1.0

    def step(images: Tensor, labels: Tensor) -> Tensor:
        network.zero_grad()
        loss = F.cross_entropy(network(images.to(dtype)).float(), labels)
        (loss * scale).backward()
        fp16_utils.model_grads_to_master_grads(parameters, copies)
        if scale != 1:
            torch._foreach_div_([m.grad for m in copies if m.grad is not None], scale)
        optimizer.step()
        fp16_utils.master_params_to_model_params(parameters, copies)
        return loss.detach()

    return step


def fused_masters(model: nn.Module, settings: Settings) -> Step:
    """The same with fusedtrain: the optimizer keeps the masters, the scaler is in its sweeps."""
    dtype = half(settings)
    fusedtrain.convert(model, verify=False)
    network = fp16_utils.convert_network(model, dtype)
    optimizer = fusedtrain.optim.SGD(network.parameters(), master_weights=True, **SGD)
    scaled = dtype == torch.float16
    scaler = fusedtrain.amp.GradScaler(settings.device, LOSS_SCALE, enabled=scaled)
    return _scaled_step(
        optimizer, scaler, lambda x, labels: F.cross_entropy(network(x.to(dtype)).float(), labels)
    )


def fresh_step(job: Job, make: Maker, settings: Settings) -> Callable[[], Any]:
    """A step of a network of its own, on one batch."""
    images, labels = job.data(settings)
    step = make(job.model(settings), settings)
    return lambda: step(images, labels)
