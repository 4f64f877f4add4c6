"""A converted forward runs on the module that it is called on, whoever copied, rebound or wrapped
it; each way beside the stock model."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.forward import Dispatcher, rewritten_of
from fusedtrain._graph.functions import functions_of
from helpers.conversion import assert_same, results

MEMORY = ["store", "recompute"]


class Net(nn.Module):
    """Rewritten itself, as is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU()
        self.part = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(self.act(self.norm(self.conv(x))))
        output: Tensor = self.head(x.mean((2, 3)))
        return output


class Doubled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def pair(kind: type[nn.Module] = Net, memory: str = "store") -> tuple[nn.Module, nn.Module]:
    """A converted model and its stock twin."""
    torch.manual_seed(0)
    model = kind()
    stock = copy.deepcopy(model)
    fusedtrain.convert(model, memory=memory)
    assert rewritten_of(model) is not None or kind is not Net
    return model, stock


def image() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def clone_of(module: nn.Module, change: Callable[[Tensor], Tensor] = torch.clone) -> nn.Module:
    """As meta-learning clones: a copied `__dict__`, with other parameters in it."""
    new = module.__new__(type(module))
    vars(new).update(vars(module))
    tables = module._parameters, module._buffers
    parameters, buffers = (
        {k: None if v is None else change(v) for k, v in table.items()} for table in tables
    )
    children = {k: clone_of(child, change) for k, child in module._modules.items() if child}
    vars(new).update(_parameters=parameters, _buffers=buffers, _modules=children)
    return new


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("asked", [nn.Module.__call__, lambda m, x: m.forward(x)])
def test_clones_compute_with_their_own_weights(memory: str, asked: Callable[..., Tensor]) -> None:
    model, stock = pair(memory=memory)
    before = copy.deepcopy(model.state_dict())
    empty = clone_of(model, torch.zeros_like)
    assert not asked(empty, image()).any()
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())
    expected = asked(clone_of(stock), image())
    torch.testing.assert_close(asked(clone_of(model), image()), expected)


def adapted(model: nn.Module) -> tuple[Tensor, ...]:
    """Meta-gradients through two steps of a clone."""
    clone, x = clone_of(model), image().double()
    for _ in range(2):
        names = [
            (m, k) for m in clone.modules() for k in m._parameters if m._parameters[k] is not None
        ]
        values = [m._parameters[k] for m, k in names]
        steps = torch.autograd.grad(clone(x).square().mean(), values, create_graph=True)
        for (module, key), value, step in zip(names, values, steps):
            module._parameters[key] = value - 0.1 * step
    return torch.autograd.grad(clone(x).square().mean(), list(model.parameters()))


@pytest.mark.parametrize("memory", MEMORY)
def test_meta_gradients(memory: str) -> None:
    model, stock = pair(memory=memory)
    for ours, theirs in zip(adapted(model.double()), adapted(stock.double()), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_higher() -> None:
    higher: Any = pytest.importorskip("higher")
    gradients = []
    for model in pair():
        optimizer, x = torch.optim.SGD(model.double().parameters(), 0.1), image().double()
        with higher.innerloop_ctx(model, optimizer, copy_initial_weights=False) as (inner, steps):
            for _ in range(2):
                steps.step(inner(x).square().mean())
            loss = inner(x).square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def in_autocast(model: Any) -> None:
    """As accelerate does it."""
    wrapped = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(wrapped, model)


def by_method_type(model: Any) -> None:
    model.forward = types.MethodType(model.forward.__func__, model)


def by_partial(model: Any) -> None:
    model.forward = functools.partial(model.forward.__func__, model)


def by_wraps(model: Any) -> None:
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return 2 * inner(*args, **kwargs)

    model.forward = forward


def from_a_bound_method(model: Any) -> None:
    model.forward = model.forward


def on_the_class(model: Any) -> None:
    kind = type(model)
    made = type(kind.__name__, (kind,), {"forward": lambda self, x: 3 * kind.forward(self, x)})
    model.__class__ = made


def by_super(model: Any) -> None:
    kind = type(model)

    class Made(kind):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model.__class__ = Made


def by_a_pre_hook(model: Any) -> None:
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))


