"""LARC around optimizers, against its formula in float64."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex.larc import LARC
from helpers.observed import Counted
from helpers.optimizer_steps import assert_close, give_gradients, parameters

SHAPES = [(3, 5), (7,), (), (2, 0), (4, 3, 2, 2), (33,), (5,), (6,)]
ZERO_PARAMETER, WITHOUT_GRADIENT, ZERO_GRADIENT = 1, 4, 5
INNER: dict[str, Any] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "fusedtrain SGD": (fusedtrain.optim.SGD, {"momentum": 0.9}),
    "fusedtrain Adam": (fusedtrain.optim.Adam, {}),
}
STEPS = 6


def _model(dtype: torch.dtype) -> list[nn.Parameter]:
    params = parameters(dtype, SHAPES)
    with torch.no_grad():
        params[ZERO_PARAMETER].zero_()
    return params


def _groups(params: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    return [
        {"params": params[:3], "lr": 0.3},
        {"params": params[3:], "lr": 0.01, "weight_decay": decay},
    ]


def _gradients(params: list[nn.Parameter], seed: int) -> None:
    give_gradients(params, seed)
    params[WITHOUT_GRADIENT].grad = None
    zero = params[ZERO_GRADIENT].grad
    assert zero is not None
    zero.zero_()


def _scale(p: Tensor, grad: Tensor, group: dict[str, Any], trust: float, clip: bool) -> float:
    """The formula, on one gradient in place; returns the rate."""
    decay = group["weight_decay"]
    p_norm = float(p.detach().square().sum().sqrt())
    grad_norm = float(grad.square().sum().sqrt())
    if p_norm == 0 or grad_norm == 0:
        return float("nan")
    rate = trust * p_norm / (grad_norm + p_norm * decay + 1e-8)
    if clip:
        rate = min(rate / group["lr"], 1)
    grad.copy_((grad + decay * p.detach()) * rate)
    return rate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("inner", INNER)
def test_against_the_formula(inner: str, clip: bool, decay: float, dtype: torch.dtype) -> None:
    cls, options = INNER[inner]
    trust = 0.02
    ours = _model(dtype)
    optimizer = LARC(
        cls(_groups(ours, decay), weight_decay=decay / 2, **options), trust_coefficient=trust,
        clip=clip,
    )  # fmt: skip
    truth = _model(torch.float64)
    stock = inner.removeprefix("fusedtrain ")
    by_hand = getattr(torch.optim, stock)(_groups(truth, decay), **options)
    decays = (decay / 2, decay)
    for group in by_hand.param_groups:
        group["weight_decay"] = 0
    rates = []
    for seed in range(STEPS):
        _gradients(ours, seed)
        _gradients(truth, seed)
        for group, weight_decay in zip(by_hand.param_groups, decays, strict=True):
            for p in group["params"]:
                if p.grad is not None:
                    values = {"lr": group["lr"], "weight_decay": weight_decay}
                    rates.append(_scale(p, p.grad, values, trust, clip))
        optimizer.step()
        by_hand.step()
        for a, b in zip(ours, truth, strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None and b.grad is not None:
                # Adam's steps of parameters that are nearly the same differ by more than an eps.
                torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-6)
        for group, weight_decay in zip(optimizer.param_groups, decays, strict=True):
            assert group["weight_decay"] == weight_decay
    assert any(0 < rate < 1 for rate in rates)
    if clip:
        assert 1 in rates
    limit = 256 if "Adam" in inner else 32
    assert_close([p.detach() for p in ours], [p.detach().to(dtype) for p in truth], limit)


def test_norms_of_float16_do_not_overflow() -> None:
    p = nn.Parameter(torch.full((64,), 3e4, dtype=torch.float16))
    p.grad = torch.full((64,), 200.0, dtype=torch.float16)
    LARC(torch.optim.SGD([p], lr=1.0), trust_coefficient=0.5, clip=False).step()
    assert p.grad.dtype is torch.float16
    torch.testing.assert_close(p.grad.float(), torch.full((64,), 15000.0), rtol=2e-3, atol=0)


def test_as_many_calls_for_many_parameters_as_for_few_and_none_reads_the_device() -> None:
    """A tensor on meta has nothing to be read."""
    counts = []
    for number in (2, 40):
        params = [nn.Parameter(torch.empty(3, device="meta")) for _ in range(number)]
        for p in params:
            p.grad = torch.empty(3, device="meta")
        optimizer = LARC(torch.optim.SGD(params, lr=0.1, weight_decay=0.1, foreach=True))
        with Counted() as counted:
            optimizer._scale_gradients()
        counts.append(len([c for c in counted.calls if not c.startswith("aten.detach")]))
        optimizer.step()
    assert counts[0] == counts[1] < 30, counts


def _one(**options: Any) -> tuple[nn.Parameter, LARC]:
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    p.grad = torch.tensor([0.0, 10.0])
    return p, LARC(torch.optim.SGD([p], **{"lr": 1.0, **options}), 0.5, clip=False)


def test_weight_decay_comes_back_when_the_step_raises() -> None:
    _, optimizer = _one(weight_decay=0.25)

    def fail(*_: Any) -> None:
        assert optimizer.param_groups[0]["weight_decay"] == 0
        raise RuntimeError("no step")

    handle = optimizer.optim.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no step"):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    handle.remove()
    del optimizer.param_groups[0]["weight_decay"]
    with pytest.raises(KeyError):  # by SGD itself
        optimizer.step()
    assert "weight_decay" not in optimizer.param_groups[0]


def test_it_is_an_optimizer_for_schedulers() -> None:
    lr_scheduler = torch.optim.lr_scheduler
    p, optimizer = _one(momentum=0.9)
    assert isinstance(optimizer, torch.optim.Optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 4)
        cycle = lr_scheduler.CyclicLR(optimizer, 0.1, 0.2)
        for _ in range(2):
            optimizer.step()
            scheduler.step()
            cycle.step()
    assert optimizer.param_groups[0] is optimizer.optim.param_groups[0]
    assert 0 < optimizer.optim.param_groups[0]["lr"] < 0.2
    # Copies have the attributes that the schedulers put on the optimizer:
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    after = []
    for one in (optimizer, *copies):
        assert (one.trust_coefficient, one.clip, one.eps) == (0.5, False, 1e-8)
        (parameter,) = one.param_groups[0]["params"]
        parameter.grad = torch.ones(2)
        one.step()
        after.append(parameter.detach())
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])
    assert after[0].data_ptr() == p.data_ptr() != after[1].data_ptr()


def test_what_belongs_to_the_optimizer_inside() -> None:
    p, optimizer = _one(momentum=0.9)
    optimizer.step()
    inner = optimizer.optim
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert str(optimizer.state_dict()) == str(inner.state_dict())
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=9.0, momentum=0.9)
    optimizer.load_state_dict(other.state_dict())
    assert inner.param_groups[0]["lr"] == 9.0
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(p.grad, torch.zeros(2))
    optimizer.zero_grad()
    assert p.grad is None
    q = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [q], "lr": 7.0})
    assert inner.param_groups[1]["lr"] == 7.0
    groups = list(inner.param_groups)
    optimizer.param_groups = groups
    assert inner.param_groups is groups
    called: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.step()
    assert called == [1]
    assert not hasattr(optimizer, "nothing_of_that_name")


def test_closure_is_called_once_and_before_scaling() -> None:
    p, optimizer = _one()
    called = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        called.append(1)
        return loss

    loss = optimizer.step(closure)
    assert loss == 25
    assert called == [1]
    # |grad| = 10, |p| = 5: a step of 0.5 * 5 / 10 * grad
    torch.testing.assert_close(p.detach(), torch.tensor([1.5, 2.0]))


def test_patched_as_amp_does_it() -> None:
    """Master weights in the groups, step, zero_grad and add_param_group on the instance."""
    model = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float16))
    optimizer = LARC(torch.optim.SGD([model], lr=1.0, momentum=0.5), 0.5, clip=False)
    master = nn.Parameter(model.detach().float())
    optimizer.param_groups[0]["params"][0] = master
    optimizer.load_state_dict(optimizer.state_dict())
    old_step, old_add = optimizer.step, optimizer.add_param_group

    def new_step(self: LARC, closure: Any = None) -> Any:
        result = old_step()
        with torch.no_grad():
            model.copy_(master)
        return result

    def new_add(self: LARC, group: dict[str, Any]) -> None:
        old_add({**group, "lr": 0.125})

    optimizer.step = types.MethodType(new_step, optimizer)
    optimizer.add_param_group = types.MethodType(new_add, optimizer)
    optimizer._amp_stash = "here"
    master.grad = torch.tensor([0.0, 10.0])
    optimizer.step()
    torch.testing.assert_close(master.detach(), torch.tensor([3.0, 1.5]))
    assert torch.equal(model, master.half())
    assert list(optimizer.state) == [master]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert optimizer.optim.param_groups[1]["lr"] == 0.125
    assert not hasattr(optimizer.optim, "_amp_stash")


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fusedtrain.amp.GradScaler])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"ours": True}], ids=str)
def test_under_a_scaler_rates_are_of_unscaled_gradients(
    scaler: Any, options: dict[str, Any]
) -> None:
    cls = fusedtrain.optim.SGD if options.get("ours") else torch.optim.SGD
    kept = {k: v for k, v in options.items() if k != "ours"}
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = LARC(cls([p], lr=1.0, **kept), 0.5, clip=True)
    scale = scaler("cpu", init_scale=1024.0)
    scale.scale(torch.zeros(())).item()
    p.grad = torch.tensor([0.0, 10.0]) * 1024
    scale.step(optimizer)
    scale.update()
    torch.testing.assert_close(p.detach(), torch.tensor([3.0, 1.5]))
    p.grad = torch.tensor([0.0, float("inf")])
    scale.step(optimizer)
    scale.update()
    assert scale.get_scale() == 512
    torch.testing.assert_close(p.detach(), torch.tensor([3.0, 1.5]))


def test_mistakes() -> None:
    with pytest.raises(TypeError, match="optimizer must be an optimizer, got list"):
        LARC([torch.zeros(1)])
    _, optimizer = _one()
    with pytest.raises(ValueError, match="trust_coefficient"):
        LARC(optimizer.optim, trust_coefficient=-1.0)
    with pytest.raises(ValueError, match="eps"):
        LARC(optimizer.optim, eps=-1.0)
