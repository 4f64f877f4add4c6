"""Arguments and group keys of timm 1.0.31, which is newer than the timm of the other tests."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import fusedtrain
from helpers.models import timm
from helpers.optimizer_steps import alike, assert_close, give_gradients, parameters, step
from helpers.optimizers import class_of

CORRECTED = ["SGDW", "NAdamW", "Lion", "RMSpropTF", "LAMB", "NovoGrad"]


def corrected(name: str, **options: Any) -> tuple[Any, Any]:
    params = parameters()
    kind: Any = class_of(name)
    if name in ("RMSpropTF", "LAMB", "NovoGrad"):
        options["decoupled_decay"] = True
    return params, kind(params, weight_decay=0.1, corrected_weight_decay=True, **options)


@pytest.mark.parametrize("corrects", [False, True])
def test_decoupled_decay_of_novograd(corrects: bool) -> None:
    """timm 1.0.31 shrinks the weights before a step that knows no decay."""
    timm()
    p, q = parameters(torch.float32), parameters(torch.float32)  # as timm's second moments
    ours = fusedtrain.optim.NovoGrad(
        p, lr=0.1, weight_decay=0.3, decoupled_decay=True, corrected_weight_decay=corrects
    )
    theirs = importlib.import_module("timm.optim").NvNovoGrad(q, lr=0.1)
    for seed, lr in enumerate((0.1, 0.05, 0.02)):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = lr
        step(ours, p, seed)
        give_gradients(q, seed)
        with torch.no_grad():
            for x in q:
                x.mul_(1 - (lr**2 / 0.1 if corrects else lr) * 0.3)
        theirs.step()
        assert_close(p, q)


@pytest.mark.parametrize("name", CORRECTED)
def test_the_first_rate_of_a_checkpoint(name: str) -> None:
    """timm 1.0.31 saves it in the groups, and goes on with it whatever the rate was since."""
    (p, first), (q, later) = corrected(name, lr=0.2), corrected(name, lr=0.05)
    saved = later.state_dict()
    saved["param_groups"][0]["max_lr_snapshot"] = 0.2
    later.load_state_dict(saved)
    first.param_groups[0]["lr"] = 0.05
    for seed in range(2):
        step(first, p, seed)
        step(later, q, seed)
    assert alike(p, q)
    assert later.state_dict()["param_groups"][0]["max_lr_snapshot"] == 0.2


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", CORRECTED)
def test_a_first_rate_of_0(name: str, lr: Any) -> None:
    with pytest.raises(ValueError, match="make the optimizer with the largest one, got 0"):
        corrected(name, lr=lr)


def test_clipping_of_updates_is_refused() -> None:
    """Not passed over: a step without it would be another one."""
    p = parameters()
    optimizer = fusedtrain.optim.NAdamW(p)
    step(optimizer, p, 0)
    saved, before = optimizer.state_dict(), optimizer.state_dict()
    saved["param_groups"][0]["clipping_threshold"] = 1.0
    with pytest.raises(ValueError, match="clipping_threshold"):
        optimizer.load_state_dict(saved)
    assert alike(optimizer.state_dict(), before)
    saved["param_groups"][0]["clipping_threshold"] = None
    optimizer.load_state_dict(saved)
    step(optimizer, p, 1)
    groups = [{"params": p, "clipping_threshold": 1.0}]
    with pytest.raises(ValueError, match="clipping_threshold"):
        step(fusedtrain.optim.NAdamW(groups), p, 0)


@pytest.mark.parametrize("name", ["LAMB", "LARS", "RMSpropTF"])
def test_foreach_is_accepted(name: str) -> None:
    kind: Any = class_of(name)
    made, plain = kind(parameters(), foreach=True), kind(parameters())
    assert made.state_dict() == plain.state_dict()
