"""The CUDA kernels of the optimizer step, emulated, beside the CPU's on the same tensors.

Every call runs with its threads in three orders, which must give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cuda_emulator
from helpers.backends import same_bits
from helpers.optimizer_calls import (
    AMP,
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    FINITE,
    GRADIENTS,
    SHAPES,
    SIZES,
    SMALL,
    STATES,
    UNITS,
    Call,
    Kind,
    changed,
    check,
    cpu,
    one_call,
    three_calls,
)

pytestmark = pytest.mark.skipif(bool(cuda_emulator.why_not()), reason=cuda_emulator.why_not())


@pytest.fixture(scope="module")
def emulator() -> Iterator[cuda_emulator.Emulator]:
    emulator = cuda_emulator.load()
    yield emulator
    emulator.set_order("forward")


@pytest.mark.parametrize(
    ("rule", "states"), [(rule, n) for rule, numbers in STATES.items() for n in numbers]
)
def test_every_rule(emulator: cuda_emulator.Emulator, rule: str, states: int) -> None:
    case = Kind(rule, states, step=AMP, scale=1024.0, average=F32)
    case = replace(case, step={**case.step, "average_weight": 0.1})
    assert changed(check(emulator, case), case)


@pytest.mark.parametrize("rule", STATES)
def test_every_rule_in_double(emulator: cuda_emulator.Emulator, rule: str) -> None:
    case = Kind(rule, param=F64, grad=F64, state=F64, group={"cautious": 1}, step={"trial": 1})
    assert changed(check(emulator, case, orders=("shuffled",)), case)


# Variants of the rules' options that the table above does not reach.
OPTIONS = {
    "sgd plain": Kind("sgd", 0, options={"momentum": 0, "dampening": 0}),
    "sgd of Nesterov": Kind("sgd", options={"nesterov": 1}),
    "sgd decoupled, corrected": Kind(
        "sgd", options={"dampening": 0, "decoupled": 1}, group={"max_lr": 0.1}
    ),
    "lars not adapted": Kind(
        "lars", options={"momentum": 0, "nesterov": 0, "trust_coeff": 1e-3, "always_adapt": 0}
    ),
    "lars clipped": Kind("lars", options={"dampening": 0.1, "eps": 1e-8, "trust_clip": 1}),
    "adam maximized": Kind(group={"sign": -1}, step={"write_back": 1}),
    "adam decoupled": Kind(options={"decoupled": 1, "eps": 1e-8}),
    "adam uncorrected": Kind(options={"uncorrected": 1}),
    "lamb decoupled": Kind(
        "lamb",
        options={
            "bias_correction": 0, "grad_averaging": 0, "trust_clip": 1, "always_adapt": 1,
            "decoupled_decay": 1,
        },
    ),
    "lamb coupled": Kind("lamb", options={"always_adapt": 1, "decoupled_decay": 2}),
    "rmsprop not centered": Kind("rmsprop", options={"momentum": 0, "centered": 0}),
    "rmsprop_tf rate outside": Kind("rmsprop_tf", options={"centered": 1, "lr_in_momentum": 0}),
    "rmsprop_tf coupled": Kind("rmsprop_tf", options={"decoupled_decay": 0, "eps": 1e-3}),
    "adagrad decoupled": Kind("adagrad", options={"decoupled": 1}),
    "novograd without amsgrad": Kind("novograd", options={"grad_averaging": 0, "amsgrad": 0}),
    "novograd of Apex": Kind(
        "novograd", options={"amsgrad": 0, "bias_correction": 1, "outside": 1, "start": 1}
    ),
    "novograd of Apex, from 0": Kind(
        "novograd", options={"amsgrad": 0, "bias_correction": 1, "start": 2}
    ),
    "learning rate in float": Kind(lr=F32),
    "learning rate in double": Kind(lr=F64, group={"max_lr": 0.1}),
    "more states than the tensors have": Kind("adam", 2, param=(F32, F64)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options(emulator: cuda_emulator.Emulator, name: str) -> None:
    assert changed(check(emulator, OPTIONS[name], orders=("shuffled",)), OPTIONS[name])


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(emulator: cuda_emulator.Emulator, name: str, layout: str) -> None:
    step = {**AMP, "average_weight": 0.25, "write_back": 1}
    case = replace(DTYPES[name], layout=layout, scale=8.0, step=step)
    orders = cuda_emulator.ORDERS if layout == "contiguous" else ("shuffled",)
    assert changed(check(emulator, case, orders=orders), case)


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sizes(emulator: cuda_emulator.Emulator, dtype: torch.dtype, layout: str) -> None:
    case = Kind("sgd", shapes=SIZES, param=dtype, grad=dtype, state=dtype, layout=layout, step=AMP)
    check(emulator, case)


LAYOUTS = ("contiguous", "offset", "channels_last", "transposed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units(emulator: cuda_emulator.Emulator, layout: str) -> None:
    """Clipped unit by unit, in any order of elements in memory; and globally as well."""
    case = Kind(
        "lars", shapes=SHAPES, layout=layout, step={**UNITS, "max_norm": 5.0, "write_back": 1}
    )
    call = check(emulator, case)
    # Clipped indeed, and every unit by its own factor.
    weight, kept = call.grads[4], Call(case).grads[4]
    factors = (weight / kept).mean(dim=1)
    assert factors.unique().numel() > 10
    assert bool((factors.abs() < 0.9).all())


@pytest.mark.parametrize("dtypes", [(F64,), (BF16, F64), (F16,)], ids=str)
def test_units_of_other_dtypes(
    emulator: cuda_emulator.Emulator, dtypes: tuple[torch.dtype, ...]
) -> None:
    case = Kind("lamb", shapes=SHAPES, param=dtypes, grad=BF16, master=True, step=UNITS)
    check(emulator, replace(case, group={"cautious": 1}), orders=("reverse",))


@pytest.mark.parametrize("measures", [0, FINITE, GRADIENTS])
def test_units_that_nobody_measures(emulator: cuda_emulator.Emulator, measures: int) -> None:
    """Units are clipped where gradients alone are measured, too; none where nothing is measured."""
    step = {"measures": measures, "unit_factor": 0.05}
    check(emulator, Kind("sgd", shapes=SHAPES, step=step), orders=("shuffled",))


def test_a_unit_of_more_elements_than_a_piece(emulator: cuda_emulator.Emulator) -> None:
    call = Call(Kind("sgd", shapes=((1, 2**20 + 8),), step=UNITS))
    emulator.set_order("forward")
    sums = emulator.call("measure_gradients", *call.arguments())
    assert isinstance(sums, Tensor)
    torch.testing.assert_close(sums, cpu("measure_gradients", *call.arguments()), rtol=5e-7, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS[2:])
def test_layouts(emulator: cuda_emulator.Emulator, layout: str) -> None:
    shapes = ((8, 4, 3, 3), (32, 7), (5,))
    check(emulator, Kind(shapes=shapes, layout=layout, step=AMP), orders=("shuffled",))
    other = Kind(shapes=shapes, layout=layout, grad_layout="offset", step={"write_back": 1})
    check(emulator, other, orders=("shuffled",))


@pytest.mark.parametrize(
    ("bad", "found_inf", "skips", "write_back"),
    [
        (float("inf"), None, True, 0),
        (float("-inf"), 0.0, True, 1),
        (float("nan"), None, True, 2),
        (None, 1.0, True, 0),
        (None, 3.0, True, 1),
        (None, float("nan"), True, 2),
        (None, 0.0, False, 0),
        (None, 0.0, False, 1),
        (None, 0.0, False, 2),
        (1e30, None, True, 1),  # finite, but not when divided by the scale
    ],
    ids=str,
)
def test_skipped_steps(
    emulator: cuda_emulator.Emulator,
    bad: float | None,
    found_inf: float | None,
    skips: bool,
    write_back: int,
) -> None:
    case = Kind(
        bad=bad, found_inf=found_inf, step={**AMP, "write_back": write_back},
        scale=2.0**-40 if bad == 1e30 else 4.0,
    )  # fmt: skip
    call = check(emulator, case, orders=("shuffled",))
    assert changed(call, case) != skips
    assert call.control[0] == skips
    assert call.control[5] == (6 if skips else 7)
    assert call.control[4] == (0 if bad is None else 4)
    assert torch.equal(call.scalars, Call(case).scalars) == skips
    if write_back == 2:
        assert all(not g.any() for g in call.grads)


@pytest.mark.parametrize("rule", ["lamb", "adam", "sgd"])
def test_skipped_trial(emulator: cuda_emulator.Emulator, rule: str) -> None:
    step = {**AMP, "trial": 1, "write_back": 2}
    case = Kind(rule, bad=float("inf"), group={"cautious": 1}, step=step)
    assert not changed(check(emulator, case), case)


def test_a_bad_gradient_that_nobody_asks_for(emulator: cuda_emulator.Emulator) -> None:
    case = Kind("sgd", bad=float("inf"), step={"measures": GRADIENTS})
    assert changed(check(emulator, case, orders=("forward",)), case)
    case = Kind("sgd", bad=float("nan"))
    call = check(emulator, case, orders=("forward",))
    assert changed(call, case)
    assert call.control[2].isnan()


@pytest.mark.parametrize("rule", ["sgd", "adam", "lion", "lamb"])
@pytest.mark.parametrize("master", [False, True])
def test_caution(emulator: cuda_emulator.Emulator, rule: str, master: bool) -> None:
    case = Kind(
        rule, param=F16 if master else F32, grad=F16, master=master, group={"cautious": 1},
        step={**AMP, "trial": 1}, shapes=(*SMALL, (9000,)),
    )  # fmt: skip
    assert changed(check(emulator, case), case)


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
def test_stochastic_rounding(emulator: cuda_emulator.Emulator, layout: str) -> None:
    """The CPU's random bits: hardly an element differs, and none but by one place."""
    shapes = ((1,), (17,), (5000,), (0,), (12000,))
    case = Kind(
        "sgd", shapes=shapes, param=(BF16, BF16, BF16, BF16, BF16), layout=layout, average=F32,
        step={"stochastic": 1, "average_weight": 0.5},
    )  # fmt: skip
    want, got, nearest = Call(case), Call(case), Call(replace(case, step={}))
    one_call(cpu, want)
    one_call(cpu, nearest)
    check(emulator, case)
    one_call(emulator.call, got)
    ours, theirs = torch.cat(got.params), torch.cat(want.params)
    assert (ours != theirs).double().mean() < 5e-4
    assert (theirs != torch.cat(nearest.params)).double().mean() > 0.1
    mixed = replace(case, param=(BF16, F32, F16, F64), master=True, shapes=SMALL)
    check(emulator, mixed, orders=("shuffled",))


