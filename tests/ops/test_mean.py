"""mean and adaptive_avg_pool2d: torch's bits, forward and backward; the gradient is a view."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain._calls import suggests_channels_last
from fusedtrain._graph.forward import rewritten_of
from fusedtrain.ops import pool

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "planes, kept": (F.mean, torch.mean, ((2, 3), True)),
    "planes": (F.mean, torch.mean, ([-1, -2],)),
    "one": (F.mean, torch.mean, (1,)),
    "apart": (F.mean, torch.mean, ((0, -1),)),
    "all": (F.mean, torch.mean, ((0, 1, 2, 3), True)),
    "pool": (F.adaptive_avg_pool2d, T.adaptive_avg_pool2d, (1,)),
    "pool of a pair": (F.adaptive_avg_pool2d, T.adaptive_avg_pool2d, ((1, 1),)),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "sliced": lambda x: x[:, ::2, :, 1:],
    "one channel": lambda x: x[:, :1],
}


@pytest.fixture(autouse=True)
def every_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of any size and layout run our node."""
    monkeypatch.setattr(pool, "_LEAST", 1)
    monkeypatch.setattr(pool, "suggests_channels_last", lambda _: True)


@pytest.mark.parametrize("call", CALLS)
def test_bits(call: str) -> None:
    ours, theirs, arguments = CALLS[call]
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for layout, dtype in itertools.product(LAYOUTS, dtypes):
        torch.manual_seed(0)
        x = LAYOUTS[layout](torch.randn(3, 6, 7, 5)).to(dtype)
        output, gradient = read_twice(ours, x, arguments)
        want, want_gradient = read_twice(theirs, x, arguments)
        assert type(output.grad_fn).__name__ == "MeanBackward"
        assert output.equal(want), (layout, dtype)
        assert output.stride() == want.stride(), (layout, dtype)
        assert gradient.equal(want_gradient), (layout, dtype)


def read_twice(
    function: Callable[..., Tensor], x: Tensor, arguments: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """The mean, and the gradient of an input that others read, too, as around a gate."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = leaf * 1
    output = function(y, *arguments)
    return output, torch.autograd.grad((y.sin() * 3).sum() + output.exp().sum(), leaf)[0]


@pytest.mark.parametrize("call", ["planes, kept", "planes", "pool"])
def test_the_gradient_is_a_view(call: str) -> None:
    ours, _, arguments = CALLS[call]
    seen: list[Tensor] = []
    y = torch.randn(2, 3, 8, 8, requires_grad=True) * 1
    y.register_hook(seen.append)
    ours(y, *arguments).sum().backward()
    assert seen[0].stride()[2:] == (0, 0)
    assert seen[0].untyped_storage().nbytes() <= 2 * 3 * 4


@pytest.mark.parametrize("call", CALLS)
def test_derivatives(call: str) -> None:
    ours, _, arguments = CALLS[call]
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True)

    def cubed(x: Tensor) -> Tensor:
        y: Tensor = ours(x * x, *arguments)
        return y**3

    assert torch.autograd.gradcheck(cubed, x)
    assert torch.autograd.gradgradcheck(cubed, x)


def test_a_leaf_gets_a_gradient_of_its_own() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    for _ in range(2):
        F.mean(x, (2, 3)).sum().backward()
    assert x.grad is not None
    assert x.grad.is_contiguous()
    x.grad.mul_(2)
    assert x.grad.allclose(torch.full_like(x, 4 / 64))


@pytest.mark.parametrize(("ours", "theirs", "arguments", "shape"), [
    (F.mean, torch.mean, ((2, 4),), (2, 3, 4, 4)), (F.mean, torch.mean, ((1, -3),), (2, 3, 4, 4)),
    (F.mean, torch.mean, ((0, 1.5),), (2, 3)),
    (F.adaptive_avg_pool2d, T.adaptive_avg_pool2d, (-1,), (2, 3, 4, 4)),
])  # fmt: skip
def test_mistakes_are_torchs(ours: Any, theirs: Any, arguments: Any, shape: Any) -> None:
    x = torch.randn(shape, requires_grad=True)
    with pytest.raises(Exception) as want:
        theirs(x, *arguments)
    with pytest.raises(want.type) as error:
        ours(x, *arguments)
    assert str(error.value).splitlines()[0] == str(want.value).splitlines()[0]


def test_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    empty = torch.empty(2, 0, 4, 4, requires_grad=True)
    names = [F.mean(empty, (2, 3)).grad_fn, F.mean(x, ()).grad_fn]
    names += [F.adaptive_avg_pool2d(x, 2).grad_fn]
    monkeypatch.setattr(pool, "_LEAST", x.numel() + 1)
    names += [F.mean(x, 1).grad_fn, F.adaptive_avg_pool2d(x, 1).grad_fn]
    monkeypatch.setattr(pool, "_LEAST", 1)
    monkeypatch.setattr(pool, "suggests_channels_last", suggests_channels_last)
    names += [F.mean(x, (2, 3)).grad_fn, F.adaptive_avg_pool2d(x, 1).grad_fn]
    assert all(type(node).__name__ != "MeanBackward" for node in names)
    with torch.no_grad():
        assert F.mean(x, 1).equal(x.mean(1))
    assert F.mean(torch.ones(4, 4, dtype=torch.complex64), 1).dtype is torch.complex64
    assert torch.func.vmap(lambda t: F.mean(t, (1, 2)))(x).equal(x.mean((2, 3)))


class Gate(nn.Module):
    """Squeeze and excitation (arXiv:1709.01507), with torch's pooling."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(self.pool(x)).sigmoid()


@pytest.mark.parametrize("autocast", [True, False])
def test_convert(autocast: bool) -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), Gate(8), nn.AdaptiveAvgPool2d(1))
    stock = stock.to(memory_format=torch.channels_last)
    model = copy.deepcopy(stock)
    report = fusedtrain.convert(model)
    assert [entry.name for entry in report.converted] == ["1"]
    assert [(call.name, call.activation) for call in report.calls] == [("2", "adaptive_avg_pool2d")]
    assert "adaptive_avg_pool2d" in getattr(rewritten_of(model[2]), "source", "")
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    gradients = []
    for network in (stock, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = network(x)
        gradients.append(torch.autograd.grad(output.float().square().sum(), network.parameters()))
    for ours, want in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, want, rtol=0.05 if autocast else 1e-4, atol=1e-4)


