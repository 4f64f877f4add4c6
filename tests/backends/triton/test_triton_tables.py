"""Tables of addresses that Triton's optimizer keeps from step to step: they must be those of this
step whatever has become of the tensors since the last."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fusedtrain.reference import optimizers
from fusedtrain.reference.state_codes import SIGNED
from helpers.backends import HAS_GPU
from helpers.optimizer_cases import BF16, F32, F64, Case, Spec, bits
from helpers.optimizer_ops import BACKENDS, step_alike
from helpers.optimizers import busy

pytestmark = pytest.mark.skipif(
    HAS_GPU, reason="needs a machine without a GPU: there every step has other memory"
)


@pytest.fixture
def kernels() -> Any:
    return BACKENDS["triton"]()


@pytest.fixture
def built(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Parts made anew: "tables", "gradients" (their column), "numbers" (options and rates)."""
    from fusedtrain.triton import _optimizer_calls as _calls, _optimizer_tables as _tables

    made: list[str] = []
    build, gradients, send = (
        _tables.Tables.__post_init__, _tables.Tables.with_gradients, _calls.send,
    )  # fmt: skip
    monkeypatch.setattr(
        _tables.Tables, "__post_init__", lambda self: (made.append("tables"), build(self))[1]
    )
    monkeypatch.setattr(
        _tables.Tables,
        "with_gradients",
        lambda self, addresses: (made.append("gradients"), gradients(self, addresses))[1],
    )
    monkeypatch.setattr(
        _calls, "send", lambda *arguments: (made.append("numbers"), send(*arguments))[1]
    )
    _calls._kept.clear()
    yield made
    _calls._kept.clear()


def _case(**step: Any) -> Case:
    specs = [Spec((30, 7)), Spec((5,), F64), Spec((33,), BF16, master=True), Spec((8, 3), group=1)]
    return Case("adam", specs, [busy("adam"), busy("adam", lr=0.01)], measures=7, **step)


def _gradients_elsewhere(case: Case) -> None:
    case.grads = [torch.empty_like(g).copy_(g) for g in case.grads]


def _gradients_misaligned(case: Case) -> None:
    g = case.grads[0]
    case.grads[0] = torch.empty(g.numel() + 1)[1:].view(g.shape).copy_(g)


def _gradient_of_another_dtype(case: Case) -> None:
    case.grads[0] = case.grads[0].bfloat16()


def _gradients_swapped(case: Case) -> None:
    case.grads[0].data, case.grads[3].data = (
        torch.randn_like(case.grads[0]), torch.randn_like(case.grads[3]),
    )  # fmt: skip


def _state_elsewhere(case: Case) -> None:
    case.states[0] = case.states[0] + 1


def _state_of_another_dtype(case: Case) -> None:
    """At the same address."""
    first = case.states[0]
    half = first.view(BF16).flatten()[: first.numel()].view(first.shape)
    half.copy_(torch.rand(first.shape) + 0.5)
    case.states[0] = half


def _parameter_elsewhere(case: Case) -> None:
    case.params[0] = case.params[0] + 1


def _parameter_transposed(case: Case) -> None:
    """At the same address, of the same size."""
    square = torch.randn(6, 6)
    for name in ("params", "grads"):
        getattr(case, name)[3] = getattr(case, name)[3].new_empty(6, 6).copy_(square)
    used = [int(i) for i in case.rows[3][2:5] if i >= 0]
    for i in used:
        case.states[i] = torch.rand(6, 6)
    case.params[3].data = case.params[3].data.t()
    case.grads[3].data = torch.randn(6, 6).t()
    for i in used:
        case.states[i].data = case.states[i].data.t()


def _master_elsewhere(case: Case) -> None:
    case.masters[0] = case.masters[0] + 1


def _rate(case: Case) -> None:
    case.table[1, 0] = 0.125


def _groups_swapped(case: Case) -> None:
    case.rows[:, 0] = 1 - case.rows[:, 0]


def _units_clipped(case: Case) -> None:
    case.set("unit_factor", 0.05)


