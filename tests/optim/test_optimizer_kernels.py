"""The kernels of the optimizer step, the CPU's and Triton's, against the plain-torch one."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch

from fusedtrain.reference import optimizers
from fusedtrain.reference.stochastic_rounding import random_bits, random_key, seed_after, whole_seed
from helpers import launches
from helpers.optimizer_cases import BF16, F32, F64, RULE_NAMES, Case, Spec, bits
from helpers.optimizer_ops import BACKENDS, STEPS, assert_close, case_of, step_alike
from helpers.optimizers import RULES as OF_RULES, busy


@pytest.fixture(params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return BACKENDS[request.param]()


@pytest.fixture(params=["reference", "cpu", "triton"])
def ops(request: pytest.FixtureRequest) -> Any:
    return BACKENDS[request.param]()


# Triton is interpreted: of each rule the step with most parts, and all steps of two rules.
CASES = [
    pytest.param(
        backend, rule, step,
        marks=() if backend == "cpu" or step == "trial" or rule in ("sgd", "lamb")
        else pytest.mark.long,
    )
    for backend, rule, step in product(("cpu", "triton"), RULE_NAMES, STEPS)
]  # fmt: skip


@pytest.mark.parametrize(("kernels", "rule", "step"), CASES, indirect=["kernels"])
def test_kernels(kernels: Any, rule: str, step: str) -> None:
    """Every kind of tensor in one call; the second step finds the states of the first."""
    case = case_of(rule, **STEPS[step])
    before = case.clone()
    for _ in range(2):
        torch.testing.assert_close(*step_alike(kernels, case), rtol=1e-9, atol=0)
        case.new_gradients()
    for (name, a), (_, b) in zip(case.written(), before.written()):
        if name.startswith(("params", "states", "masters")) and a.numel() > 1:
            assert not torch.equal(a, b), name


SWITCHES = {
    "nesterov", "decoupled", "trust_clip", "always_adapt", "bias_correction", "grad_averaging",
    "decoupled_decay", "centered", "lr_in_momentum", "amsgrad", "uncorrected", "outside",
}  # fmt: skip


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_options_of_a_group(kernels: Any, rule: str) -> None:
    """Each of the rule's switches turned, and what all rules have; a group each."""
    now = OF_RULES[rule].busy
    turned = [{name: 1 - now.get(name, 0)} for name in OF_RULES[rule].options if name in SWITCHES]
    turned += [{"weight_decay": 0.0}, {"max_lr": 0.3}, {"cautious": 1}, {"sign": -1.0}]
    if "momentum" in OF_RULES[rule].options:
        turned += [{"momentum": 0.0}, {"momentum": 0.0, "cautious": 1}]
    if "always_adapt" in OF_RULES[rule].options:
        turned += [{"weight_decay": 0.0, "always_adapt": value} for value in (0, 1)]
        turned += [{"trust_clip": 1, "always_adapt": 1}]
    if rule == "lamb":
        turned += [{"decoupled_decay": 2}, {"decoupled_decay": 2, "cautious": 1}]
    if rule == "novograd":
        turned += [{"start": value} for value in (1, 2)]
        turned += [{"outside": 2}, {"outside": 2, "max_lr": 0.3}]
        apex = {"bias_correction": 1, "amsgrad": 0}
        turned += [{"start": s, "outside": o, **apex} for s in (1, 2) for o in (0, 1)]
    groups = [busy(rule, **options) for options in turned]
    specs = [Spec((40,), F64, group=i) for i in range(len(groups))]
    case = Case(rule, specs, groups, measures=7, trial=1)
    for param in case.params:
        param *= 10  # where trust ratios are above 1
    for _ in range(2):
        step_alike(kernels, case)
        case.new_gradients()


