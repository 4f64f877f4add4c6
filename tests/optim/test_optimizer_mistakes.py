"""What users of the optimizers get wrong, or do seldom: told where it is done, nothing moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain import optim


def parameter() -> Tensor:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return p


@pytest.mark.parametrize(
    ("make", "exception", "words"),
    [
        (lambda p: optim.SGD([p], max_grad_norm="x"), TypeError, "max_grad_norm"),
        (lambda p: optim.SGD([p], max_grad_norm=0), ValueError, "max_grad_norm"),
        (lambda p: optim.SGD([p], ema_decay=1.0), ValueError, "ema_decay"),
        (lambda p: optim.SGD([p], agc=-1.0), ValueError, "agc"),
        (lambda p: optim.SGD([p], agc_eps=None), TypeError, "agc_eps"),
        (lambda p: optim.SGD([p], master_weights="x"), TypeError, "master_weights"),
        (lambda p: optim.SGD([p], gradient_writeback="x"), ValueError, "gradient_writeback"),
        (lambda p: optim.SGD([p], state_dtype=torch.float16), ValueError, "state_dtype"),
        (lambda p: optim.SGD([p], unknown=1), TypeError, "unknown"),
        (lambda p: optim.SGD([p], max_grad_norm=1.0, agc=0.1), ValueError, "together"),
        (lambda p: optim.SGD([{"params": [p], "agc": 0.1}]), ValueError, "whole optimizer"),
        (lambda p: optim.Adam([p], betas=(0.9, 0.99, 0.5)).step(), ValueError, "unpack"),
        (lambda p: fusedtrain.amp.GradScaler("cpu", min_scale=-1.0), ValueError, "min_scale=-1"),
        (lambda p: fusedtrain.amp.GradScaler("cpu", hysteresis=0), ValueError, "hysteresis"),
        (
            lambda p: optim.AppliedStepScheduler(optim.SGD([p]), lambda o: None),
            TypeError, "make must return",
        ),
        (
            lambda p: optim.AppliedStepScheduler(
                optim.SGD([p]), torch.optim.lr_scheduler.ReduceLROnPlateau
            ),
            TypeError, "metric",
        ),
    ],
)  # fmt: skip
def test_wrong_options(make: Callable[[Tensor], Any], exception: type, words: str) -> None:
    p = parameter()
    with pytest.raises(exception, match=words):
        make(p)
    assert torch.equal(p, torch.ones(3))


def test_options_set_later_are_checked_and_used() -> None:
    p = parameter()
    optimizer = optim.SGD([p], lr=1.0)
    with pytest.raises(ValueError, match="gradient_writeback"):
        optimizer.gradient_writeback = "bogus"
    optimizer.gradient_writeback = "zero"
    optimizer.max_grad_norm = 1e-3
    optimizer.step()
    assert (p.grad == 0).all()
    torch.testing.assert_close((1 - p).norm().item(), 1e-3, rtol=1e-3, atol=0)
    with pytest.raises(ValueError, match="whole optimizer"):
        optimizer.add_param_group({"params": [parameter()], "ema_decay": 0.9})


def test_any_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        p = nn.Parameter(torch.ones(3, dtype=torch.float32))
        p.grad = torch.ones_like(p)
        optimizer = optim.LAMB([p], lr=0.5, ema_decay=0.9)
        optimizer.step()
        assert p.dtype == torch.float32
        assert (p < 1).all()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", ["zero", "unscaled"])
def test_expanded_gradient_cannot_be_written(mode: str) -> None:
    p = parameter()
    p.grad = torch.ones(1).expand(3)
    with pytest.raises(RuntimeError, match="gradient_writeback"):
        optim.SGD([p], lr=1.0, gradient_writeback=mode, max_grad_norm=1e9).step()
    assert torch.equal(p, torch.ones(3))
    optim.SGD([p], lr=1.0, gradient_writeback="unscaled").step()  # there is nothing to write
    assert torch.equal(p, torch.zeros(3))


def test_negated_gradients() -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.view_as_complex(torch.ones(3, 2)).conj().imag
    assert p.grad.is_neg()
    optim.SGD([p], lr=1.0).step()
    assert torch.equal(p, torch.ones(3))
    fusedtrain.zero_grad([p], set_to_none=False)
    assert (p.grad == 0).all()


def test_first_scale_keeps_the_bounds() -> None:
    scaler = fusedtrain.amp.GradScaler("cpu", max_scale=1024.0)
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == 1024


def test_scaler_hands_over_arguments() -> None:
    p = parameter()
    scaler = fusedtrain.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(TypeError, match="foo"):
        scaler.step(optim.SGD([p]), foo=1)


def test_scheduler_whose_groups_change() -> None:
    p = parameter()
    optimizer = optim.SGD([p], lr=1.0)
    scheduler = optim.AppliedStepScheduler(
        optimizer, lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1)
    )
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="replaced by a number"):
        scheduler.step()
    optimizer.add_param_group({"params": [parameter()]})
    with pytest.raises(RuntimeError, match="other groups"):
        scheduler.step()


def test_meta_parameters() -> None:
    p = nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones_like(p)
    for optimizer in (optim.AdamW([p]), optim.SGD([p], momentum=0.9)):
        optimizer.step()
        assert optimizer.state_dict()["state"][0]
