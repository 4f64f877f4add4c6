"""The optimizer on Triton alone, interpreted (or on a GPU): sizes and alignments, orders of
programs, how many launches.

The numbers: test_optimizer_kernels.py; the compiled code: test_triton_optimizer_code.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import RULES, optimizers
from helpers.backends import HAS_GPU
from helpers.observed import Counted
from helpers.optimizer_cases import BF16, F16, F32, F64, RULE_NAMES, Case, Spec, bits
from helpers.optimizer_ops import BACKENDS, assert_close, case_of, placed_on, step_alike
from helpers.optimizers import busy
from helpers.triton_interpreter import ORDERS, programs_in

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def kernels() -> Any:
    return BACKENDS["triton"]()


# --- what the CPU kernels are held to besides: test_optimizer_kernels.py


STATES = [
    (rule.name, states)
    for rule in RULES
    for states in ([], [0], [0, 1], [0, 2], [0, 1, 2])
    if rule.least <= len(states) and max(states, default=-1) < rule.most
    if rule.least != 2 or states[1:2] != [2]
]


@pytest.mark.parametrize(("rule", "states"), STATES, ids=str)
def test_states(kernels: Any, rule: str, states: list[int]) -> None:
    """The states that there are, each time in another dtype; others read as 0."""
    dtypes = [(F32, None), (F64, None), (BF16, BF16), (F16, F32)]
    specs = [Spec((3, 50), d, states=states, state_dtype=s) for d, s in dtypes]
    case = Case(rule, specs, [busy(rule, cautious=1)], measures=7, trial=1)
    expected = case.clone()
    for _ in range(2):
        optimizers.optimizer_step(*expected.arguments(), None, None)
        kernels.optimizer_step(*case.arguments(), None, None)
    assert_close(case, expected)


# --- sizes, places in memory, orders


def _misaligned(t: Tensor, by: int) -> Tensor:
    return torch.empty(t.numel() + by, dtype=t.dtype)[by:].view(t.shape).copy_(t)


@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sizes_and_alignments(kernels: Any, dtype: torch.dtype, units: bool) -> None:
    shapes = [(n,) for n in (0, 1, 15, 17, 1023, 1024, 4097, 8193)] + [(1, 8200), (3, 8200)]
    options = {"unit_factor": 0.2} if units else {}
    specs = [Spec(s, dtype) for s in shapes]
    case = Case("adam", specs, [busy("adam")], measures=7, write_back=1, **options)
    for i, t in enumerate(case.grads):
        case.grads[i] = _misaligned(t, i % 2)
    case.params[3] = _misaligned(case.params[3], 1)
    torch.testing.assert_close(*step_alike(kernels, case), rtol=1e-9, atol=0)


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU: there all tests do so")
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_tensors_that_were_placed(
    kernels: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: copies are misaligned like their tensors, and written values come back."""
    from fusedtrain.triton import _optimizer_tables as _tables

    case = Case("adam", [Spec((40, 7), F32, layout), Spec((33,))], [busy("adam")], write_back=1)
    case.grads[1] = _misaligned(case.grads[1], 1)
    expected = case.clone()
    entry, aligned = _tables.Tables._entry, []

    def seen(self: Any, i: int) -> Any:
        made = entry(self, i)
        aligned.append(made[0].aligned)
        return made

    monkeypatch.setattr(_tables.Tables, "_entry", seen)
    placed_on("cpu").optimizer_step(*case.arguments(), None, None)
    assert aligned == [True, False]
    optimizers.optimizer_step(*expected.arguments(), None, None)
    assert_close(case, expected)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels_last", "sliced"])
