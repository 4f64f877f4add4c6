"""Wrappers of an optimizer: what is called on them, and what a GradScaler sets on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from helpers.optimizer_steps import assert_close, give_gradients, parameters
from helpers.optimizers import make


class HandsOn:
    """Takes what it lacks from the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Steps(HandsOn):
    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)


class Imitates(Steps):
    """An instance of the optimizer's class, too, as the wrappers of Lightning and Fabric are."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.__class__ = type("Wrapped", (type(self), type(optimizer)), {})  # type: ignore[assignment]


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize(
    ("wrapper", "kind"),
    [
        (HandsOn, fusedtrain.amp.GradScaler),
        (Steps, fusedtrain.amp.GradScaler),
        (Imitates, fusedtrain.amp.GradScaler),
        (Imitates, torch.amp.GradScaler),
    ],
)
def test_a_scaler_that_steps_a_wrapper(wrapper: Any, kind: Any, unscale: bool) -> None:
    """The steps are those of the optimizer alone: scaled gradients and infinities had gone in."""
    runs = []
    for wraps in (False, True):
        params = parameters()
        optimizer: Any = make("SGD", params, momentum=0.9)
        if wraps:
            optimizer = wrapper(optimizer)
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        for seed in range(4):
            give_gradients(params, seed, scaler.get_scale())
            if seed == 2:
                params[0].grad.view(-1)[0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
        runs.append(params)
    assert_close(*runs)


def test_methods_of_a_wrapper_are_the_optimizers() -> None:
    """Options, averages and gradient release of a wrapper had passed the optimizer by."""
    runs = []
    for wraps in (False, True):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.3)
        optimizer: Any = make("AdamW", list(model.parameters()))
        called = Imitates(optimizer) if wraps else optimizer
        called.ema_decay = 0.5
        called.release_gradients(model)
        for _ in range(3):
            model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
            called.step()
        assert optimizer.ema_decay == 0.5
        assert int(optimizer.applied_steps) == 3
        with called.swap_averages():
            runs.append([p.detach().clone() for p in model.parameters()])
            with pytest.raises(RuntimeError, match="swap_averages"):
                optimizer.step()
    assert_close(*runs)
