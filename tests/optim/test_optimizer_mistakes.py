"""Mistakes and rare calls of the optimizers' users: told where they are made, nothing moved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fusedtrain
from fusedtrain import optim
from fusedtrain.optim import _makers
from helpers.optimizers import NAMES


def parameter() -> Tensor:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return p


@pytest.mark.parametrize(
    ("make", "exception", "words"),
    [
        (lambda p: optim.SGD([{"params": [p], "agc": 0.1}]), ValueError, "whole optimizer"),
        (lambda p: optim.Adam([p], betas=(0.9, 0.99, 0.5)).step(), ValueError, "two numbers"),
        (lambda p: fusedtrain.amp.GradScaler("cpu", min_scale=-1.0), ValueError, "min_scale=-1"),
        (lambda p: fusedtrain.amp.GradScaler("cpu", hysteresis=0), ValueError, "hysteresis"),
        (
            lambda p: fusedtrain.amp.GradScaler("cpu", min_scale=2.0, max_scale=1.0),
            ValueError, "min_scale",
        ),
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


@pytest.mark.parametrize(
    ("name", "keyword", "words"),
    [
        ("AdamW", "weight_decy", r"did you mean 'weight_decay'\?$"),
        ("AdamW", "master_weight", r"did you mean 'master_weights'\?$"),
        ("AdamW", "ema", r"did you mean 'ema_decay'\?$"),
        ("SGD", "grad_clip", r"did you mean 'max_grad_norm'\?$"),
        ("LAMB", "max_norm", r"did you mean 'max_grad_norm'\?$"),
        ("SGD", "capturable", "leave it out, since a CUDA graph can capture any step$"),
        ("Lion", "fused", "leave it out, since the step is fused in any case$"),
        ("NAdamW", "differentiable", "leave it out.*torch.optim has it$"),
        ("SGD", "ro", "it takes params, lr, momentum, .*, state_dtype, .*stochastic_rounding$"),
    ],
)
def test_unknown_keywords(name: str, keyword: str, words: str) -> None:
    """Python's message names the wrong keyword alone. The advice comes before other complaints."""
    message = rf"^{name}.__init__\(\) got an unexpected keyword argument '{keyword}': {words}"
    with pytest.raises(TypeError, match=message):
        getattr(optim, name)([parameter()], lr=-1.0, **{keyword: True})


def test_numbers_of_numpy() -> None:
    """A grid of settings may have numpy.float32, which is no float."""
    p = parameter()
    optimizer = optim.SGD([p], lr=1.0, max_grad_norm=numpy.float32(0.5))
    optimizer.ema_decay = numpy.float32(0.5)
    optimizer.step()
    assert torch.allclose(1 - p.detach(), torch.tensor(0.5 / 3**0.5))


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


@pytest.mark.parametrize("name", ["Adam", "AdamW", "LAMB", "Lion", "NAdamW", "NovoGrad"])
def test_betas_that_are_not_two_numbers(name: str) -> None:
    """torch: "'float' object is not subscriptable", or at the step."""
    for betas, exception in ((0.9, TypeError), (("a", 0.9), TypeError), ((0.9,), ValueError)):
        with pytest.raises(exception, match=r"betas: expected two numbers, such as \(0\.9, 0\.999"):
            getattr(optim, name)([parameter()], betas=betas)


def test_gradients_that_no_step_looked_at_are_not_reported() -> None:
    """An empty list meant that all was well, also where nothing had been looked at."""
    p = parameter()
    p.grad[1] = float("nan")
    optimizer = optim.SGD([p], lr=1.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"did not look at the gradients.*max_grad_norm"):
            optimizer.nonfinite_gradients()
        optimizer.step()
    optimizer.max_grad_norm = float("inf")
    optimizer.step()
    ((which, count),) = optimizer.nonfinite_gradients()
    assert which is p
    assert count == 1
    p.grad = torch.tensor([1.0, -2.0, 1e4])
    p.data = torch.ones(3)
    optimizer.step()
    assert torch.equal(p, 1 - p.grad)


def test_a_step_within_averages_is_refused() -> None:
    """The step moved the averages, and the end of the context took it back."""
    p = parameter()
    optimizer = optim.AdamW([p], ema_decay=0.5)
    optimizer.step()
    value, average = p.detach().clone(), optimizer.averaged_parameters()[0][1].clone()
    with optimizer.swap_averages():
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"step within swap_averages\(\)"):
                optimizer.step()
            with optimizer.swap_averages():
                pass
        assert torch.equal(p, average)
        duplicate = copy.deepcopy(optimizer)
    assert torch.equal(p, value)
    assert torch.equal(optimizer.averaged_parameters()[0][1], average)
    optimizer.step()
    assert not torch.equal(p, value)
    duplicate.step()
    with pytest.raises(KeyError), optimizer.swap_averages():
        raise KeyError
    optimizer.step()


