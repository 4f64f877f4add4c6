"""Helpers of tests of whole optimizers: one of each, its parameters and gradients, comparisons."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.optimizers import NAMES, OF_TORCH as TORCH_NAMES

MENDED = "torch has mended this defect: keep only the half of the test that is about fusedtrain"
SHAPES = [(3, 5), (7,), (), (2, 0), (4, 3, 2, 2), (33,)]
ALL = pytest.mark.parametrize("name", NAMES)
OF_TORCH = pytest.mark.parametrize("name", TORCH_NAMES)


def parameters(dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def shaped(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return parameters(dtype, shapes)


def give_gradients(params: Iterable[Tensor], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def in_groups(params: list[Any]) -> list[dict[str, Any]]:
    """Two groups, of which the second has a rate and a decay of its own."""
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.03, "weight_decay": 0.07}]


def steps(optimizer: torch.optim.Optimizer, params: Any, seeds: Iterable[int]) -> None:
    """Steps whose gradients, and which parameters have none, follow from the seed."""
    for seed in seeds:
        give_gradients(params, seed)
        for i in [(), (0,), (5, 2), (1,)][seed % 4]:
            params[i].grad = None
        optimizer.step()


def skipped_step(optimizer: Any, params: Iterable[Tensor]) -> None:
    for p in params:
        p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    del optimizer.found_inf


def step(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], seed: int) -> None:
    give_gradients(params, seed)
    optimizer.step()


def assert_close(a: Any, b: Any, limit: float = 32) -> None:
    """Tensors, or lists of them, within `limit` eps of max(|b|, 1)."""
    if not isinstance(a, Tensor):
        for x, y in zip(a, b, strict=True):
            assert_close(x, y, limit)
        return
    a, b = a.detach(), b.detach()
    assert a.dtype == b.dtype
    assert a.shape == b.shape
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


def memory(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all that a step may write."""
    copied = {}
    for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        copied[f"{i}"] = p.detach().clone()
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                copied[f"{i} {key}"] = torch.as_tensor(value).detach().clone()
    return copied


def bits(tensor: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(-1).view(sizes[tensor.element_size()])


def assert_same_bits(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for key, value in before.items():
        assert value.dtype == after[key].dtype, key
        assert torch.equal(bits(value), bits(after[key])), key


def copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def saved_and_loaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def started(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """With its scale in being."""
    scaler.scale(torch.zeros(()))
    return scaler