@pytest.mark.parametrize(
    ("why", "write_back"),
    [
        ("inf", 0), ("nan", 1), ("inf", 2), ("found_inf", 2), ("sum of found_inf", 0),
        ("nan found_inf", 1),
    ],
)  # fmt: skip
def test_skipped_first_step(ops: Any, why: str, write_back: int) -> None:
    """Only `control` and gradients change; the next step is the first."""
    found_inf = {"found_inf": 1.0, "sum of found_inf": 2.0, "nan found_inf": math.nan}.get(why)
    step = {"trial": 1, "max_norm": 1.0, "average_weight": 0.1, "write_back": write_back}
    case = case_of("sgd", measures=7, found_inf=found_inf, scale=8.0, **step)
    if found_inf is None:
        case.grads[0][3, 4] = {"inf": math.inf, "nan": math.nan}[why]
        case.grads[7][0, 0, 0, 0] = -math.inf
    before = case.clone()
    ops.optimizer_step(*case.arguments(), None, None)
    for (name, a), (_, b) in zip(case.written(), before.written()):
        if write_back == 2 and name.startswith("grads"):
            assert not a.any()
        elif write_back == 1 and name.startswith("grads"):
            # In float32 where the parameter is: float64 gradients are rounded once.
            torch.testing.assert_close(a, b / 8, rtol=2.0**-23, atol=0, equal_nan=True, msg=name)
        elif name != "control":
            assert bits(a) == bits(b), name
    assert case.control[[0, 1, 4, 5]].tolist() == [1, 1, 0 if found_inf else 2, 0]
    case.found_inf = None
    case.new_gradients()
    fresh = before.clone()
    fresh.found_inf, fresh.grads = None, [g.clone() for g in case.grads]
    for other in (case, fresh):
        ops.optimizer_step(*other.arguments(), None, None)
    for (name, a), (_, b) in zip(case.written(), fresh.written()):
        assert name == "control" or torch.equal(a, b), name
    assert case.control[[0, 1, 5]].tolist() == [0, 1, 1]


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_nobody_looks_for_infinities(kernels: Any, rule: str) -> None:
    """They flow alike, and the step is not skipped."""
    specs = [Spec((3, 50)), Spec((150,), F64), Spec((2, 40), BF16), Spec((20,), group=1)]
    groups = [busy(rule, cautious=0), busy(rule, cautious=0, weight_decay=0.0)]
    case = Case(rule, specs, groups, measures=6, write_back=1)
    for param, grad in zip(case.params, case.grads):
        grad.view(-1)[:4] = torch.tensor([math.inf, -math.inf, math.nan, 0])
        param.view(-1)[1:5] = torch.tensor([math.inf, -math.inf, math.nan, 0])
    expected = case.clone()
    for _ in range(2):
        optimizers.optimizer_step(*expected.arguments(), None, None)
        kernels.optimizer_step(*case.arguments(), None, None)
    assert_close(case, expected)
    assert case.control[[0, 5]].tolist() == [0, 2]
    assert case.params[0].isnan().any()


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_zeros(kernels: Any, rule: str) -> None:
    """Zero parameters, zero gradients and both: no trust ratio, no sign, nothing that agrees."""
    step = {"measures": 7, "trial": 1, "max_norm": 1.0, "norm_eps": 0.5}
    groups = [busy(rule, cautious=1), busy(rule, cautious=0)]
    case = Case(rule, [Spec((6,), group=i // 3) for i in range(6)], groups, **step)
    for i in (0, 3):
        for zero in (case.params[i], case.grads[i + 1], case.params[i + 2], case.grads[i + 2]):
            zero.zero_()
    expected = case.clone()
    for _ in range(2):
        optimizers.optimizer_step(*expected.arguments(), None, None)
        kernels.optimizer_step(*case.arguments(), None, None)
        assert_close(case, expected)
        for grads in (case.grads, expected.grads):
            grads[0].zero_()  # where there are states now


def test_a_step_count_of_32_bits(kernels: Any) -> None:
    """Every bit of the step count matters in the bias correction."""
    case = Case("adam", [Spec((4,), F64)], [{"lr": 0.1, "beta2": 1 - 2.0**-31, "eps": 1e-8}])
    case.scalars[0] = 2.0**31
    expected = case.clone()
    optimizers.optimizer_step(*expected.arguments(), None, None)
    kernels.optimizer_step(*case.arguments(), None, None)
    # One bit of eps in beta2 is 2^-22 of its 2^31st power.
    torch.testing.assert_close(case.params[0], expected.params[0], rtol=1e-5, atol=0)


def test_units_at_their_bound(ops: Any) -> None:
    """Units smaller than 1e-6 are divided by 1e-6, unless they are below the bound."""
    bound = 2.0**-21
    options = {"unit_factor": 1.0, "unit_eps": bound}
    case = Case("sgd", [Spec((4, 2))], [{"lr": 1 / bound}], measures=7, **options)
    case.params[0].zero_()
    case.grads[0].copy_(torch.tensor([[bound, 0], [bound / 2, 0], [0, 2 * bound], [0, 8 * bound]]))
    ops.optimizer_step(*case.arguments(), None, None)
    small = bound / 1e-6
    expected = [[small, 0], [0.5, 0], [0, 2 * small], [0, 1]]
    torch.testing.assert_close(case.params[0], -torch.tensor(expected))


@pytest.mark.parametrize("trial", [0, 1])
def test_nothing_is_measured(kernels: Any, trial: int) -> None:
    specs = [Spec((40,)), Spec((3,), BF16)] * 20
    case = Case("lars", specs, [busy("lars")], measures=0, max_norm=1.0, trial=trial)
    ours, theirs = step_alike(kernels, case)
    assert torch.equal(ours, theirs)
    assert not ours.any()


@pytest.mark.parametrize(("rule", "root"), [("rmsprop", 1e-2), ("rmsprop_tf", 1e-1)])
def test_variance_below_zero(ops: Any, rule: str, root: float) -> None:
    """Rounding can make one: it counts as 0."""
    group = busy(rule, centered=1, cautious=0, weight_decay=0.0)
    case = Case(rule, [Spec((40,))], [group])
    case.states[0].fill_(1.0)
    case.states[2].fill_(9.0)
    expected = case.params[0] - 0.05 * case.grads[0] / root
    ops.optimizer_step(*case.arguments(), None, None)
    torch.testing.assert_close(case.params[0], expected)


@pytest.mark.parametrize(
    ("kernels", "rule"),
    [*(("cpu", rule) for rule in RULE_NAMES), ("triton", "lamb"), ("triton", "novograd")],
    indirect=["kernels"],
)
def test_parts_of_a_step(kernels: Any, rule: str) -> None:
    """Measured and tried before: the same step, to the bit."""
    case = case_of(rule, measures=7, trial=1, max_norm=1.0, scale=4.0)
    parts = case.clone()
    sums = kernels.measure_gradients(*parts.arguments())
    tried = kernels.try_update(*parts.arguments(), sums)
    for (name, a), (_, b) in zip(parts.written(), case.written()):
        assert bits(a) == bits(b), f"{name} was written"
    expected = optimizers.measure_gradients(*case.arguments())
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)
    wanted = optimizers.try_update(*case.arguments(), expected)
    torch.testing.assert_close(tried[:, :2], wanted[:, :2], rtol=1e-6, atol=0)
    torch.testing.assert_close(tried, wanted, rtol=1e-5, atol=1e-4)
    kernels.optimizer_step(*parts.arguments(), sums, tried)
    kernels.optimizer_step(*case.arguments(), None, None)
    for (name, a), (_, b) in zip(parts.written(), case.written()):
        assert bits(a) == bits(b), name
    infinite = case.clone()
    infinite.grads[0][0, 0] = math.inf
    for ops in (kernels, optimizers):
        sums = ops.measure_gradients(*infinite.arguments())
        assert not ops.try_update(*infinite.arguments(), sums).any()
    case.set("unit_factor", 0.1)
    for ops in (kernels, optimizers):
        with pytest.raises(RuntimeError, match="their own call"):
            ops.optimizer_step(*case.arguments(), sums, None)
        with pytest.raises(RuntimeError, match="their own call"):
            ops.try_update(*case.arguments(), sums)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_gradients_are_measured_without_states(ops: Any, rule: str) -> None:
    """The same call without states, masters and averages has the same counts and sums."""
    case = case_of(rule, measures=3, max_norm=1.0, scale=4.0)
    case.grads[0][0, 0] = math.inf
    sums = ops.measure_gradients(*case.arguments())
    assert sums[0, 0] == 1
    assert sums[1:, :2].sum() > 0
    case.states, case.masters, case.averages = [], [], []
    case.rows = case.rows.clone()
    case.rows[:, 2:] = -1
    torch.testing.assert_close(ops.measure_gradients(*case.arguments()), sums, rtol=1e-12, atol=0)


def test_rates_on_the_device(ops: Any) -> None:
    groups = [busy("adam", lr=math.nan, lr_index=1), busy("adam", lr=math.nan, lr_index=0)]
    lrs = [torch.tensor(0.25, dtype=F64), torch.tensor([0.5])]
    case = Case("adam", [Spec((5,)), Spec((7,), group=1)], groups, lrs=lrs)
    numbers = case.clone()
    numbers.table = case.table.clone()
    numbers.table[1:, :2] = torch.tensor([[0.5, -1], [0.25, -1]])
    for other in (case, numbers):
        ops.optimizer_step(*other.arguments(), None, None)
    for a, b in zip(case.params, numbers.params):
        assert torch.equal(a, b)
        assert a.isfinite().all()


@pytest.mark.parametrize(
    "ops", launches.parameters(["reference", "cpu", "triton"], "triton"), indirect=True
)
def test_no_tensors(ops: Any) -> None:
    case = Case("adam", [], [busy("adam")])
    assert ops.measure_gradients(*case.arguments()).shape == (0, 3)
    sums = ops.optimizer_step(*case.arguments(), None, None)
    assert ops.try_update(*case.arguments(), sums).shape == (0, 3)
    assert not case.control.any()


# --- stochastic rounding


def _hash(index: int, key: int) -> int:
    x = (index * 0x9E3779B9 + key) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def _key(seed: int, tensor: int, step: int) -> int:
    x = (seed + tensor * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x >> 32 ^ x) % 2**32


def test_random_numbers() -> None:
    for seed, tensor, step in [(0, 0, 0), (2**53 - 1, 12345, 2**24), (7, 1, 3)]:
        key = random_key(seed, tensor, torch.tensor(float(step)))
        assert key.item() == _key(seed, tensor, step)
        index = torch.tensor([0, 1, 77, 2**31, 2**32 - 1, 2**32 + 5])
        expected = [_hash(i % 2**32, int(key)) for i in index.tolist()]
        assert random_bits(index, key).tolist() == expected


def test_streams_of_random_numbers() -> None:
    """A seed of 64 bits, and one that stands for the steps done with another."""
    for seed, tensor, done, step in [(0, 0, 1, 1), (2**53 - 1, 12345, 2**24, 7), (7, 1, 3, 0)]:
        later = seed_after(seed, done)
        assert seed_after(later, -done) == seed
        whole = whole_seed(later % 2**32, later // 2**32)
        key = random_key(whole, tensor, torch.tensor(float(step)))
        assert key.item() == _key(seed, tensor, done + step)


def test_stochastic_rounding(kernels: Any) -> None:
    """The same bits, where the arithmetic is exact; up and down so often that the mean stays."""
    layouts = ["contiguous", "channels_last", "transposed", "sliced", "contiguous"]
    specs = [Spec((32, 8, 8, 10), BF16, layout, F32) for layout in layouts]
    specs[4].master = True
    case = Case(
        "sgd", specs, [{"lr": 0.5}], measures=0, stochastic=1, seed=2**52 + 1, average_weight=1,
        seed_high=2**31 + 3,
    )  # fmt: skip
    for param, grad in zip(case.params, case.grads):
        param.copy_(1 + torch.randint(0, 128, param.shape) / 128)
        grad.copy_(torch.randint(0, 2**14, grad.shape) / 2**16)
    case.masters[0].copy_(case.params[4])
    # Only exponents of ones, and a carry into infinity
    case.params[0][0, 0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    case.params[0][0, 0, 1, 0] = torch.finfo(BF16).max
    case.grads[0][0, 0, 1, 0] = -(2.0**118)
    case.grads[0].view(torch.int32)[0, 0, 1, 1] = 0x7FFFFFFF  # a nan that a carry would make -0
    expected, start = case.clone(), case.clone()
    for _ in range(2):
        kernels.optimizer_step(*case.arguments(), None, None)
        optimizers.optimizer_step(*expected.arguments(), None, None)
        for a, b in zip(case.params, expected.params):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16)) or a.isnan().any()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    moved = [(a.float() - b.float()) for a, b in zip(case.params, start.params)]
    meant = [-g for g in case.grads]  # two steps of 1/2
    error_of_mean = (moved[1] - meant[1]).mean().abs().item()
    assert error_of_mean < 4 * 2**-8 * 2**0.5 / math.sqrt(moved[1].numel())
    assert not torch.equal(moved[1], moved[3]), "the same numbers for two tensors"
    assert torch.equal(case.params[4], case.masters[0].to(BF16))