REBINDS = {
    f.__name__: f
    for f in (in_autocast, by_method_type, by_partial, by_wraps, from_a_bound_method, on_the_class,
              by_super, by_a_pre_hook)
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*is not what fusedtrain.convert found")
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("rebind", REBINDS)
def test_rebinds(rebind: str, memory: str) -> None:
    model, stock = pair(memory=memory)
    for one in (model, stock):
        REBINDS[rebind](one)
    tolerance = 2e-2 if rebind == "in_autocast" else 1e-4
    assert_same(results(model, image()), results(stock, image()), tolerance)


def patched(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """A class of torch gets another forward, with the name of its own."""
    stock = kind.forward

    @functools.wraps(stock)
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = 3 * stock(self, x)
        return output

    monkeypatch.setattr(kind, "forward", forward)


class Gated(Net):
    """A depthwise convolution, and an activation that is a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, groups=3, padding=1)
        self.norm, self.gate, self.rest = nn.BatchNorm2d(3), nn.Sigmoid(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.act(self.rest(self.norm(self.conv(x)))) * self.gate(x)
        return value


@pytest.mark.parametrize("memory", [*MEMORY, "inplace"])
@pytest.mark.parametrize(
    "kind", [nn.SiLU, nn.Sigmoid, nn.BatchNorm2d, nn.Conv2d, nn.Identity], ids=lambda k: k.__name__
)
def test_classes_of_torch_with_another_forward(
    kind: type, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched(monkeypatch, kind)
    model, stock = pair(Gated, memory)
    assert_same(results(model, image()), results(stock, image()), 1e-4)


def test_a_method_taken_from_one_module_runs_on_another() -> None:
    model, stock = pair()
    other, expected = Net(), Net()
    expected.load_state_dict(other.state_dict())
    function: Any = model.forward.__func__
    torch.testing.assert_close(function(other, image()), expected(image()))
    torch.testing.assert_close(Net.forward(model, image()), stock(image()))
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    assert (type(model), model.forward.__self__) == (Net, model)


def test_a_subclass_whose_parent_class_has_converted_instances() -> None:
    pair()
    model, stock = pair(Doubled)
    assert_same(results(model, image()), results(stock, image()), 1e-5)
    model = Doubled()
    assert rewritten_of(model) is None
    torch.testing.assert_close(model(image()), 2 * Net.forward(model, image()))


@pytest.mark.parametrize("memory", MEMORY)
def test_copies_of_clones_and_of_models_whose_clones_live_on(memory: str) -> None:
    model, _ = pair(memory=memory)
    clone = clone_of(model, lambda t: t.detach().clone() / 2)
    expected = clone(image())
    for copied in (copy.deepcopy(clone), pickle.loads(pickle.dumps(clone)), copy.copy(clone)):
        torch.testing.assert_close(copied(image()), expected)
    del model
    for copied in (copy.deepcopy(clone), pickle.loads(pickle.dumps(clone)), clone):
        torch.testing.assert_close(copied(image()), expected)
    assert fusedtrain.convert(clone).norms  # a model like any other
    torch.testing.assert_close(clone(image()), expected)
    assert fusedtrain.revert(clone) > 0


def test_functional_calls_of_a_converted_model() -> None:
    model, stock = pair()
    halved = {name: p.detach() / 2 for name, p in stock.named_parameters()}
    expected = torch.func.functional_call(stock, halved, (image(),))
    torch.testing.assert_close(torch.func.functional_call(model, halved, (image(),)), expected)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kind", ["many", "a norm that nothing follows"])
def test_one_graph_under_compile(kind: str, memory: str) -> None:
    """Dynamo traces the forward of the class, and none of ours but a norm's that is recomputed."""
    stock: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    stock = Net() if kind == "many" else stock
    model = copy.deepcopy(stock)
    fusedtrain.convert(model, image(), memory=memory)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where global hooks are left behind
        compiled(image()).square().mean().backward()
    stock(image()).square().mean().backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_classes_stay_what_they_are_for_whoever_asks_them() -> None:
    forward = Net.forward
    pair()
    assert Net.forward is forward
    dispatcher = vars(Net)["forward"]
    assert isinstance(dispatcher, Dispatcher)
    assert pickle.loads(pickle.dumps(dispatcher)) is forward  # cloudpickle's, of a class by value
    assert functions_of(dispatcher) == [forward]  # as fold_conv_bn reads the code of a class


def test_frozen_norms_and_biases_of_clones() -> None:
    for change in (fusedtrain.fold_frozen_norms, fusedtrain.drop_redundant_bias):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), image()
        model(x)
        stock = copy.deepcopy(model)
        change(model)
        for training in (True, False):
            expected = clone_of(stock.train(training))(x)
            torch.testing.assert_close(clone_of(model.train(training))(x), expected)