def test_stochastic_rounding_of_what_is_not_finite(emulator: cuda_emulator.Emulator) -> None:
    case = Kind(
        "sgd", 0, param=BF16, step={"stochastic": 1}, options={"momentum": 0, "dampening": 0}
    )
    for bad in (float("inf"), float("-inf"), float("nan")):
        call = check(emulator, replace(case, bad=bad), orders=("forward",))
        assert not call.params[-1].view(-1)[-1].isfinite()
    # A GPU's own NaN: with a random bit more it would be -0.
    for op in (cpu, emulator.call):
        call = Call(case)
        call.grads[-1].view(torch.int32).fill_(0x7FFFFFFF)
        one_call(op, call)
        assert call.params[-1].isnan().all()


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_averages_that_stay_or_follow(emulator: cuda_emulator.Emulator, weight: float) -> None:
    case = Kind("sgd", average=F32, step={"average_weight": weight})
    call = check(emulator, case, orders=("shuffled",))
    left, followed = Call(case).averages, call.params
    torch.testing.assert_close(call.averages, followed if weight else left)


@pytest.mark.parametrize("rule", ["lamb", "adam", "novograd"])
def test_sums_that_were_measured_before(emulator: cuda_emulator.Emulator, rule: str) -> None:
    case = Kind(rule, step={**AMP, "trial": 1}, group={"cautious": 1}, scale=2.0)
    check(emulator, case, three_calls)
    check(emulator, replace(case, bad=float("inf")), three_calls, orders=("shuffled",))
    split, together = Call(case), Call(case)
    three_calls(emulator.call, split)
    one_call(emulator.call, together)
    assert all(map(same_bits, split.results().values(), together.results().values()))


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-16, 1e17, 1e19, 1e30])
def test_squares_beyond_float(emulator: cuda_emulator.Emulator, size: float) -> None:
    """Eight squares at a time are added in float only where float can hold them."""
    case = Kind(shapes=((9000,), (37,)), size=size, step=AMP)
    sums = emulator.call("measure_gradients", *Call(case).arguments())
    assert isinstance(sums, Tensor)
    want = torch.stack([g.double().square().sum() for g in Call(case).grads])
    torch.testing.assert_close(sums[:, 1], want, rtol=3e-7, atol=0)
    torch.testing.assert_close(
        sums, cpu("measure_gradients", *Call(case).arguments()), rtol=3e-7, atol=0
    )