def test_units_of_layouts(
    kernels: Any,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """In one piece and in several."""
    from fusedtrain.triton import _optimizer_tables, optimizers

    def clear() -> None:
        for name in ("measure", "prepare", "try", "update"):
            getattr(optimizers, f"_{name}_constants").cache_clear()

    for module in (_optimizer_tables, optimizers):
        monkeypatch.setattr(module, "CHUNK", 64)
    monkeypatch.setattr(optimizers, "_BLOCK", 32)
    monkeypatch.setattr(optimizers, "_ADD_BLOCK", 4)
    clear()
    request.addfinalizer(clear)
    specs = [Spec((3, 5, 4, 5), layout=layout), Spec((70,)), Spec((2, 30), F64, layout)]
    case = Case("sgd", specs, [busy("sgd")], measures=7, unit_factor=0.1, write_back=1)
    step_alike(kernels, case)


# Rules that prepare norms and a trial, a norm, bias corrections; the others prepare less.
@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        rule if rule in ("lamb", "novograd", "adam") else pytest.param(rule, marks=pytest.mark.long)
        for rule in RULE_NAMES
    ],
)
def test_more_tensors_than_a_program_prepares(kernels: Any, rule: str) -> None:
    groups = [busy(rule, cautious=1), busy(rule, lr_index=0), busy(rule, lr_index=1)]
    lrs = [torch.tensor(0.25, dtype=F64), torch.tensor([0.5])]
    count = 70
    specs = [Spec((3 + i % 5,), F32 if i % 7 else F64, group=i % 3) for i in range(count)]
    step = {"scale": 8.0, "found_inf": 0.0, "max_norm": 5.0, "norm_eps": 0.5, "trial": 1}
    case = Case(rule, specs, groups, lrs=lrs, measures=7, **step)
    case.rows[:, 1] = torch.arange(count).flip(0)  # whose scalars are whose
    case.scalars[0] = torch.arange(count) ** 2 * 3500  # up to 2^24, where float32 ceases to count
    case.scalars[1:] = torch.rand(2, count)
    expected = case.clone()
    optimizers.optimizer_step(*expected.arguments(), None, None)
    kernels.optimizer_step(*case.arguments(), None, None)
    assert_close(case, expected)
    assert torch.equal(case.scalars[0], expected.scalars[0])


