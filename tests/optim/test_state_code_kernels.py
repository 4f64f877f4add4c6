"""Optimizer states in 8-bit codes, in the kernels of every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference.optimizers import Control
from fusedtrain.reference.state_codes import (
    GROUP,
    SHARED_BY,
    SIGNED,
    SQUARES,
    STATE_STREAM,
    dequantise,
    group_count,
    in_memory_order,
    quantise,
)
from fusedtrain.reference.stochastic_rounding import random_bits, random_key
from helpers.activations import error
from helpers.optimizer_cases import BF16, F16, F32, F64, Case, Spec, bits
from helpers.optimizer_ops import BACKENDS, EVERY_BACKEND, TOLERANCE
from helpers.optimizers import busy
from helpers.state_codes import (
    SEED,
    coded,
    column_of,
    groups_of_all_kinds,
    holder,
    neighbours,
    numbers,
    random_states,
    set_numbers,
)

COMPARED = [name for name in EVERY_BACKEND if name != "reference"]
# The last is more than a chunk of CUDA and of the CPU.
SHAPES = ((0,), (1,), (17,), (31,), (32,), (33,), (126,), (6, 3, 5, 4), (4200,))


@pytest.fixture(params=EVERY_BACKEND)
def ops(request: pytest.FixtureRequest) -> Any:
    return EVERY_BACKEND[request.param]()


def step(ops: Any, case: Case) -> Tensor:
    sums: Tensor = ops.optimizer_step(*case.arguments(), None, None)
    return sums


# ---- The bits of codes


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("dtype", [SIGNED, SQUARES], ids=["signed", "squares"])
def test_bits_of_codes(ops: Any, dtype: torch.dtype, layout: str) -> None:
    """Every number is rounded to the code that the formula has; every scale has its bits."""
    values = groups_of_all_kinds()
    for length in (len(values), len(values) - 15, len(values) - 30):
        case = holder(values[:length], dtype, layout)
        case.control[5] = 3
        step(ops, case)
        indices = torch.arange(group_count(length)) // SHARED_BY + STATE_STREAM
        random = random_bits(indices, random_key(SEED, 0, torch.tensor(3.0)))
        codes, scales = quantise(values[:length], dtype, random)
        assert torch.equal(case.states[0], codes)
        finite = ~scales.isnan()
        assert torch.equal(case.states[1].isnan(), ~finite)
        assert bits(case.states[1][finite]) == bits(scales[finite])
        assert (~finite).sum() > 5
        assert (scales == 0).sum() > 5


@pytest.mark.parametrize("to", [0.0, math.inf], ids=["down", "up"])
def test_a_root_that_is_off_by_one_ulp_changes_no_code(
    monkeypatch: pytest.MonkeyPatch, to: float
) -> None:
    """Backends approximate roots: numbers near the squares of all codes, with many chances."""
    squares = (torch.arange(256.0).square() / 65025).view(torch.int32)
    steps = torch.tensor([-64, -32, -16, -8, -4, -2, -1, 0, 1, 2, 4, 8, 16, 32, 64])
    near = (squares + steps[:, None]).clamp(min=0).view(F32).clamp(max=1.0)
    rows = near.flatten()[: 123 * (GROUP - 1)].view(-1, GROUP - 1)
    values = torch.cat([rows, torch.ones(len(rows), 1)], 1).repeat(200, 1).flatten()
    g = torch.Generator().manual_seed(3)
    random = torch.randint(2**32, (len(values) // GROUP,), generator=g)
    lanes = torch.arange(len(random)) % GROUP * 0x9E3779B9  # the least and the largest chance:
    extremes = (torch.tensor([0, 2**32 - 1]).repeat_interleave(GROUP) - lanes[:64]) % 2**32
    random[:6400] = extremes.repeat(100)
    expected, _ = quantise(values, SQUARES, random)
    exact = Tensor.sqrt
    monkeypatch.setattr(Tensor, "sqrt", lambda t: exact(t).nextafter(torch.tensor(to)))
    codes, _ = quantise(values, SQUARES, random)
    assert torch.equal(codes, expected)


@pytest.mark.parametrize("dtype", [SIGNED, SQUARES], ids=["signed", "squares"])
def test_a_state_that_stays_keeps_every_bit(ops: Any, dtype: torch.dtype) -> None:
    """Every code beside every kind of scale, through steps with other random numbers."""
    every = torch.arange(-127, 128) if dtype == SIGNED else torch.arange(256)
    most = int(every.max())
    rows = [torch.cat([part, torch.full((GROUP - len(part),), most)]) for part in every.split(31)]
    rows[-1][:-1] *= 1 if dtype == SQUARES else -1
    most_scale = float.fromhex("0x1.fffffep118")
    sizes = [2.0**-100, 1e-20, 0.3, 1.0, 3.0, 1e20, most_scale, float("nan"), 0.0]
    scales = torch.tensor(sizes).repeat_interleave(len(rows))
    codes = torch.stack(rows).to(dtype).repeat(len(sizes), 1)
    codes[scales.isnan() | (scales == 0)] = 0
    for length in (codes.numel(), codes.numel() - 3 * GROUP - 1):
        case = holder(torch.zeros(length), dtype)
        case.table[1, column_of("momentum")] = 1.0
        case.states[0].copy_(codes.flatten()[:length])
        case.states[1].copy_(scales[: group_count(length)])
        before = [bits(t) for t in case.states]
        # The scale of a last group is that of its own largest number.
        assert abs(int(case.states[0][length // GROUP * GROUP - 1])) in (most, 0)
        for _ in range(3):
            step(ops, case)
            assert [bits(t) for t in case.states] == before
        assert case.control[5] == 3


# ---- Steps of the rules

PLAIN = {"measures": 2, "seed": 9.0}
AMP = {"scale": 256.0, "measures": 7, "max_norm": 3.0, "write_back": 1, "average_weight": 0.1}
TRIAL = {"measures": 7, "trial": 1, "write_back": 2, "average_weight": 0.9}
UNITS = {"measures": 7, "unit_factor": 0.1, "stochastic": 1, "seed": 12345.0}
STEPS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adam, amp": ("adam", {}, AMP),
    "adam, units": ("adam", {}, UNITS),
    "lamb, trial": ("lamb", {}, TRIAL),
    "nadamw, caution": ("nadamw", {}, TRIAL),
    "sgd": ("sgd", {}, PLAIN),
    "lars": ("lars", {}, {**PLAIN, "measures": 7}),
    "lion": ("lion", {"cautious": 0}, PLAIN),
    "adagrad": ("adagrad", {}, PLAIN),
    "rmsprop": ("rmsprop", {"centered": 0}, PLAIN),
    "rmsprop_tf": ("rmsprop_tf", {"centered": 0, "cautious": 0}, PLAIN),
    "novograd": ("novograd", {}, {**PLAIN, "measures": 7}),
}
# Triton is interpreted: a few.
OFTEN = ("adam, amp", "lamb, trial", "sgd")


def all_kinds(rule: str, options: dict[str, float], **step: Any) -> Case:
    """Codes of float32 and 16-bit parameters in every shape; floats and float64 beside them."""
    layouts = ["channels_last" if len(s) == 4 else "contiguous" for s in SHAPES]
    specs = [Spec(s, F32, at, state_dtype=SIGNED) for s, at in zip(SHAPES, layouts)]
    specs += [
        Spec((33,), F32, "offset", state_dtype=SIGNED),
        Spec((4133,), F32, "offset", state_dtype=SIGNED, average=BF16),
        Spec((70, 9), F32, "transposed", grad_layout="sliced", state_dtype=SIGNED, average=F32),
        Spec((4130,), BF16, master=True, state_dtype=SIGNED, average=F32),
        Spec((77,), BF16, master=torch.int8, state_dtype=SIGNED),
        Spec((9, 40), F16, "transposed", master=torch.int16, state_dtype=SIGNED),
        Spec((65,), BF16, grad_dtype=F32, state_dtype=SIGNED),
        Spec((130,), F32, state_dtype=BF16),
        Spec((45,), F64),
        Spec((99,), F16, state_dtype=F32, layout="offset"),
    ]
    case = Case(rule, specs, [busy(rule, **options)], **step)
    random_states(case)
    case.new_gradients()
    return case


def with_float_states(case: Case) -> Case:
    """The same numbers without codes."""
    other = case.clone()
    other.states = list(other.states)
    for _, _, index in coded(case):
        other.states[index] = dequantise(case.states[index], case.states[index + 1])
    return other


def step_cases(backends: list[str]) -> list[Any]:
    return [
        pytest.param(
            backend, name, id=f"{backend}-{name}",
            marks=pytest.mark.long if backend == "triton" and name not in OFTEN else (),
        )
        for backend in backends
        for name in STEPS
    ]  # fmt: skip


@pytest.mark.parametrize(("ops", "name"), step_cases([*EVERY_BACKEND]), indirect=["ops"])
def test_steps_beside_float_states(ops: Any, name: str) -> None:
    """The step is that of float states of the same numbers; new states are rounded up or down."""
    rule, options, more = STEPS[name]
    tolerance = getattr(ops, "tolerance", TOLERANCE)
    case = all_kinds(rule, options, **more)
    for _ in range(2):
        floats = with_float_states(case)
        sums, expected = step(ops, case), step(ops, floats)
        torch.testing.assert_close(sums, expected)
        for ours, theirs in zip([*case.params, *case.averages], [*floats.params, *floats.averages]):
            if ours.numel():
                assert error(ours, theirs) <= tolerance[ours.dtype]
        moved = 0
        for _, _, index in coded(case):
            codes, scales = case.states[index : index + 2]
            values = in_memory_order(floats.states[index])
            below, above = neighbours(codes, scales)
            slack = 1e-6 * scales.repeat_interleave(GROUP)[: len(values)]
            exact = (values == numbers(case, index)) | (values.abs() <= slack)
            assert (exact | ((below - slack < values) & (values < above + slack))).all()
            moved += int((values != numbers(case, index)).sum())
            for group, scale in zip(values.split(GROUP), scales):
                assert scale == group.abs().max() or abs(scale / group.abs().max() - 1) < 1e-6
        assert moved > 1000
        case.new_gradients()


@pytest.mark.parametrize(("ops", "name"), step_cases(COMPARED), indirect=["ops"])
def test_steps_beside_the_reference(ops: Any, name: str) -> None:
    """The rule's own roundings may move a code to its neighbour, in one element of a thousand."""
    rule, options, more = STEPS[name]
    tolerance = getattr(ops, "tolerance", TOLERANCE)
    want = all_kinds(rule, options, **more)
    for _ in range(2):
        got = want.clone()
        torch.testing.assert_close(step(ops, got), step(BACKENDS["reference"](), want))
        for ours, theirs in zip(got.params, want.params):
            if ours.numel():
                # A clipped gradient of float64 has the error of the norm, a sum in float.
                limit = 1e-7 / torch.finfo(F64).eps if ours.dtype == F64 else tolerance[ours.dtype]
                assert error(ours, theirs) <= limit
        total = others = 0
        for _, _, index in coded(want):
            a, b = (in_memory_order(c.states[index]).to(torch.int16) for c in (got, want))
            torch.testing.assert_close(
                got.states[index + 1], want.states[index + 1], rtol=1e-6, atol=0
            )
            assert (a - b).abs().max().item() <= 1 if a.numel() else True
            total, others = total + a.numel(), others + int((a != b).sum())
        assert others <= total / 1000
        want.new_gradients()