def test_gradients_are_measured_without_states(emulator: cuda_emulator.Emulator) -> None:
    call = Call(Kind(shapes=((9000,), (37,), (130, 31)), step={**AMP, "measures": 3.0}))
    sums = emulator.call("measure_gradients", *call.arguments())
    assert isinstance(sums, Tensor)
    assert sums[:, 1].min() > 0
    arguments = list(call.arguments())
    arguments[3:6], arguments[10] = ([], [], []), arguments[10].clone()
    arguments[10][:, 2:] = -1
    assert torch.equal(emulator.call("measure_gradients", *arguments), sums)


def launches(emulator: cuda_emulator.Emulator, case: Kind) -> int:
    call = Call(case)
    before = emulator.c.emulator_launches()
    one_call(emulator.call, call)
    return int(emulator.c.emulator_launches() - before)


def test_number_of_launches(emulator: cuda_emulator.Emulator) -> None:
    """The sweeps, sums by tensor and coefficients; a trial makes three more."""
    cnn = Kind(shapes=((2,),) * 200, groups=40, step=AMP)
    assert launches(emulator, cnn) == 4
    assert launches(emulator, replace(cnn, step={})) == 2
    assert launches(emulator, replace(cnn, step={**AMP, "trial": 1})) == 7


@pytest.mark.slow
def test_more_tensors_than_a_launch_holds(emulator: cuda_emulator.Emulator) -> None:
    # Most are empty, which takes no time; not those around the last of a launch.
    last = (185, 371, 742, 1015, 1113, 1484, 1528, 1600)
    full = {*range(0, 1600, 11), *(i + k for i in last for k in (-2, -1, 0, 1))}
    shapes = tuple((int(i in full) * (1 + i % 3),) for i in range(1600))
    case = Kind(shapes=shapes, param=(F32, F32, BF16), step=AMP, groups=3)
    check(emulator, case, orders=("shuffled",))
    assert launches(emulator, case) == 5 + 2 + 2 + 5
    case = Kind("lamb", shapes=shapes[:750], step={**AMP, "unit_factor": 0.1}, param=(F32, F64))
    check(emulator, case, orders=("reverse",))


@pytest.mark.parametrize("groups", [64, 150])
def test_many_groups(emulator: cuda_emulator.Emulator, groups: int) -> None:
    shapes = tuple((i % 6,) for i in range(160))
    case = Kind("lars", shapes=shapes, groups=groups, lr=F32, step=AMP)
    check(emulator, case, orders=("shuffled",))


def test_no_elements_at_all(emulator: cuda_emulator.Emulator) -> None:
    """Steps are counted all the same."""
    for trial in (0, 1):
        case = Kind(shapes=((0,), (3, 0)), step={**AMP, "trial": trial})
        call = check(emulator, case)
        assert call.scalars[0].tolist() == [1, 4]
        assert call.control[5] == 7
    case = Kind(shapes=())
    assert check(emulator, case).control[5] == 6
