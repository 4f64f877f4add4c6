"""Commands that run or trace a model leave it, and all that it reaches, as it was; a forward that
does more than its graph says keeps its own code. Each beside the stock model."""

from __future__ import annotations

import copy
import queue
import random
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from fusedtrain._graph.state import Preserver, State

CALLS = {"n": 0}
CALLED = 0


@dataclass
class Meter:
    calls: int = 0


class Slotted:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: list[int] = []


class Net(nn.Module):
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU()
        self.head = nn.Linear(8, 2)
        self.meter, self.space, self.slots = Meter(), types.SimpleNamespace(n=0), Slotted()
        self.rows: list[int] = []
        self.table: dict[str, Any] = {"inner": [0]}
        self.recent: deque[int] = deque(maxlen=3)
        self.counter: Counter[str] = Counter()
        self.steps = 0
        self.register_buffer("written", torch.zeros(()))

    def effect(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        self.effect(x)
        x = self.act(self.norm(self.conv(x)))
        output: Tensor = self.head(x.mean((2, 3)))
        return output


def _global_table() -> None:
    CALLS["n"] += 1


def _global_name() -> None:
    global CALLED
    CALLED += 1


def _class_attribute(self: Net) -> None:
    Net.total += 1


def _meter(self: Net) -> None:
    self.meter.calls += 1


def _space(self: Net) -> None:
    self.space.n += 1


def _steps(self: Net) -> None:
    self.steps += 1


# An effect of a forward, and a number that shows how often it came.
EFFECTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], int]]] = {
    "attribute": (_steps, lambda m: m.steps),
    "buffer": (lambda m: m.written.add_(1), lambda m: int(m.written)),
    "output in a list": (lambda m: m.rows.append(m.head.weight * 2), lambda m: len(m.rows)),
    "object": (_meter, lambda m: m.meter.calls),
    "namespace": (_space, lambda m: m.space.n),
    "list": (lambda m: m.rows.append(1), lambda m: len(m.rows)),
    "list of an object": (lambda m: m.slots.rows.append(1), lambda m: len(m.slots.rows)),
    "nested list": (lambda m: m.table["inner"].append(1), lambda m: len(m.table["inner"])),
    "dict": (lambda m: m.table.update({str(len(m.table)): 1}), lambda m: len(m.table)),
    "counter": (lambda m: m.counter.update("n"), lambda m: m.counter["n"]),
    "global table": (lambda m: _global_table(), lambda m: CALLS["n"]),
    "global name": (lambda m: _global_name(), lambda m: CALLED),
    "class": (_class_attribute, lambda m: Net.total),
}  # fmt: skip


def image(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 3, 8, 8)), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_of_a_forward_go_on(name: str) -> None:
    effect, number = EFFECTS[name]
    made = type("Made", (Net,), {"effect": lambda self, x: effect(self), "__module__": __name__})
    model = made()
    before = number(model)
    report = fusedtrain.convert(model)
    assert number(model) == before
    if name != "buffer":  # which its graph writes to, too
        assert "its forward stores something" in report.left[0].reason
        assert not has_own_forward(model)
    fusedtrain.convert(model, image())
    assert number(model) == before
    for _ in range(3):
        model(image())
    assert number(model) == before + 3


@pytest.mark.parametrize("kind", [queue.Queue, count])
def test_a_forward_that_uses_what_nobody_can_look_into_keeps_its_code(kind: Any) -> None:
    class Made(Net):
        def __init__(self) -> None:
            super().__init__()
            self.source = kind()

        def effect(self, x: Tensor) -> None:
            self.source.put(1) if kind is queue.Queue else next(self.source)

    report = fusedtrain.convert(Made())
    assert f"its forward uses a {kind.__name__}" in report.left[0].reason


