"""Gradient release among hooks, checkpoints, exceptions, other optimizers and converted models."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain
from helpers.optimizer_steps import alike
from helpers.optimizers import make
from helpers.released import assert_alike, loss_of, network, pair, train


def test_two_optimizers_over_one_model() -> None:
    results = []
    for released in (False, True):
        model = network()
        norms = [*model.norm.parameters()]
        others = [p for p in model.parameters() if all(p is not q for q in norms)]
        optimizers = [make("SGD", norms), make("Lion", others)]
        for optimizer in optimizers if released else ():
            optimizer.release_gradients(model)
        for seed in range(3):
            loss_of(model, seed).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append([list(model.parameters()), *(o.state_dict() for o in optimizers)])
    assert alike(*results)


def test_unfrozen_and_moved_parameters() -> None:
    both = pair()
    for model, optimizer in both:
        train(model, optimizer, range(1))
        model.frozen.requires_grad_()
        model.frozen.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
        model.branch.weight.data = model.branch.weight.detach().clone().t().contiguous().t()
        train(model, optimizer, range(1, 3))
        model.to(torch.float64)
        train(model, optimizer, range(3, 5))
    assert_alike(both)


def test_gradients_that_do_not_accumulate() -> None:
    """torch.autograd.grad, functorch and evaluation leave the model as it is."""
    _, (model, optimizer) = pair()
    before = copy.deepcopy(model.state_dict())
    params = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss_of(model, 0), params)
    named = {name: p.detach() for name, p in model.named_parameters()}
    torch.func.grad(lambda n: torch.func.functional_call(model, n, torch.ones(1, 6)).sum())(named)
    model.eval()
    with torch.no_grad():
        loss_of(model, 0)
    optimizer.step()
    assert alike(dict(model.state_dict()), dict(before))
    assert int(optimizer.applied_steps) == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    results = []
    for released in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        optimizer = make("AdamW", model.parameters())
        if released:
            optimizer.release_gradients(model)
        for seed in range(3):
            x = torch.ones(2, 6).mul(seed + 1).requires_grad_()
            for block in model:
                x = checkpoint(block, x, use_reentrant=reentrant)
            x.square().mean().backward()
            assert released == (next(model.parameters()).grad is None)
            optimizer.step()
            optimizer.zero_grad()
        results.append([list(model.parameters()), optimizer.state_dict()])
    assert alike(*results)


def test_exceptions_in_backward_leave_a_step_to_close() -> None:
    _, (model, optimizer) = pair(ema_decay=0.9)
    train(model, optimizer, range(1))
    broken = model.norm.register_full_backward_hook(_fail)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 1).backward()
    broken.remove()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {"branch.weight", "last.bias", "norm.weight"} <= changed
    assert not {"first.weight", "first.bias"} & changed
    with pytest.raises(RuntimeError, match="second time"):
        loss_of(model, 1).backward()
    optimizer.step()
    assert int(optimizer.applied_steps) == 2
    train(model, optimizer, range(2, 4))
    assert int(optimizer.applied_steps) == 4


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _clamp(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.01)


def test_hooks_of_others() -> None:
    """Hooks that change gradients, and those registered before, see them; later ones do not."""
    results = []
    for released in (False, True):
        model = network()
        optimizer = make("SGD", model.parameters())
        seen: list[bool] = []
        for p in model.parameters():
            if p.requires_grad:
                p.register_hook(lambda grad: grad * 0.5)
                p.register_post_accumulate_grad_hook(_clamp)
        if released:
            optimizer.release_gradients(model)
        model.branch.weight.register_post_accumulate_grad_hook(
            lambda p, seen=seen: seen.append(p.grad is None)
        )
        train(model, optimizer, range(2))
        assert seen == [released]  # the second step leaves the branch out
        results.append(list(model.parameters()))
    assert alike(*results)


@pytest.mark.filterwarnings("ignore:Using backward() with create_graph")
def test_create_graph_and_strange_gradients() -> None:
    both = pair()
    for model, optimizer in both:
        loss_of(model, 0).backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        weight = model.branch.weight
        (weight.t() * torch.ones(6, 6).double().float()).sum().backward()  # transposed
        optimizer.step()
        optimizer.zero_grad()
        weight.sum().backward()  # expanded: all elements at one place
        optimizer.step()
        optimizer.zero_grad()
        torch._neg_view(weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_alike(both)


@pytest.mark.parametrize("memory", ["store", "recompute"])
def test_converted_models(memory: str) -> None:
    results = []
    for released in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3),
            nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1),
        )  # fmt: skip
        optimizer = make("AdamW", model.parameters())
        if released:
            optimizer.release_gradients(model)
        fusedtrain.convert(model, memory=memory)
        for seed in range(3):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
            assert released == (model[0].weight.grad is None)
            optimizer.step()
            optimizer.zero_grad()
        results.append([dict(model.state_dict()), optimizer.state_dict()])
    assert alike(*results)


def test_optimizers_and_models_go_away() -> None:
    def made() -> Iterator[Any]:
        model = network()
        optimizer = make("AdamW", model.parameters())
        optimizer.release_gradients(model)
        train(model, optimizer, range(2))
        yield from (model, optimizer)

    gone = [weakref.ref(one) for one in made()]
    gc.collect()
    assert [one() for one in gone] == [None, None]
