"""Casts under O1: autocast for the thread, where it is off, functions that the user registers."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.apex import amp
from helpers.amp_runs import network


@pytest.fixture
def started() -> tuple[nn.Module, Any]:
    model = network()
    optimizer = fusedtrain.optim.SGD(model.parameters(), lr=0.1)
    pair: tuple[nn.Module, Any] = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    return pair


def test_everything_in_the_thread_is_cast(started: tuple[nn.Module, Any]) -> None:
    a = torch.randn(4, 4)
    assert (a @ a).dtype == torch.float16
    assert started[0](torch.rand(2, 1, 8, 8)).dtype == torch.float16
    with amp.disable_casts():
        assert (a @ a).dtype == torch.float32
        with amp.disable_casts():
            pass
        assert (a @ a).dtype == torch.float32
    assert (a @ a).dtype == torch.float16


def test_disable_casts_ends_after_an_exception(started: tuple[nn.Module, Any]) -> None:
    a = torch.randn(4, 4)
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert (a @ a).dtype == torch.float16
    assert amp.half_function(lambda x: x.dtype)(a) == torch.float16


def test_weights_are_cast_anew_after_every_change(started: tuple[nn.Module, Any]) -> None:
    model, optimizer = started
    x = torch.rand(8, 1, 8, 8)
    with torch.no_grad():
        model(x)  # autocast's cache would keep weights of this that have no gradient
    with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    before = model(x)
    optimizer.step()
    assert not torch.equal(model(x), before)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert model(x).count_nonzero() == 0


def test_another_level_switches_autocast_off(started: tuple[nn.Module, Any]) -> None:
    a = torch.randn(4, 4)
    other = nn.Linear(2, 2)
    amp.initialize(other, opt_level="O2", verbosity=0)
    assert (a @ a).dtype == torch.float32
    assert torch.is_autocast_cache_enabled()


def test_the_backward_pass_and_the_step_are_not_cast(started: tuple[nn.Module, Any]) -> None:
    seen: list[bool] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    model, optimizer = started
    loss = Seen.apply(model(torch.rand(2, 1, 8, 8)).float().mean())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    optimizer.step()
    assert seen == [False, False]
    assert torch.is_autocast_enabled("cpu")


def _dtypes(*args: Any, **kwargs: Any) -> list[Any]:
    tensors = [*args, *kwargs.values()]
    return [t.dtype if isinstance(t, Tensor) else t for t in tensors]


def test_decorated_functions(started: tuple[nn.Module, Any]) -> None:
    whole, half = torch.ones(2), torch.ones(2).half()
    index = torch.tensor([1])
    assert amp.half_function(_dtypes)(whole, half, 3, x=index) == [
        torch.float16, torch.float16, 3, torch.int64,
    ]  # fmt: skip
    assert amp.float_function(_dtypes)(whole, half, x=half) == [torch.float32] * 3
    assert amp.promote_function(_dtypes)(whole, x=half) == [torch.float32] * 2
    assert amp.promote_function(_dtypes)(half, x=half) == [torch.float16] * 2
    square = amp.float_function(lambda x: x @ x)
    assert square(torch.ones(2, 2).half()).dtype == torch.float32
    with amp.disable_casts():
        for decorator in (amp.half_function, amp.float_function, amp.promote_function):
            assert decorator(_dtypes)(whole, half) == [torch.float32, torch.float16]
    amp.initialize(nn.Linear(2, 2), opt_level="O3", verbosity=0)
    for decorator in (amp.half_function, amp.float_function, amp.promote_function):
        assert decorator(_dtypes)(whole, half) == [torch.float32, torch.float16]


def test_registered_functions_are_wrapped_by_o1_once() -> None:
    module = types.SimpleNamespace(a=_dtypes, b=_dtypes, c=_dtypes)
    amp.register_half_function(module, "a")
    amp.register_float_function(module, "b")
    amp.register_promote_function(module, "c")
    whole, half = torch.ones(2), torch.ones(2).half()
    assert module.a is module.b is module.c is _dtypes
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert module.a(whole, half) == [torch.float16] * 2
    assert module.b(whole, half) == [torch.float32] * 2
    assert module.c(whole, half) == [torch.float32] * 2
    wrapped = module.a
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert module.a is wrapped