@pytest.mark.parametrize("write_back", [0, 2])
@pytest.mark.parametrize("trial", [0, 1])
def test_a_skipped_step_changes_no_bit(ops: Any, write_back: int, trial: int) -> None:
    step_ = {"measures": 7, "average_weight": 0.1, "write_back": write_back, "trial": trial}
    case = all_kinds("lamb" if trial else "adam", {}, scale=8.0, stochastic=1.0, **step_)
    case.grads[-1].view(-1)[5] = float("inf")
    kept = ("params", "masters", "states", "averages", "scalars")
    before = {name: bits(t) for name, t in case.written() if name.startswith(kept)}
    step(ops, case)
    assert case.control[0] == 1
    assert before == {name: bits(t) for name, t in case.written() if name.startswith(kept)}


# ---- Randomness


@pytest.mark.parametrize("dtype", [SIGNED, SQUARES], ids=["signed", "squares"])
def test_rounding_has_no_bias(ops: Any, dtype: torch.dtype) -> None:
    """In each lane of a group, by its mean over groups: eight have the same random bits."""
    draws = 600
    groups = draws * SHARED_BY
    one = torch.linspace(0.003, 0.9, GROUP).clone()
    one[13] = 1.0
    case = holder(one.repeat(groups), dtype)
    step(ops, case)
    results = numbers(case, 0).view(groups, GROUP).double()
    below, above = results.amin(0), results.amax(0)
    assert ((below <= one) & (one <= above)).all()
    spread = (above - below).clamp(min=1e-9)
    deviations = (results.mean(0) - one.double()).abs() / spread * draws**0.5
    assert deviations.max() < 2.3  # of a share of a half: 4.6 standard errors


