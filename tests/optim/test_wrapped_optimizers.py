"""Wrappers, hooks and subclasses of an optimizer, between a GradScaler and the step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fusedtrain
from helpers.optimizer_steps import ALL, assert_close, give_gradients, parameters
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


def scaled_steps(scaler: Any, optimizer: Any, params: Any, unscale: bool) -> Iterator[None]:
    """Four steps, of which the third meets an infinity; yields before each update of the scale."""
    scaler.scale(torch.ones(()))
    for seed in range(4):
        give_gradients(params, seed, scaler.get_scale())
        if seed == 2:
            params[0].grad.view(-1)[0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        yield
        scaler.update()


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
        for _ in scaled_steps(scaler, optimizer, params, unscale):
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.step(optimizer)
        assert scaler.get_scale() == 4.0
        runs.append(params)
    assert_close(*runs)


def clips(optimizer: Any) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(params, 0.1)


def with_a_step_that_clips(optimizer: Any) -> None:
    """As detectron2 gives an optimizer the class of one that clips."""

    def clipped_step(self: Any, closure: Any = None) -> Any:
        clips(self)
        return super(type(self), self).step(closure)

    optimizer.__class__ = type("Clips", (type(optimizer),), {"step": clipped_step})


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("how", ["hook", "hook of all", "subclass", "set"])
def test_who_runs_before_the_step_sees_unscaled_gradients(
    how: str, kind: Any, unscale: bool
) -> None:
    """As with torch's plain optimizers; clipping had been of scaled gradients."""
    runs = []
    for sgd in (torch.optim.SGD, fusedtrain.optim.SGD):
        params = parameters()
        optimizer: Any = sgd(params, lr=0.1, momentum=0.9)
        hooks = []
        if how == "subclass":
            with_a_step_that_clips(optimizer)
        elif how == "hook":
            optimizer.register_step_pre_hook(lambda o, *_: clips(o))
        elif how == "set":
            plain = optimizer.step
            clipped = functools.wraps(plain)(
                lambda o=optimizer, plain=plain: (clips(o), plain())[1]
            )
            optimizer.step = clipped
        else:
            hooks = [register_optimizer_step_pre_hook(lambda o, *_: clips(o))]
        for _ in scaled_steps(kind("cpu", init_scale=8.0), optimizer, params, unscale):
            pass
        for hook in hooks:
            hook.remove()
        if sgd is fusedtrain.optim.SGD and kind is fusedtrain.amp.GradScaler:
            assert (int(optimizer.skipped_steps), int(optimizer.applied_steps)) == (1, 3)
            assert float(optimizer.grad_norm) == pytest.approx(0.1, rel=1e-5)
        runs.append(params)
    assert_close(*runs)


@ALL
def test_nobody_watches_an_optimizer_with_a_scheduler(name: str) -> None:
    """Or every step under a scaler would take one more pass."""
    optimizer: Any = make(name, parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer._step_supports_amp_scaling


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