READERS: dict[str, tuple[Callable[[Any, Tensor], Any], int]] = {
    "a gate": (lambda m, x: x * m.fc(m.pool(x)).sigmoid(), 1),
    "nothing else": (lambda m, x: m.fc(m.pool(x)).sigmoid(), 0),
    "its size": (lambda m, x: m.pool(x).reshape(x.size(0), x.shape[1]), 0),
    "two means": (lambda m, x: x.mean((2, 3)) + (x * x).mean((2, 3)), 1),  # of the first
    "another size": (lambda m, x: x.sum() + T.adaptive_avg_pool2d(x, 2), 0),
    "arguments": (lambda m, x: x * m.pool(input=x), 0),
}


@pytest.mark.parametrize("readers", READERS)
def test_convert_changes_means_that_share_their_input(readers: str) -> None:
    forward, count = READERS[readers]
    cls = type("Reads", (Gate,), {"forward": lambda self, x: forward(self, T.silu(x))})
    model = cls(8)
    stock, x = copy.deepcopy(model), torch.randn(2, 8, 6, 6, requires_grad=True)
    calls = [call.activation for call in fusedtrain.convert(model).calls]
    assert sum(name in ("adaptive_avg_pool2d", "mean") for name in calls) == count
    if count:
        ours, want = (torch.autograd.grad(m(x).sum(), x)[0] for m in (model, stock))
        torch.testing.assert_close(ours, want)


class Doubles:
    """No tensor, with a method of the same name."""

    def mean(self, dim: Any, keepdim: bool = False) -> Any:
        return dim, keepdim

    def sigmoid(self) -> str:
        return "sigmoid"


def test_what_is_no_tensor_keeps_its_method() -> None:
    model = type("Reads", (Gate,), {"forward": lambda self, x: (x.mean((2, 3)), x.sigmoid())})(8)
    assert [call.activation for call in fusedtrain.convert(model).calls] == ["mean", "sigmoid"]
    assert rewritten_of(model) is not None
    assert model(Doubles()) == (((2, 3), False), "sigmoid")


def test_a_plan_has_the_bits_of_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), Gate(8), nn.Conv2d(8, 8, 3))
    stock = nn.Sequential(*layers, nn.BatchNorm2d(8), nn.SiLU(), Gate(8))
    stock = stock.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    gradients = []
    for memory in ("store", "recompute", fusedtrain.plan_memory(copy.deepcopy(stock), x, 0.8)):
        model = copy.deepcopy(stock)
        fusedtrain.convert(model, memory=memory)
        loss = model(x).square().sum()
        gradients.append(torch.autograd.grad(loss, model.parameters()))
    for others in gradients[1:]:
        assert all(map(torch.equal, gradients[0], others))
    monkeypatch.setattr(pool, "_LEAST", x.numel() * 8)  # the plan holds without the node, too
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x[:1])


@pytest.mark.parametrize("change", ["hook", "later hook", "exclude"])
def test_a_pool_that_is_watched_is_called(change: str) -> None:
    model, seen = nn.Sequential(nn.SiLU(), Gate(8)), []
    if change == "hook":
        model[1].pool.register_forward_hook(lambda *_: seen.append(1))
    report = fusedtrain.convert(model, exclude=["1.pool"] if change == "exclude" else ())
    assert len(report.calls) == (change == "later hook")
    if change == "later hook":
        model[1].pool.register_forward_hook(lambda *_: seen.append(1))
    model(torch.randn(2, 8, 6, 6))
    assert len(seen) == (change != "exclude")


def test_script_and_export() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    for function, arguments in ((F.mean, ([2, 3], True)), (F.adaptive_avg_pool2d, ([1, 1],))):
        scripted = torch.jit.script(function)
        assert scripted(x, *arguments).equal(x.mean((2, 3), keepdim=True))
    model = nn.Sequential(nn.SiLU(), Gate(3))
    fusedtrain.convert(model)
    assert "fusedtrain" not in str(torch.export.export(model, (x,)).graph)
