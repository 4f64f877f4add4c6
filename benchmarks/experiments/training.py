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
from fusedtrain.apex.fp16_utils import (
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)

LR, MOMENTUM, DECAY = 0.01, 0.9, 5e-4
LOSS_SCALE = 1024.0  # the first; with 65536 an untrained network overflows, and a step is skipped
EPOCH = 50_000  # images of CIFAR-10
PIXELS = 32


def half(settings: Settings) -> torch.dtype:
    """The 16-bit type of the device: float16 on CUDA, bfloat16 on the CPU."""
    return torch.float16 if settings.device == "cuda" else torch.bfloat16


@dataclass(frozen=True)
class Job:
    """A network, and the batch that is trained.

    Args:
        network: "resnet18" or "resnet50".
        width: channels of the first stage.
        batch: images of a step.
    """

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


Step = Callable[[Tensor, Tensor], Tensor]  # images, labels -> loss
Maker = Callable[[nn.Module, Settings], Step]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LR, momentum=MOMENTUM, weight_decay=DECAY)


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
    scaler = torch.amp.GradScaler(settings.device, enabled=False)
    return _scaled_step(
        _sgd(model.parameters()), scaler, lambda x, labels: F.cross_entropy(model(x), labels)
    )


def _fused(
    parameters: Any, settings: Settings, scaled: bool, **options: Any
) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler]:
    """fusedtrain's optimizer and scaler."""
    return (
        fusedtrain.optim.SGD(parameters, LR, momentum=MOMENTUM, weight_decay=DECAY, **options),
        fusedtrain.amp.GradScaler(settings.device, init_scale=LOSS_SCALE, enabled=scaled),
    )


def autocast(dtype: torch.dtype, *, scaled: bool, fused: bool = False) -> Maker:
    """AMP: autocast, and a GradScaler where ``scaled``; with fusedtrain's network, optimizer and
    scaler where ``fused``."""

    def make(model: nn.Module, settings: Settings) -> Step:
        if fused:
            fusedtrain.convert(model, verify=False)
            optimizer, scaler = _fused(model.parameters(), settings, scaled)
        else:
            optimizer = _sgd(model.parameters())
            scaler = torch.amp.GradScaler(settings.device, LOSS_SCALE, enabled=scaled)

        def loss_of(images: Tensor, labels: Tensor) -> Tensor:
            with torch.autocast(settings.device, dtype):
                return F.cross_entropy(model(images), labels)

        return _scaled_step(optimizer, scaler, loss_of)

    return make


def masters(model: nn.Module, settings: Settings) -> Step:
    """A 16-bit network with float32 batch norms, and float32 masters, in plain torch.

    A scale of the loss is needed in float16 alone; the scale is static, as in the publications.
    """
    dtype = half(settings)
    network = convert_network(model, dtype)
    parameters, copies = prep_param_lists(network)
    optimizer = _sgd(copies)
    scale = LOSS_SCALE if dtype == torch.float16 else 1.0

    def step(images: Tensor, labels: Tensor) -> Tensor:
        network.zero_grad()
        loss = F.cross_entropy(network(images.to(dtype)).float(), labels)
        (loss * scale).backward()
        model_grads_to_master_grads(parameters, copies)
        if scale != 1:
            for master in copies:
                assert master.grad is not None
                master.grad.div_(scale)
        optimizer.step()
        master_params_to_model_params(parameters, copies)
        return loss.detach()

    return step


def fused_masters(model: nn.Module, settings: Settings) -> Step:
    """The same with fusedtrain: the optimizer keeps the masters, the scaler is in its sweeps."""
    dtype = half(settings)
    fusedtrain.convert(model, verify=False)
    network = convert_network(model, dtype)
    optimizer, scaler = _fused(
        network.parameters(), settings, dtype == torch.float16, master_weights=True
    )
    return _scaled_step(
        optimizer, scaler, lambda x, labels: F.cross_entropy(network(x.to(dtype)).float(), labels)
    )


def whole_training(job: Job, make: Maker, settings: Settings) -> Callable[[], object]:
    """Two steps from nothing: all that training needs is allocated within this call."""

    def train() -> object:
        images, labels = job.data(settings)
        model = job.model(settings)
        step = make(model, settings)
        for _ in range(2):
            step(images, labels)
        return model, step

    return train


def fresh_step(job: Job, make: Maker, settings: Settings) -> Callable[[], object]:
    """A step of a network of its own, on one batch."""
    images, labels = job.data(settings)
    step = make(job.model(settings), settings)
    return lambda: step(images, labels)