class Codebook(Net):
    """Writes to parameters, with and without `.data`, and initialises itself on the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.ones(8, 1, 1))
        self.decay = torch.zeros(8)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        if self.training:
            with torch.no_grad():
                mean = x.mean((0, 2, 3))
                self.codes.mul_(0.9).add_(mean, alpha=0.1)
                self.codes.data += mean
                self.decay += mean
                if not self.ready:
                    self.scale.data = 1 / x.std((0, 2, 3))[:, None, None]
                    self.ready = True
        self.last = x
        output: Tensor = self.head((x * self.scale).mean((2, 3))) + self.codes.sum()
        return output


def numbers(model: nn.Module) -> dict[str, Tensor]:
    named = {name: value.detach().clone() for name, value in model.state_dict().items()}
    attributes = {k: v for k, v in vars(model).items() if isinstance(v, Tensor)}
    return named | {name: value.detach().clone() for name, value in attributes.items()}


Command = Callable[[nn.Module], object]
COMMANDS: dict[str, Command] = {
    "convert": lambda m: fusedtrain.convert(m, image()),
    "dry_run": lambda m: fusedtrain.convert(m, image(), dry_run=True),
    "autocast": lambda m: torch.autocast("cpu", torch.bfloat16)(fusedtrain.convert)(m, image()),
    "plan_memory": lambda m: fusedtrain.plan_memory(m, image(), 1.0),
    "memory_report": lambda m: fusedtrain.memory_report(m, image()),
    "fold_conv_bn": lambda m: fusedtrain.fold_conv_bn(m, example_inputs=image()),
    "fold_frozen_norms": lambda m: fusedtrain.fold_frozen_norms(m, image()),
}


@pytest.fixture
def generators() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate()
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.filterwarnings("ignore:fold_conv_bn folded no norm")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("used", [False, True])
def test_a_model_is_as_it_was(command: str, used: bool, generators: None) -> None:
    torch_state = torch.get_rng_state()
    model = Codebook()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    if used:  # a tensor with a graph stays in an attribute
        model(image())
    torch.set_rng_state(torch_state)
    before, attributes = numbers(model), model.ready
    pointers = [p.data_ptr() for p in model.parameters()]
    COMMANDS[command](model)
    after = numbers(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert (model.ready, [p.data_ptr() for p in model.parameters()]) == (attributes, pointers)
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert (model.codes.grad, hasattr(model, "last")) == (None, used)


def test_training_after_convert_is_that_of_the_stock_model() -> None:
    torch.manual_seed(0)
    model = Codebook()
    stock = copy.deepcopy(model)
    fusedtrain.convert(model, image())
    for step in range(3):
        for one in (model, stock):
            one(image() + step).square().mean().backward()
    torch.testing.assert_close(numbers(model), numbers(stock))


def test_a_loss_that_is_chosen_from_the_labels() -> None:
    """As transformers' heads for classification do it, once, in their configuration."""

    class Made(Net):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(problem=None)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            x = super().forward(x)
            if labels is None:
                return x
            if self.config.problem is None:
                integers = labels.dtype in (torch.long, torch.int)
                self.config.problem = "classes" if integers else "regression"
            if self.config.problem == "classes":
                return nn.functional.cross_entropy(x, labels)
            return nn.functional.mse_loss(x, labels)

    model = Made()
    fusedtrain.convert(model, image())
    assert model.config.problem is None
    assert model(image(), torch.zeros(4, 2)).ndim == 0
    assert model.config.problem == "regression"


def test_hooks_that_collect() -> None:
    model, seen = Net(), []
    model.act.register_forward_hook(lambda module, args, output: seen.append(output))
    fusedtrain.convert(model, image())
    fusedtrain.plan_memory(model, image(), 1.0)
    assert seen == []
    model(image())
    assert len(seen) == 1


def test_only_what_is_written_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as large as half of the memory can be looked at."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3))
    copied: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(
        torch.UntypedStorage, "clone", lambda s: copied.append(s.nbytes()) or clone(s)
    )
    fusedtrain.convert(model, image(), dry_run=True)
    statistics = 64 * 4 * 2 + 8
    assert set(copied) == {64 * 4, 8}
    assert sum(copied) % statistics == 0


def test_parameters_that_are_not_initialized() -> None:
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.BatchNorm2d(8), nn.ReLU())
    with pytest.raises(RuntimeError, match=r"0\.weight: is not initialized yet; call the model"):
        fusedtrain.convert(model, image())
    model(image())
    assert fusedtrain.convert(model, image()).norms


def test_state_of_places() -> None:
    """A change of each kind is seen and taken back; another object of the same number is none."""
    model = Net()
    state = State([model])
    model.steps, model.meter.calls = int("0"), int("0")
    assert not state.changed()
    model.steps, model.extra, model.meter.new = 5, [], 1
    del model.space.n
    model.rows += [1, 2]
    model.recent.append(1)
    Net.later = 1
    model.head = nn.Linear(1, 1)
    assert state.changed()
    state.restore()
    assert not state.changed()
    assert (model.steps, model.rows, list(model.recent), model.space.n) == (0, [], [], 0)
    assert not hasattr(model, "extra")
    assert not hasattr(Net, "later")
    assert model.head.in_features == 8


def test_memory_that_is_resized_or_replaced() -> None:
    """As observers of torch.ao do at their first call."""

    class Observer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("least", torch.tensor([]))
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.least.resize_(3).copy_(x.amin(0))
            self.weight.data = self.weight.data[:2].clone()
            self.weight.requires_grad_(False)
            return x * 2

    model = Observer()
    preserver = Preserver(model)
    for _ in range(2):
        with preserver():
            model(torch.randn(4, 3))
        assert model.least.shape == (0,)
        assert torch.equal(model.weight, torch.ones(3))
        assert model.weight.requires_grad