def test_states_tensors_steps_and_seeds_have_random_numbers_of_their_own(ops: Any) -> None:
    """Momentum and mean of the gradient get the same shares of their largest number."""
    results = []
    for seed in (1.0, 2.0):
        specs = [Spec((3200,), state_dtype=SIGNED) for _ in range(2)]
        group = {"lr": 0.0, "alpha": 0.0, "momentum": 0.0, "eps": 1e6}
        case = Case("rmsprop", specs, [group], seed=seed)
        for grad in case.grads:
            grad.fill_(1.0).view(-1, GROUP)[:, 1:] = 0.4
        for _ in range(2):
            step(ops, case)
            results += [case.states[i].clone() for _, k, i in coded(case) if k > 0]
    assert len(results) == 16
    for i, codes in enumerate(results):
        assert codes.unique().tolist() == [72, 73, 127]
        assert all(0.1 < (codes != other).double().mean() < 0.7 for other in results[:i])


@pytest.mark.parametrize("dtype", [SIGNED, SQUARES], ids=["signed", "squares"])
def test_small_updates_are_not_lost(
    request: pytest.FixtureRequest, ops: Any, dtype: torch.dtype
) -> None:
    """An average that moves by a hundredth of a code step at a time follows float64's."""
    backend = request.node.callspec.params["ops"]
    steps = {"cpu": 10000, "triton": 20}.get(backend, 300)
    values = torch.full((1024,), 1.0)
    values.view(-1, GROUP)[:, 0] = 8.0
    case = holder(values, dtype)
    fresh = 0.001 if steps < 1000 else 0.0005
    case.table[1, column_of("momentum")] = 1 - fresh
    case.table[1, column_of("dampening")] = 1 - fresh
    case.scalars[0] = 1.0  # the first step does not dampen
    start = torch.full((1024,), 0.5)
    start.view(-1, GROUP)[:, 0] = 8.0
    set_numbers(case, 0, start)
    begin = numbers(case, 0).view(-1, GROUP)[:, 1:].double().mean().item()
    for _ in range(steps):
        step(ops, case)
    true = 1.0 + (begin - 1.0) * (1 - fresh) ** steps
    mean = numbers(case, 0).view(-1, GROUP)[:, 1:].double().mean().item()
    assert abs(mean - true) < 0.01
    assert steps < 200 or abs(begin - true) > 0.1
    assert Control.of(case.control).applied_steps == steps


# ---- Calls that are refused


@pytest.mark.launches_nothing("calls that are refused")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no scales", "index of scales"),
        ("too few scales", "a scale for each group of 32"),
        ("scales of another dtype", "scales"),
        ("float64", "float64 parameters cannot be codes"),
        ("another shape", "same shape and strides|must have its shape"),
        ("another integer", "must be"),
    ],
)
def test_what_is_refused(ops: Any, change: str, words: str) -> None:
    if getattr(ops, "is_reference", False):
        pytest.skip("not a case: plain torch checks shapes only")
    case = holder(torch.zeros(65), SIGNED)
    if change == "no scales":
        case.states = case.states[:1]
    elif change == "too few scales":
        case.states[1] = torch.zeros(2)
    elif change == "scales of another dtype":
        case.states[1] = torch.zeros(3, dtype=F16)
    elif change == "float64":
        case.params[0], case.grads[0] = case.params[0].double(), case.grads[0].double()
    elif change == "another shape":
        case.states[0] = torch.zeros(66, dtype=SIGNED)
    else:
        case.states[0] = torch.zeros(65, dtype=torch.int16)
    with pytest.raises(RuntimeError, match=words):
        step(ops, case)
