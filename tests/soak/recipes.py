"""A small network to train, with everything that a resumed run could forget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, StepLR

import fusedtrain


@dataclass(frozen=True)
class Recipe:
    """A way to train: the optimizer, the dtypes, the memory, the schedule."""

    name: str
    optimizer: Callable[..., Any]
    options: dict[str, Any]
    memory: str  # of fusedtrain.convert
    autocast: torch.dtype
    scaler: dict[str, Any]
    applied_steps_schedule: bool = False  # AppliedStepScheduler, or torch's own
    dtype: torch.dtype = torch.float32  # of the parameters
    accumulation: int = 1
    share: float = 0.02  # of the steps, whose gradients get an inf or a NaN

    def schedule(self, optimizer: Any) -> Any:
        if self.applied_steps_schedule:
            return fusedtrain.optim.AppliedStepScheduler(optimizer, _step_schedule)
        return CosineAnnealingWarmRestarts(optimizer, T_0=40)


def _step_schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, step_size=30, gamma=0.97)


# The scale grows until float16 gradients overflow by themselves; bfloat16's would grow forever.
_GROWS = {"init_scale": 2.0**12, "growth_interval": 8}
_BOUNDED = {"init_scale": 2.0**8, "growth_interval": 15, "hysteresis": 2, "max_scale": 2.0**20}
_BOTH = {"max_grad_norm": 1.0, "ema_decay": 0.99}

RECIPES = (
    Recipe(
        "AdamW, float16, recompute, rate by applied steps",
        fusedtrain.optim.AdamW, {"lr": 2e-3, "weight_decay": 0.02, **_BOTH},
        "recompute", torch.float16, _GROWS, applied_steps_schedule=True, accumulation=2,
    ),
    Recipe(
        "SGD, bfloat16 parameters, stochastic rounding, store",
        fusedtrain.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "stochastic_rounding": True, **_BOTH},
        "store", torch.bfloat16, _BOUNDED, dtype=torch.bfloat16,
    ),
    Recipe(
        "LAMB, bfloat16, hysteresis, store",
        fusedtrain.optim.LAMB, {"lr": 5e-3, **_BOTH},
        "store", torch.bfloat16, _BOUNDED, applied_steps_schedule=True, accumulation=2,
    ),
    Recipe(
        "Lion, float16 parameters, master weights, recompute",
        fusedtrain.optim.Lion,
        {"lr": 3e-4, "weight_decay": 0.1, "master_weights": True, "state_dtype": torch.float32,
         **_BOTH},
        "recompute", torch.float16, _GROWS, dtype=torch.float16,
    ),
    Recipe(
        "AdamW, bfloat16, 8-bit derivatives, gradients written back",
        fusedtrain.optim.AdamW,
        {"lr": 2e-3, "amsgrad": True, "gradient_writeback": "unscaled", **_BOTH},
        "q8", torch.bfloat16, _BOUNDED, accumulation=2,
    ),
    Recipe(
        "NAdamW, bfloat16 parameters, 8-bit states, split master weights, store",
        fusedtrain.optim.NAdamW,
        {"lr": 2e-3, "state_dtype": "q8", "master_weights": "split24",
         "stochastic_rounding": True, **_BOTH},
        "store", torch.bfloat16, _BOUNDED, dtype=torch.bfloat16,
    ),
)  # fmt: skip


class Gate(nn.Module):
    """Squeeze-and-excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, 4, 1)
        self.act = nn.SiLU()
        self.expand = nn.Conv2d(4, channels, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))))


class Block(nn.Module):
    """A residual block: depthwise convolution, gate, projection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.act1 = nn.SiLU()
        self.gate = Gate(channels)
        self.project = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.act2 = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(self.act1(self.norm1(self.depthwise(x))))
        return self.act2(self.norm2(self.project(y)) + x)


def network(recipe: Recipe, width: int = 16) -> nn.Module:
    """Converted, in training mode; its weights follow torch's seed."""
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(width),
        nn.SiLU(),
        Block(width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        fusedtrain.nn.Dropout(0.2),
        nn.LazyLinear(32),
        fusedtrain.nn.BiasActDropout(32, "gelu", p=0.1),
        nn.Linear(32, 10),
    )
    model(torch.zeros(2, 1, 16, 16))
    for module in model.modules():  # norms keep float32, as torch's mixed precision has them
        if not isinstance(module, nn.BatchNorm2d):
            for p in module.parameters(recurse=False):
                p.data = p.data.to(recipe.dtype)
    fusedtrain.convert(model, memory=recipe.memory)
    return model
