"""A clip of gradients that are multiplied by the loss scale: a warning, and torch's numbers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.amp import GradScaler, host_copy

Clip = Callable[[Any, Any, list[nn.Parameter]], Any]


def scaled(scaler: Any, optimizer: Any, params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(params, 0.5)


def unscaled(scaler: Any, optimizer: Any, params: list[nn.Parameter]) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(params, 0.5)


def by_a_scaled_limit(scaler: Any, optimizer: Any, params: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(params, 1e-3 * scaler.get_scale())


def nothing(scaler: Any, optimizer: Any, params: list[nn.Parameter]) -> None:
    pass


def train(
    scaler: Any, cls: Any, clip: Clip, steps: int = 12, overflows: int = 0, **options: Any
) -> tuple[list[str], list[Tensor]]:
    """The messages, and the parameters after the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    params = list(model.parameters())
    optimizer = cls(params, lr=0.1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6)).square().mean()
            scaler.scale(loss * float("inf") if step < overflows else loss).backward()
            clip(scaler, optimizer, params)
            scaler.step(optimizer)
            scaler.update()
    return [str(one.message) for one in caught], [p.detach() for p in params]


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_clip_left_in_is_told_once(name: str) -> None:
    """And takes the same steps as torch, which says nothing."""
    messages, params = train(GradScaler("cpu"), getattr(fusedtrain.optim, name), scaled)
    (message,) = messages
    assert "clipped to a norm of 0.5 while they were multiplied by the loss scale" in message
    assert "scale, 65536, so that 7.6e-06 is left" in message
    assert "scaler.unscale_(optimizer) before clip_grad_norm_" in message
    silent, expected = train(torch.amp.GradScaler("cpu"), getattr(torch.optim, name), scaled)
    assert not silent
    for one, other in zip(params, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_after_overflows_and_beside_the_optimizers_own_clip() -> None:
    messages, _ = train(GradScaler("cpu"), fusedtrain.optim.SGD, scaled, 16, 5, max_grad_norm=1.0)
    assert len(messages) == 1
    assert "clipped to a norm of 0.5" in messages[0]


@pytest.mark.parametrize("clip", [unscaled, by_a_scaled_limit, nothing])
@pytest.mark.parametrize("limit", [None, 1e-4])
def test_silence(clip: Clip, limit: float | None) -> None:
    scaler = GradScaler("cpu")
    assert not train(scaler, fusedtrain.optim.SGD, clip, max_grad_norm=limit)[0]


def test_silence_with_a_small_scale() -> None:
    """The limit may be meant."""
    assert not train(GradScaler("cpu", 512.0), fusedtrain.optim.SGD, scaled)[0]


def test_silence_with_gradients_that_are_always_the_same() -> None:
    """Their norm times the scale is a likely limit, too, and is none."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    optimizer, scaler = fusedtrain.optim.SGD(params, lr=0.1), GradScaler("cpu", 2.0**15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            optimizer.zero_grad()
            loss: Any = sum(p.sum() for p in params) * 2.0**-16
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert optimizer.grad_norm is not None
    assert float(optimizer.grad_norm) * 2.0**15 == 1.0


def test_nothing_waits_for_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes later if the device is behind; nothing is recorded meanwhile."""
    arrived: list[bool] = []
    numbers = host_copy.HostCopy.numbers

    def late(one: Any) -> Any:
        arrived.append(len(arrived) >= 3)
        return numbers(one) if arrived[-1] else None

    monkeypatch.setattr(host_copy.HostCopy, "numbers", late)
    assert len(train(GradScaler("cpu"), fusedtrain.optim.SGD, scaled)[0]) == 1
    assert arrived == [False, False, False, True]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_scaler_in_use_is_copied(copied: Callable[[Any], Any]) -> None:
    scaler = GradScaler("cpu")
    train(scaler, fusedtrain.optim.SGD, scaled, steps=2)
    assert len(train(copied(scaler), fusedtrain.optim.SGD, scaled)[0]) == 1