CHANGES: dict[Callable[[Case], None], set[str]] = {
    _gradients_elsewhere: {"gradients"},
    _gradients_misaligned: {"tables"},
    _gradient_of_another_dtype: {"tables"},
    _gradients_swapped: {"gradients"},
    _state_elsewhere: {"tables"},
    _state_of_another_dtype: {"tables"},
    _parameter_elsewhere: {"tables"},
    _parameter_transposed: {"tables"},
    _master_elsewhere: {"tables"},
    _rate: {"numbers"},
    _groups_swapped: {"tables"},
    _units_clipped: {"tables"},
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__[1:])
def test_changes_are_seen(kernels: Any, built: list[str], change: Callable[[Case], None]) -> None:
    case = _case()
    step_alike(kernels, case)
    assert built[0] == "tables"
    built.clear()
    step_alike(kernels, case)
    assert built == [], "nothing has changed"
    change(case)
    step_alike(kernels, case)
    assert CHANGES[change] == set(built) - ({"numbers"} if "tables" in built else set())
    built.clear()
    step_alike(kernels, case)
    assert built == []


def test_scales_elsewhere(kernels: Any, built: list[str]) -> None:
    spec = Spec((70,), states=[0], state_dtype=SIGNED)
    case = Case("sgd", [spec], [busy("sgd")], measures=7)
    for _ in range(2):
        expected, old = case.clone(), case.states[1]
        optimizers.optimizer_step(*expected.arguments(), None, None)
        kernels.optimizer_step(*case.arguments(), None, None)
        assert [bits(t) for t in case.states] == [bits(t) for t in expected.states]
        case.states[1] = old.clone()
        old.fill_(float("nan"))


def test_gradients_that_come_and_go(kernels: Any, built: list[str]) -> None:
    """As after ``zero_grad``: in memory that takes turns; each place is known after one round."""
    case = _case()
    turns = [[torch.randn_like(g) for g in case.grads] for _ in range(3)]
    for turn in (0, 1, 2, 0, 1, 2):
        case.grads = turns[turn]
        step_alike(kernels, case)
    assert built.count("tables") == 1
    assert built.count("gradients") == 2


def test_tensors_with_gaps_are_copied_in_each_step(kernels: Any, built: list[str]) -> None:
    case = _case(write_back=1)
    case.grads[3] = torch.randn(8, 6)[:, ::2]
    for _ in range(2):
        step_alike(kernels, case)
    assert built.count("tables") == 2


def test_the_same_memory_of_other_tensors(kernels: Any, built: list[str]) -> None:
    """A new optimizer where a freed one was: the tables hold, and so do the results."""
    memory = torch.zeros(4, 210)
    for seed in range(2):
        torch.manual_seed(seed)
        case = Case("adam", [Spec((30, 7))], [busy("adam")], measures=7)
        for name in ("params", "grads"):
            place = memory[0 if name == "params" else 1].view(30, 7)
            getattr(case, name)[0] = place.copy_(getattr(case, name)[0])
        step_alike(kernels, case)


def test_nothing_is_kept_alive(kernels: Any, built: list[str]) -> None:
    case = _case()
    kernels.optimizer_step(*case.arguments(), None, None)
    alive = [weakref.ref(t) for t in (*case.params, *case.grads, *case.states, *case.masters)]
    del case
    gc.collect()
    assert [ref() for ref in alive if ref() is not None] == []


def test_few_tables_are_kept(kernels: Any, built: list[str]) -> None:
    from fusedtrain.triton import _optimizer_calls as _calls

    for n in range(1, 12):
        case = Case("sgd", [Spec((n,))], [busy("sgd")])
        for _ in range(6):
            _gradients_elsewhere(case)
            kernels.optimizer_step(*case.arguments(), None, None)
    assert len(_calls._kept) == _calls._TABLES
    assert all(len(k.entries) <= _calls._GRADIENTS for k in _calls._kept.values())


def test_options_of_a_rule_are_not_those_of_another(kernels: Any, built: list[str]) -> None:
    """The same tensors, the same groups, another rule."""
    case = Case("adam", [Spec((30, 7), F32, states=[0, 1])], [busy("adam")], measures=7)
    step_alike(kernels, case)
    other = Case("nadamw", [Spec((30, 7), F32, states=[0, 1])], [busy("nadamw")], measures=7)
    for name in ("params", "grads", "states"):
        setattr(other, name, getattr(case, name))
    step_alike(kernels, other)
