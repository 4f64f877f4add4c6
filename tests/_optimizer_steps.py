"""What tests of whole optimizers share: one of each, its parameters and gradients, comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain

NAMES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")
SHAPES = [(3, 5), (7,), (), (2, 0), (4, 3, 2, 2), (33,)]
EACH: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "SGDW": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "caution": True},
    "LARS": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "trust_coeff": 0.1},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "NAdamW": {"lr": 0.1, "caution": True, "corrected_weight_decay": True},
    "LAMB": {"lr": 0.1, "caution": True, "max_grad_norm": None},
    "Lion": {"lr": 0.1, "weight_decay": 0.1, "caution": True},
    "RMSprop": {"lr": 0.1, "momentum": 0.9, "centered": True},
    "RMSpropTF": {"lr": 0.1, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
    "NovoGrad": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
}
ALL = pytest.mark.parametrize("name", EACH)
OF_TORCH = pytest.mark.parametrize("name", NAMES)


def parameters(dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_gradients(params: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def step(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], seed: int) -> None:
    give_gradients(params, seed)
    optimizer.step()


def make(name: str, params: Iterable[Any], **options: Any) -> fusedtrain.optim.FusedOptimizer:
    optimizer = getattr(fusedtrain.optim, name)(params, **{**EACH[name], **options})
    assert isinstance(optimizer, fusedtrain.optim.FusedOptimizer)
    return optimizer


def assert_close(a: Any, b: Any, limit: float = 32) -> None:
    """Tensors, or lists of them, within `limit` eps of max(|b|, 1)."""
    if not isinstance(a, Tensor):
        for x, y in zip(a, b, strict=True):
            assert_close(x, y, limit)
        return
    a, b = a.detach(), b.detach()
    assert a.dtype == b.dtype
    assert ((a - b).abs() <= limit * torch.finfo(a.dtype).eps * b.abs().clamp_min(1)).all()


def same(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def started(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """With its scale in being."""
    scaler.scale(torch.zeros(()))
    return scaler
