"""`convert` of models that reach for values and modules by unusual ways, without an example."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain
from helpers.conversion import compared
from helpers.models import model_of

pytestmark = pytest.mark.usefixtures("one_thread")

LOG: dict[str, Any] = {}


class Holder:
    value: Any = None


class Net(nn.Module):
    """Layers for the forwards below."""

    run: Callable[[Any, Tensor], Any]

    def __init__(self) -> None:
        super().__init__()
        self.c, self.c2, self.bn, self.act = (
            nn.Conv2d(4, 4, 1),
            nn.Conv2d(4, 4, 1),
            norm(),
            nn.SiLU(),
        )
        self.gate, self.drop = nn.Sigmoid(), nn.Dropout(0.5)
        self.gamma = nn.Parameter(torch.full((4, 1, 1), 0.5))
        self.holder = Holder()

    def normed(self, x: Tensor) -> Tensor:
        value: Tensor = self.bn(self.c(x))
        return value


def norm() -> nn.Module:
    return nn.BatchNorm2d(4)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.gate = nn.Conv2d(4, 4, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.c(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.bn, self.act = nn.Conv2d(4, 4, 1), norm(), nn.SiLU()
        self.seq = nn.Sequential(nn.Conv2d(4, 4, 1), norm(), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.seq(self.act(self.bn(self.c(x))))
        return value


class Doubling(Gate):
    def __call__(self, x: Tensor) -> Tensor:
        value: Tensor = super().__call__(x)
        return value * 2


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.bn = nn.Conv2d(4, 4, 1), norm()

    def forward(self, residual: Tensor) -> Tensor:
        value: Tensor = self.bn(self.c(residual))
        return value


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.bn = nn.Conv2d(4, 4, 1), norm()

    def forward(self, x: Tensor, skip: Tensor | None) -> Tensor:
        y: Tensor = self.bn(self.c(x))
        if skip is not None:
            y = y + skip
        return F.relu(y)


class NoneOf(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


class Child(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parents, self.c = [parent], nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.parents[0].act(self.c(x))
        return value


def in_attribute(self: Any, x: Tensor) -> Any:
    self.tap = self.normed(x)
    return self.act(self.tap)


def in_object(self: Any, x: Tensor) -> Any:
    self.holder.value = self.normed(x)
    return F.relu(self.holder.value)


def in_global(self: Any, x: Tensor) -> Any:
    LOG["value"] = self.normed(x)
    return F.relu(x + LOG["value"])


def gate_in_global(self: Any, x: Tensor) -> Any:
    LOG["value"] = self.gate(self.c(x))
    return x * LOG["value"]


def no_grad_around_activation(self: Any, x: Tensor) -> Any:
    y = self.normed(x)
    with torch.no_grad():
        z = self.act(y)
    return z + x


def activation_by_forward(self: Any, x: Tensor) -> Any:
    return self.act.forward(self.c2(self.act(self.normed(x))))


def norm_by_forward(self: Any, x: Tensor) -> Any:
    return self.bn.forward(self.c2(self.act(self.normed(x))))


def failing_way(self: Any, x: Tensor) -> Any:
    y = self.act(self.normed(x))
    if x.sum() < 1e9:
        return self.act(self.c2(y)) * float(x.mean())
    return self.c2(y)


def number_added(self: Any, x: Tensor) -> Any:
    return F.relu(self.normed(x) + x.shape[0])


def number_added_in_place(self: Any, x: Tensor) -> Any:
    y = self.normed(x)
    y += x.shape[0]
    return F.relu(y)


def number_and_branch(self: Any, x: Tensor) -> Any:
    return x.shape[0] + self.gamma * self.c(x)


def other_shape_in_place(self: Any, x: Tensor) -> Any:
    y = self.normed(x[:, :, :1])
    y += x
    return y


def branch_of_other_shape_in_place(self: Any, x: Tensor) -> Any:
    y = self.gamma * self.c(x[:, :, :1])
    y += x
    return y


def ordered_dict(self: Any, x: Tensor) -> Any:
    return OrderedDict(y=F.relu(self.normed(x) + x))


def seeded(self: Any, x: Tensor) -> Any:
    torch.manual_seed(3)
    return self.drop(F.relu(self.normed(x) + x))


def forked(self: Any, x: Tensor) -> Any:
    with torch.random.fork_rng(devices=[]):
        y = self.drop(x)
    return F.relu(self.normed(y) + x)


def tuple_unpacked(self: Any, x: Tensor) -> Any:
    y = self.block(x) * float(x.mean())
    _, n, _ = self.block.seq
    return n(y)


def list_of_parts(self: Any, x: Tensor) -> Any:
    y = self.block(x) * float(x.mean())
    return list(self.block.seq)[2](y)


def instance_function(self: Any, x: Tensor) -> Any:
    return self.head(self, self.block(x) * float(x.mean()))


def takes_none(self: Any, x: Tensor) -> Any:
    return self.skip(self.skip2(x, None), x)


def child_of_none(self: Any, x: Tensor) -> Any:
    y, r = self.normed(x), self.none(x)
    if r is not None:
        y = y + r
    return F.relu(y)


def reads_grandchild(self: Any, x: Tensor) -> Any:
    return self.gated(x) + self.gated.gate(self.c2(x))


# Modules beside those of Net, and the forward.
MODELS: dict[str, tuple[dict[str, Callable[[], Any]], Callable[[Any, Tensor], Any]]] = {
    f.__name__: ({}, f)
    for f in (
  in_attribute, in_object, in_global, gate_in_global,
        no_grad_around_activation, activation_by_forward, norm_by_forward, failing_way,
        number_added, number_added_in_place, number_and_branch, other_shape_in_place,
        branch_of_other_shape_in_place,  ordered_dict, seeded,
        forked,
    )
}  # fmt: skip
MODELS |= {f.__name__: ({"block": Block}, f) for f in (tuple_unpacked, list_of_parts)}
MODELS |= {
    "instance_function": (
        {"block": Block, "head": lambda: lambda self, y: self.block.act(y)}, instance_function),
    "takes_none": ({"skip": Skip, "skip2": Skip}, takes_none),
    "child_of_none": ({"none": NoneOf}, child_of_none),
    "overridden_call": (
        {"doubled": Doubling},
        lambda self, x: F.relu(self.normed(self.doubled(x)) + x)),
    "argument_named_residual": (
        {"inner": Residual}, lambda self, x: F.relu(self.inner(x) + x)),
    "argument_named_residual, deeper": (
        {"inner": lambda: nn.Sequential(Residual())}, lambda self, x: F.relu(self.inner(x) + x)),
}  # fmt: skip


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    more, forward = MODELS[name]
    net = type("Model", (Net,), {"forward": forward, "__module__": __name__})()
    for key, make in more.items():
        setattr(net, key, make())
    return net.double()


def seen(net: nn.Module, x: Tensor) -> list[Any]:
    """Output, stored tensors, gradients, buffers and the random numbers that come next."""
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    net.zero_grad()
    try:
        result = net(leaf)
    except RuntimeError as error:
        return [type(error), [b.clone() for b in net.buffers()]]
    kind = type(result)
    values = list(result.values()) if isinstance(result, dict) else result
    outputs = list(values) if isinstance(values, (list, tuple)) else [values]
    outputs += [vars(net).get("tap"), net.holder.value, LOG.pop("value", None)]
    outputs = [o for o in outputs if o is not None]
    sum((o * o.detach().cos()).sum() for o in outputs if o.requires_grad).backward()
    gradients = [leaf.grad, *(p.grad for p in net.parameters())]
    buffers = [b.clone() for b in net.buffers()]
    return [kind, [o.detach() for o in outputs], gradients, buffers, torch.rand(2)]


def assert_same(results: list[Any], expected: list[Any]) -> None:
    assert results[0] is expected[0]
    assert len(results) == len(expected)
    for one, other in zip(results[1:], expected[1:]):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_same_as_before(name: str) -> None:
    stock = model(name)
    converted = model(name)
    state = torch.get_rng_state()
    fusedtrain.convert(converted)
    assert torch.equal(torch.get_rng_state(), state)
    for training in (True, False, True):
        x = torch.randn(3, 4, 6, 5, dtype=torch.float64)
        assert_same(seen(converted.train(training), x), seen(stock.train(training), x))


def test_two_gates_without_a_norm() -> None:
    """One in the block; the other call stays."""
    forward = lambda self, x: self.block(x) + self.block.gate(self.c(x))  # noqa: E731
    outer = model_of(forward, block=Gate(), c=nn.Conv2d(4, 4, 1))
    assert len(compared(outer, torch.randn(2, 4, 3, 3)).products) == 1


def test_a_child_that_reaches_for_its_parent() -> None:
    block = Block()
    outer = model_of(lambda self, x: self.child(self.block(x)), block=block, child=Child(block))
    report = compared(outer, torch.randn(2, 4, 3, 3))
    assert [norm.name for norm in report.norms] == ["block.bn", "block.seq.1"]


def test_numpy_is_asked_in_the_forward() -> None:
    numpy = pytest.importorskip("numpy")

    class Dropping(Residual):
        def forward(self, x: Tensor) -> Tensor:
            if numpy.random.rand() < 0.5:
                return x
            return F.relu(super().forward(x) + x)

    numpy.random.seed(0)
    random.seed(0)
    stock = Dropping()
    converted, x = copy.deepcopy(stock), torch.randn(2, 4, 3, 3)
    before = numpy.random.get_state()[2]
    fusedtrain.convert(converted)
    assert numpy.random.get_state()[2] == before
    for seed in range(6):
        numpy.random.seed(seed)
        expected = stock(x)
        numpy.random.seed(seed)
        torch.testing.assert_close(converted(x), expected)


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.LeakyReLU(0.1)
        self.slope, self.label = 0.5, "unread"

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn(self.conv(x)) + x) * self.scale()
        return y * self.act(x)

    def scale(self) -> float:
        return self.slope

    def shown(self) -> str:
        return self.label


@pytest.mark.parametrize("path", ["slope", "act.negative_slope"])
def test_a_number_that_the_new_forward_was_made_with(path: str) -> None:
    """A changed one counts: the forward of the class runs, or the op reads it at each call."""
    model, x = Slope(), torch.randn(2, 3, 4, 4)
    twin = copy.deepcopy(model)
    fusedtrain.convert(model, memory="recompute")
    model.label = "changed"
    for one in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(one(x), copy.deepcopy(twin)(x))
        *before, name = path.split(".")
        setattr(one.get_submodule(".".join(before)), name, 0.9)
        reference = copy.deepcopy(twin)
        setattr(reference.get_submodule(".".join(before)), name, 0.9)
        with (
            pytest.warns(UserWarning, match=rf"`{name}` .*fusedtrain\.revert")
            if not before
            else (contextlib.nullcontext())
        ):
            got = one(x)
        torch.testing.assert_close(got, reference(x))
        fusedtrain.revert(one)
        one(x)
