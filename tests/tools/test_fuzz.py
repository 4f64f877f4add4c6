"""The fuzz itself (tests/fuzz, `make fuzz`): it finds faults that are planted, tells them by a
program that fails, and draws the same programs of the same seed."""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import fusedtrain
from fusedtrain import functional, optim
from fusedtrain._graph.guards import Guards
from fuzz import engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def slope_is_off(right: Any) -> Any:
    return lambda x, *rest, **options: right(x, *rest, **options) + 0.02 * (x - x.detach())


def sign_is_wrong(right: Any) -> Any:
    return lambda x: -right(x)


def strides_are_mistaken(right: Any) -> Any:
    """As a kernel would that takes expanded memory for dense."""
    return lambda x: right(x) if 0 not in x.stride() else right(x.flip(-1) + 1)


def no_weight_decay(right: Any) -> Any:
    return lambda params, **options: right(params, **{**options, "weight_decay": 0})


def forgets_momentum(right: Any) -> Any:
    class Forgetful(right):
        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict({**state_dict, "state": {}})

    return Forgetful


def reads_before_a_write(_: Any) -> Any:
    """A convert that takes the operands of sums where they are made, not where they are added."""
    return moved


class Whole(fx.Tracer):
    """Looks into no module but the first."""

    def is_leaf_module(self, *_: Any) -> bool:
        return True


def moved(model: nn.Module, *_: Any, **__: Any) -> None:
    graph = Whole().trace(model)
    for node in list(graph.nodes):
        for operand in node.args if node.target in (operator.add, torch.add) else ():
            if isinstance(operand, fx.Node):
                with graph.inserting_after(operand):
                    early = graph.call_method("clone", (operand,))
                node.replace_input_with(operand, early)
    model.forward = fx.GraphModule(model, graph).forward


def guards_are_blind(_: Any) -> Any:
    return lambda guards: None


# Family, generator, what is replaced, by what, and how many cases must do.
FAULTS: list[tuple[str, str, Any, str, Callable[[Any], Any], int]] = [
    ("ops", "mish", functional, "mish", slope_is_off, 20),
    ("ops", "tanh", functional, "tanh", sign_is_wrong, 5),
    ("ops", "sigmoid", functional, "sigmoid", strides_are_mistaken, 120),
    ("optimizers", "AdamW", optim, "AdamW", no_weight_decay, 40),
    ("optimizers", "SGD", optim, "SGD", forgets_momentum, 150),
    ("models", "convert", fusedtrain, "convert", reads_before_a_write, 80),
    ("edits", "edits", Guards, "changed", guards_are_blind, 40),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[4].__name__)
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family, name, owner, attribute, wrong, cases = fault
    right = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, wrong(right))
    outcome = engine.run_task(engine.Task(family, name, 1, cases, shrink_seconds=1))
    assert outcome.failure is not None
    assert len(outcome.failure.splitlines()) < 90
    assert outcome.error
    assert engine.run_program(outcome.failure), "the program fails by itself"
    # The fault is to blame. (That convert does nothing wrong is what the fuzz itself finds out.)
    harmless = right if owner is not fusedtrain else lambda *_, **__: None
    monkeypatch.setattr(owner, attribute, harmless)
    assert engine.run_program(outcome.failure) is None


def test_programs_that_plain_torch_cannot_run_are_set_aside() -> None:
    assert engine.run_program("want = 1 / 0") == ""
    assert engine.run_program("raise SystemExit('no')") == ""
    assert engine.run_program("results = 1 / 0") == "ZeroDivisionError: division by zero"
    assert engine.run_program("import torch\ntorch.manual_seed(3)") is None


GENERATORS = [(family, name) for family, names in engine.FAMILIES.items() for name in names]


def drawn(family: str, name: str, seed: int, cases: int = 4) -> list[str]:
    return engine.run_task(engine.Task(family, name, seed, cases), keep=True, run=False).programs


def test_every_public_name_is_called() -> None:
    """And every program is Python."""
    every = dict.fromkeys(engine.FAMILIES, "")
    for family, name in GENERATORS:
        for source in drawn(family, name, 3, 2):
            ast.parse(source)
            every[family] += source
    functions = [n for n, f in vars(functional).items() if n[0] != "_" and inspect.isfunction(f)]
    for name in functions:
        assert f"F.{name}(" in every["ops"], name
    for name in fusedtrain.nn.__all__:
        assert f"fusedtrain.nn.{name}(" in every["ops"] or name == "SyncBatchNormAct", name
    for name in set(optim.__all__) - {"FusedOptimizer", "FusedOptions"}:
        assert f"fusedtrain.optim.{name}(" in every["optimizers"], name
    for name in ("convert", "fold_conv_bn", "fold_frozen_norms", "drop_redundant_bias", "revert"):
        assert f"fusedtrain.{name}(" in every["models"], name