@pytest.mark.slow
@pytest.mark.skipif(
    HAS_GPU, reason="needs a machine without a GPU: threads of a GPU have an order of their own"
)
@pytest.mark.parametrize("units", [False, True])
def test_order_of_programs(
    kernels: Any,
    units: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    from fusedtrain.triton import optimizers

    monkeypatch.setattr(optimizers, "_TAIL_BLOCK", 4)  # several programs prepare, too
    optimizers._prepare_constants.cache_clear()
    request.addfinalizer(optimizers._prepare_constants.cache_clear)
    options = {"unit_factor": 0.1} if units else {"max_norm": 1.0}
    case = case_of("lamb", measures=7, trial=1, write_back=1, stochastic=1, **options)
    results = []
    for order in ORDERS:
        copy = case.clone()
        with programs_in(order):
            sums = kernels.optimizer_step(*copy.arguments(), None, None)
        results.append([bits(t) for _, t in copy.written()] + [bits(sums)])
    assert results[0] == results[1] == results[2]


def test_errors(kernels: Any) -> None:
    case = Case("adam", [Spec((4, 6))], [busy("adam")])
    before = [bits(t) for _, t in case.written()]
    for name, bad, match in (
        ("grads", torch.zeros(4, 6, dtype=torch.int32), "grad must be float32"),
        ("states", torch.zeros(6, 4).t(), "same shape and strides"),
        ("params", torch.zeros(4, 5), "must have its shape"),
    ):
        broken = case.clone()
        getattr(broken, name)[0] = bad
        with pytest.raises(RuntimeError, match=match):
            kernels.optimizer_step(*broken.arguments(), None, None)
    for name, bad, match in (
        ("scale", torch.ones(1, dtype=F64), "scale"),
        ("found_inf", torch.zeros(2), "found_inf"),
        ("control", torch.zeros(8, dtype=F64), "control"),
        ("lrs", [torch.ones(1, dtype=BF16)], "lr must be one"),
        ("rows", case.rows + torch.tensor([1, 0, 0, 0, 0, 0, 0]), "group"),
    ):
        broken = case.clone()
        broken.table = case.table.clone()
        broken.table[1, 1] = -1.0 if name != "lrs" else 0.0
        setattr(broken, name, bad)
        with pytest.raises(RuntimeError, match=match):
            kernels.optimizer_step(*broken.arguments(), None, None)
    with pytest.raises(RuntimeError, match="sums"):
        kernels.optimizer_step(*case.arguments(), torch.zeros(1, 3), None)
    if not HAS_GPU:
        broken = case.clone()
        broken.params[0] = torch.empty(4, 6, device="meta")
        with pytest.raises(RuntimeError, match="one device"):
            kernels.optimizer_step(*broken.arguments(), None, None)
    assert before == [bits(t) for _, t in case.written()]


# --- launches


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    from fusedtrain.triton.launch import Launcher

    names: list[str] = []
    call = Launcher.__call__

    def counted(self: Any, *arguments: Any) -> None:
        names.append(self._kernel.fn.__name__)
        call(self, *arguments)

    monkeypatch.setattr(Launcher, "__call__", counted)
    return names


def test_launches_of_a_step(kernels: Any, launched: list[str]) -> None:
    """One a sweep for all tensors of a kind, however many; and no number is waited for."""
    for count, extra in ((1, []), (5, []), (5, [Spec((7,), BF16)])):
        case = Case("adam", [Spec((30, 7))] * count + extra, [busy("adam")], measures=7)
        kinds = 1 + len(extra)
        measured = [*["measure_kernel"] * kinds, "add_kernel", "prepare_kernel"]
        tried = [*["try_kernel"] * kinds, "add_kernel", "prepare_kernel"]
        updated = ["update_kernel"] * kinds
        for trial, expected in ((0, measured + updated), (1, measured + tried + updated)):
            case.set("trial", trial)
            launched.clear()
            with Counted() as counted:
                kernels.optimizer_step(*case.arguments(), None, None)
            assert launched == expected
            if not HAS_GPU:
                waits = ("_local_scalar_dense", "nonzero", "item")
                assert not [c for c in counted.calls if any(w in c for w in waits)]
    launched.clear()
    empty = Case("adam", [Spec((0,)), Spec((3, 0))], [busy("adam")], measures=0)
    kernels.optimizer_step(*empty.arguments(), None, None)
    assert launched == ["prepare_kernel"]
    assert empty.control[5] == 1


@pytest.mark.skipif(
    HAS_GPU, reason="needs a machine without a GPU, where interpreted tensors need not be sent"
)
def test_torch_launches_nothing_of_a_step(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is to decide: memory is allocated and looked at, and that is all."""
    from fusedtrain.triton.launch import Launcher

    names: list[str] = []
    monkeypatch.setattr(
        Launcher, "__call__", lambda self, *_: names.append(self._kernel.fn.__name__)
    )
    step = {"scale": 4.0, "found_inf": 0.0, "lrs": [torch.tensor(0.1)], "max_norm": 1.0}
    for options, launches in (
        ({}, 4), ({"trial": 1}, 7), ({"unit_factor": 0.1, "max_norm": 0.0}, 5),
        ({"trial": 1, "unit_factor": 0.1}, 8), ({"measures": 0}, 2),
    ):  # fmt: skip
        case = Case(
            "lamb",
            [Spec((30, 7))] * 3,
            [busy("lamb", lr_index=0)],
            **{"measures": 7, **step, **options},
        )
        names.clear()
        with Counted() as counted:
            kernels.optimizer_step(*case.arguments(), None, None)
        assert len(names) == launches, names
        called = {c.split(".")[1] for c in counted.calls} - {"promote_types"}  # of no tensors
        assert called <= {"new_empty", "view", "slice", "detach"}


# --- what surrounds the step


def test_launches_of_the_others(kernels: Any, launched: list[str]) -> None:
    """One for all tensors, and none where no tensor has elements."""
    from fusedtrain.triton import OPS

    device = "cuda" if HAS_GPU else "cpu"
    OPS["zero_tensors"]([torch.ones(n, device=device) for n in (0, 1, 70_000)])
    assert launched == ["zero_kernel"]
    OPS["zero_tensors"]([torch.ones(0, device=device)])
    assert len(launched) == 1
    one = torch.ones(1, dtype=torch.int32, device=device)
    numbers = (torch.ones(1, device=device), one, one.clone(), torch.zeros(1, device=device))
    OPS["update_scale"](*numbers, 2.0, 0.5, 2, 1, 0.0, 8.0)
    assert launched[1:] == ["update_scale_kernel"]