def test_averages_that_nobody_keeps() -> None:
    """The parameters themselves passed for averages."""
    p = parameter()
    optimizer = optim.AdamW([p])
    optimizer.step()
    message = "^AdamW has no averages: pass ema_decay=0.999"
    with pytest.raises(RuntimeError, match=message):
        optimizer.averaged_parameters()
    with pytest.raises(RuntimeError, match=message), optimizer.swap_averages():
        pass
    optimizer.ema_decay = 0.5
    assert optimizer.averaged_parameters()[0][1] is p  # before the first step
    optimizer.step()
    average = optimizer.averaged_parameters()[0][1]
    assert not torch.equal(p, average)
    optimizer.ema_decay = None  # what earlier steps have averaged stays
    assert optimizer.averaged_parameters()[0][1] is average
    with optimizer.swap_averages():
        assert torch.equal(p, average)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_a_checkpoint_with_steps_and_no_averages_warns(name: str) -> None:
    """The averages start at the parameters, in silence; nothing is lost before a first step."""
    p, q = parameter(), parameter()
    options = {"momentum": 0.9} if name == "SGD" else {}
    stock = getattr(torch.optim, name)([q], lr=0.25, **options)
    optimizer = getattr(optim, name)([p], lr=0.5, ema_decay=0.75, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(stock.state_dict())
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        getattr(optim, name)([q], **options).load_state_dict(optimizer.state_dict())
    stock.step()
    with pytest.warns(UserWarning, match=f"^{name}: .*steps but no averages.*ema_decay=0.75") as w:
        optimizer.load_state_dict(stock.state_dict())
    assert len(w) == 1
    assert w[0].filename == __file__
    with torch.no_grad():
        p.fill_(8.0)  # as a model's checkpoint that is loaded later
    optimizer.step()
    torch.testing.assert_close(optimizer.averaged_parameters()[0][1], 0.75 * 8.0 + 0.25 * p)


@pytest.mark.parametrize("later", [False, True])
def test_rounding_without_bfloat16_warns(later: bool) -> None:
    p = parameter()

    def make() -> None:
        if later:
            optim.AdamW([p]).stochastic_rounding = True
        else:
            optim.AdamW([p], stochastic_rounding=True)

    with pytest.warns(UserWarning, match=r"stochastic_rounding=True has no effect.*float32") as w:
        make()
    assert w[0].filename == __file__
    mixed = [p, nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = optim.AdamW(mixed, stochastic_rounding=True)
        optimizer.stochastic_rounding = False


def test_repr_shows_the_options_of_all_groups() -> None:
    optimizer = optim.LAMB([parameter()], max_grad_norm=0.5, ema_decay=0.25, agc_eps=0.125)
    group, options = repr(optimizer).split("All groups\n")
    assert "lr: 0.001" in group
    shown = dict(line.strip().split(": ") for line in options.splitlines()[:-1])
    assert shown == {
        "agc": "None", "agc_eps": "0.125", "ema_decay": "0.25", "gradient_writeback": "none",
        "master_weights": "False", "max_grad_norm": "0.5", "state_dtype": "None",
        "stochastic_rounding": "False",
    }  # fmt: skip
    assert options.endswith("\n)")
    optimizer.ema_decay = None
    assert "ema_decay: None" in repr(optimizer)


@pytest.mark.parametrize(
    ("saved", "into", "word"),
    [
        ("SGD", "AdamW", "betas"), ("AdamW", "SGD", "momentum"), ("Lion", "AdamW", "step"),
        ("RMSprop", "Adam", "betas"), ("AdamW", "LAMB", "bias_correction"),
        ("SGD", "Lion", "betas"), ("Adagrad", "NAdamW", "betas"), ("Adam", "RMSprop", "alpha"),
        ("Lion", "LARS", "momentum"),
    ],
)  # fmt: skip
def test_state_dicts_of_other_optimizers(saved: str, into: str, word: str) -> None:
    """torch raises KeyError, here or at the next step."""
    other = getattr(optim, saved)([parameter()], lr=0.5)
    other.step()
    p = parameter()
    optimizer = getattr(optim, into)([p], lr=0.25)
    optimizer.step()
    before, weights = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    with pytest.raises(ValueError, match=f"state_dict: not of {into}, since there is no '{word}'"):
        optimizer.load_state_dict(other.state_dict())
    assert torch.equal(p, weights)
    assert str(optimizer.state_dict()) == str(before)
    optimizer.step()


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(
    ("saved", "into"),
    [
        ("AdamW", "Lion"), ("Adam", "Lion"), ("NAdamW", "Lion"), ("LAMB", "Lion"),
        ("NovoGrad", "AdamW"), ("Adam", "Adagrad"), ("RMSprop", "Adagrad"),
    ],
)  # fmt: skip
def test_state_dicts_with_all_that_another_optimizer_asks_for(
    saved: str, into: str, stepped: bool
) -> None:
    """Their keys are there, or have defaults; what the numbers mean is something else."""
    other = getattr(optim, saved)([parameter()], lr=0.5)
    if stepped:
        other.step()
    p = parameter()
    optimizer = getattr(optim, into)([p], lr=0.25)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"state_dict: of {saved} \(.*\), not of {into} \("):
        optimizer.load_state_dict(other.state_dict())
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(
    ("saved", "into"), [("AdamW", "LAMB"), ("AdamW", "NAdamW"), ("NAdamW", "AdamW"),
                        ("LAMB", "Adam"), ("Adam", "AdamW"), ("LARS", "SGD"), ("SGD", "SGDW")],
)  # fmt: skip
def test_state_dicts_with_the_same_states(saved: str, into: str, stepped: bool) -> None:
    other = getattr(optim, saved)([parameter()], lr=0.5)
    if stepped:
        other.step()
    state_dict = other.state_dict()
    state_dict["param_groups"][0].setdefault("bias_correction", True)  # LAMB asks for it
    state_dict["param_groups"][0].setdefault("grad_averaging", True)
    state_dict["param_groups"][0].setdefault("max_grad_norm", 1.0)
    state_dict["param_groups"][0]["name"] = "a key of the user's"
    p = parameter()
    optimizer = getattr(optim, into)([p], lr=0.25)
    optimizer.load_state_dict(state_dict)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_keys_of_a_class_are_its_arguments(name: str) -> None:
    optimizer = getattr(optim, name)([parameter()], lr=0.5)
    differ = set(optimizer.defaults) ^ _makers.keys_of(type(optimizer))
    assert differ <= {"decoupled_weight_decay"}
    assert _makers.foreign_maker(type(optimizer), optimizer.state_dict()) is None


def test_dicts_that_are_no_state_dict() -> None:
    optimizer = optim.AdamW([parameter()])
    for wrong in ({"model": 1, "optimizer": optimizer.state_dict()}, nn.Linear(1, 1).state_dict()):
        with pytest.raises(ValueError, match=r"expected what optimizer\.state_dict\(\) returns"):
            optimizer.load_state_dict(wrong)


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


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "gradient_writeback": "zero"}])
def test_gradients_that_are_zero_and_have_no_memory(options: Any) -> None:
    runs = []
    for optimizer in (torch.optim.AdamW, optim.AdamW):
        p = nn.Parameter(torch.tensor([1.0, -2.0]))
        for _ in range(2):
            p.grad = None
            torch.sgn(p).sum().backward()
            assert p.grad._is_zerotensor()
            optimizer([p], **options if optimizer is optim.AdamW else {}).step()
        runs.append(p)
    assert torch.equal(*runs)


def test_negated_gradients() -> None:
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.view_as_complex(torch.ones(3, 2)).conj().imag
    assert p.grad.is_neg()
    optim.SGD([p], lr=1.0).step()
    assert torch.equal(p, torch.ones(3))
    optim.SGD([p], lr=1.0, max_grad_norm=0.5, gradient_writeback="unscaled").step()
    assert torch.allclose(p.grad, torch.tensor(-0.5 / 3**0.5))
    optim.SGD([p], lr=1.0, gradient_writeback="zero").step()
    assert (p.grad == 0).all()
    p.grad = torch.view_as_complex(torch.ones(3, 2)).conj().imag
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


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode])
def test_tensors_without_values(mode: Any) -> None:
    """Steps, state dicts and loading read none: for estimates of memory."""
    with mode():
        device = "meta" if mode is nullcontext else "cpu"
        p = nn.Parameter(torch.ones(3, device=device))
        p.grad = torch.ones_like(p)
        for optimizer in (optim.AdamW([p]), optim.SGD([p], momentum=0.9)):
            optimizer.step()
            saved = optimizer.state_dict()
            assert saved["state"][0]
            optimizer.load_state_dict(saved)
            optimizer.step()
