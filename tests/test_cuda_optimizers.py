"""The CUDA kernels of the optimizer step, emulated, beside the CPU's on the same tensors.

Every call runs with its threads in three orders, which must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import cuda_emulator
import pytest
import torch
from _kernels import same_bits
from torch import Tensor

pytestmark = pytest.mark.skipif(bool(cuda_emulator.why_not()), reason=cuda_emulator.why_not())

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FINITE, GRADIENTS, PARAMETERS = 1, 2, 4  # what a step measures


@dataclass(frozen=True)
class Rule:
    number: int
    states: tuple[int, ...]
    options: tuple[float, ...]
    measures: int = 0
    trial: bool = False


RULES = {
    "sgd": Rule(0, (0, 1), (0.9, 0.1, 1, 0)),
    "lars": Rule(1, (0, 1), (0.9, 0.1, 1, 1e-3, 1e-8, 1, 1), GRADIENTS | PARAMETERS),
    "adam": Rule(2, (2, 3), (0.9, 0.99, 1e-8, 1)),
    "nadamw": Rule(3, (2,), (0.9, 0.99, 1e-8, 1)),
    "lamb": Rule(4, (2,), (0.9, 0.99, 1e-6, 1, 1, 0, 0, 0), GRADIENTS | PARAMETERS, True),
    "lion": Rule(5, (1,), (0.9, 0.99)),
    "rmsprop": Rule(6, (1, 2, 3), (0.9, 1e-3, 0.8, 1)),
    "rmsprop_tf": Rule(7, (1, 2, 3), (0.9, 1e-3, 0.8, 1, 0, 1)),
    "adagrad": Rule(8, (1,), (0.1, 1e-3)),
    "novograd": Rule(9, (1,), (0.9, 0.99, 1e-8, 1, 1), GRADIENTS),
}

SMALL = ((0,), (1,), (15,), (17,), (1023,), (8, 3, 3, 3))
SIZES = ((0,), (1,), (15,), (17,), (1023,), (4097,), (40000,))


@dataclass(frozen=True)
class Case:
    """What one call is made of."""

    rule: str = "adam"
    states: int = -1  # -1: as many as the rule can have
    shapes: tuple[tuple[int, ...], ...] = SMALL
    layout: str = "contiguous"
    grad_layout: str = ""
    param: torch.dtype | tuple[torch.dtype, ...] = F32
    grad: torch.dtype = F32
    state: torch.dtype = F32
    master: bool = False
    average: torch.dtype | None = None
    group: dict[str, float] = field(default_factory=dict)
    options: tuple[float, ...] = ()
    step: dict[str, float] = field(default_factory=dict)
    groups: int = 2
    lr: torch.dtype | None = None
    scale: float | None = None
    found_inf: float | None = None
    bad: float | None = None  # the last four elements of the last gradient
    size: float = 1.0  # of gradients
    steps_done: int = 3


def laid_out(values: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
    values = values.to(dtype)
    if layout == "channels_last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        return torch.empty(values.numel() + 1, dtype=dtype)[1:].view(values.shape).copy_(values)
    return values.contiguous()


GROUP = ("lr", "lr_index", "weight_decay", "sign", "max_lr", "cautious")
STEP = (
    "measures", "max_norm", "norm_eps", "unit_factor", "unit_eps", "average_weight", "write_back",
    "stochastic", "seed", "trial", "seed_high",
)  # fmt: skip


class Call:
    """The tensors of a case, always the same ones."""

    def __init__(self, case: Case) -> None:
        random = torch.Generator().manual_seed(1)
        rule = RULES[case.rule]

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=random, dtype=F64)

        def companion(values: Tensor, dtype: torch.dtype, layout: str = "") -> Tensor:
            return laid_out(values, dtype, layout or case.layout)

        count = len(case.shapes)
        states = max(rule.states) if case.states < 0 else case.states
        dtypes = case.param if isinstance(case.param, tuple) else (case.param,)
        self.params, self.grads, self.states, self.masters, self.averages = [], [], [], [], []
        rows = []
        for i, shape in enumerate(case.shapes):
            dtype = dtypes[i % len(dtypes)]
            values = normal(shape)
            self.params.append(companion(values, dtype))
            grads = normal(shape) * case.size * (case.scale or 1.0)
            if case.bad is not None and i == count - 1:
                grads.view(-1)[-4:] = case.bad
            self.grads.append(companion(grads, case.grad, case.grad_layout))
            row = [i % case.groups, count - 1 - i, -1, -1, -1, -1, -1]
            for k in range(states):
                row[2 + k] = len(self.states)
                # Mean squares: larger than the square of any mean.
                square = case.rule.startswith("rms") == (k == 0) or case.rule == "adagrad"
                values = normal(shape) * 0.3
                wide = F64 if dtype is F64 else case.state
                self.states.append(companion(values.square() + 2 if square else values, wide))
            if case.master and dtype in (F16, BF16):
                row[5] = len(self.masters)
                self.masters.append(companion(normal(shape), F32))
            if case.average is not None:
                row[6] = len(self.averages)
                self.averages.append(companion(normal(shape), case.average))
            rows.append(row)
        self.rows = torch.tensor(rows, dtype=torch.int64).view(-1, 7)
        self.scalars = torch.rand(3, count, generator=random)
        self.scalars[0] = torch.arange(count).remainder(2) * case.steps_done
        self.control = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
        step: dict[str, float] = {
            "measures": rule.measures, "norm_eps": 1e-6, "unit_eps": 1e-3, "seed": 2**40 + 17,
            "seed_high": 2**31 + 3, "trial": rule.trial, **case.step,
        }  # fmt: skip
        table = [[*(float(step.get(name, 0)) for name in STEP), *[0.0] * 3]]
        self.lrs = []
        for g in range(case.groups):
            group = {
                "lr": 0.01 * (g % 7 + 1), "lr_index": -1, "weight_decay": 0.05 * (g % 2), "sign": 1,
                **case.group,
            }  # fmt: skip
            if case.lr is not None:
                group["lr_index"] = g
                self.lrs.append(torch.tensor(group["lr"], dtype=case.lr))
                group["lr"] = -1
            options = case.options or rule.options
            row = [*(group.get(name, 0) for name in GROUP), *options, *[0.0] * (8 - len(options))]
            table.append([float(x) for x in row])
        self.table = torch.tensor(table, dtype=F64)
        self.rule = rule.number
        self.scale = None if case.scale is None else torch.tensor([case.scale])
        self.found_inf = None if case.found_inf is None else torch.tensor([case.found_inf])

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.rule, self.params, self.grads, self.states, self.masters, self.averages, self.lrs,
            self.scalars, self.control, self.table, self.rows, self.scale, self.found_inf,
        )  # fmt: skip

    def results(self) -> dict[str, Tensor]:
        found = {"scalars": self.scalars, "control": self.control}
        for kind in ("params", "grads", "states", "masters", "averages"):
            for i, tensor in enumerate(getattr(self, kind)):
                found[f"{kind}[{i}] {tensor.dtype} {tuple(tensor.shape)}"] = tensor
        return found


@pytest.fixture(scope="module")
def emulator() -> Iterator[cuda_emulator.Emulator]:
    emulator = cuda_emulator.load()
    yield emulator
    emulator.set_order("forward")


Steps = Callable[[Callable[..., Tensor], Call], tuple[Tensor, ...]]


def one_call(op: Callable[..., Tensor], call: Call) -> tuple[Tensor, ...]:
    return (op("optimizer_step", *call.arguments(), None, None),)


def three_calls(op: Callable[..., Tensor], call: Call) -> tuple[Tensor, ...]:
    """As a loop over devices or ranks has it: what they measure is added up in between."""
    sums = op("measure_gradients", *call.arguments())
    trials = op("try_update", *call.arguments(), sums)
    return op("optimizer_step", *call.arguments(), sums, trials), trials


def cpu(name: str, *arguments: Any) -> Tensor:
    result: Tensor = getattr(torch.ops.fusedtrain, name)(*arguments)
    return result


TOLERANCE = {F32: 1e-6, BF16: 2.0**-7, F16: 2.0**-10}


def in_double(case: Case) -> float:
    """The tolerance of float64 tensors: those of other parameters are computed in float."""
    if isinstance(case.param, tuple):
        return 1e-8  # in double, but clipped by a norm that the others have part in
    return 1e-13 if case.param is F64 else 1e-6


def assert_close(name: str, got: Tensor, want: Tensor, before: Tensor, double: float) -> None:
    """float32: 1e-6 of what it is, was, or of 1e-3. 16 bits: at most its neighbour, and rarely."""
    if got.numel() == 0:
        return
    wide, true = got.double(), want.double()
    assert torch.equal(wide.isnan(), true.isnan()), name
    equal = (wide == true) | wide.isnan()
    size = torch.maximum(true.abs(), before.double().abs()).clamp(min=1e-3)
    error = torch.where(equal, 0.0, (wide - true).abs() / size)
    tolerance = TOLERANCE.get(got.dtype, double)
    assert error.max().item() <= tolerance, f"{name}: {error.max().item()}"
    if got.dtype in (BF16, F16):
        assert (~equal).double().mean() <= max(0.01, 1.01 / max(got.numel(), 1)), name
    assert torch.equal(got, before) == torch.equal(want, before), f"{name}: written on one side"


def check(
    emulator: cuda_emulator.Emulator,
    case: Case,
    steps: Steps = one_call,
    orders: tuple[str, ...] = cuda_emulator.ORDERS,
) -> Call:
    """Runs it on both sides; the call as the CPU left it."""
    want, before = Call(case), Call(case).results()
    want_sums = steps(cpu, want)
    first: tuple[Tensor, ...] = ()
    for order in orders:
        got = Call(case)
        emulator.set_order(order)
        sums = steps(emulator.call, got)
        results = (*sums, *got.results().values())
        if first:
            same = all(same_bits(a, b) for a, b in zip(first, results, strict=True))
            assert same, f"depends on the order of threads: {order}"
            continue
        first = results
        for ours, theirs in zip(sums, want_sums, strict=True):
            # Counts are equal. Squares: CUDA adds eight of them in float.
            torch.testing.assert_close(
                ours[:, 0], theirs[:, 0], rtol=0, atol=0, equal_nan=True, msg="counts"
            )
            torch.testing.assert_close(
                ours[:, 1:], theirs[:, 1:], rtol=5e-7, atol=1e-9, equal_nan=True
            )
        for (name, ours), theirs in zip(
            got.results().items(), want.results().values(), strict=True
        ):
            assert_close(name, ours, theirs, before[name], in_double(case))
    return want


def changed(call: Call, case: Case) -> bool:
    return not torch.equal(call.params[-1], Call(case).params[-1])


AMP = {"measures": FINITE | GRADIENTS | PARAMETERS, "max_norm": 2.0}


@pytest.mark.parametrize(
    ("rule", "states"), [(name, n) for name, rule in RULES.items() for n in rule.states]
)
def test_every_rule(emulator: cuda_emulator.Emulator, rule: str, states: int) -> None:
    case = Case(rule, states, step=AMP, scale=1024.0, average=F32)
    case = replace(case, step={**case.step, "average_weight": 0.1})
    assert changed(check(emulator, case), case)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_in_double(emulator: cuda_emulator.Emulator, rule: str) -> None:
    case = Case(rule, param=F64, grad=F64, state=F64, group={"cautious": 1}, step={"trial": 1})
    assert changed(check(emulator, case, orders=("shuffled",)), case)


# Variants of the rules' options that the table above does not reach.
OPTIONS = {
    "sgd plain": Case("sgd", 0, options=(0, 0, 0, 0)),
    "sgd decoupled, corrected": Case("sgd", options=(0.9, 0, 0, 1), group={"max_lr": 0.1}),
    "lars not adapted": Case("lars", options=(0, 0, 0, 1e-3, 1e-8, 0, 0)),
    "adam coupled, maximized": Case(
        options=(0.9, 0.99, 1e-8, 0), group={"sign": -1}, step={"write_back": 1}
    ),
    "lamb decoupled": Case("lamb", options=(0.9, 0.99, 1e-6, 0, 0, 1, 1, 1)),
    "rmsprop not centered": Case("rmsprop", options=(0.9, 1e-3, 0, 0)),
    "rmsprop_tf decoupled": Case("rmsprop_tf", options=(0.9, 1e-3, 0.8, 0, 1, 0)),
    "novograd without amsgrad": Case("novograd", options=(0.9, 0.99, 1e-8, 0, 0)),
    "adam uncorrected": Case(options=(0.9, 0.99, 1e-8, 0, 1)),
    "lamb coupled": Case("lamb", options=(0.9, 0.99, 1e-6, 1, 1, 0, 1, 2)),
    "adagrad decoupled": Case("adagrad", options=(0.1, 1e-3, 1)),
    "novograd of Apex": Case("novograd", options=(0.9, 0.99, 1e-8, 1, 0, 1, 1, 1)),
    "novograd of Apex, from 0": Case("novograd", options=(0.9, 0.99, 1e-8, 1, 0, 1, 0, 2)),
    "learning rate in float": Case(lr=F32),
    "learning rate in double": Case(lr=F64, group={"max_lr": 0.1}),
    "more states than the tensors have": Case("adam", 2, param=(F32, F64)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(emulator: cuda_emulator.Emulator, name: str) -> None:
    assert changed(check(emulator, OPTIONS[name], orders=("shuffled",)), OPTIONS[name])


DTYPES = {
    "half": Case(param=F16, grad=F16, state=F16),
    "bfloat16, float states": Case(param=BF16, grad=BF16),
    "float, half gradients": Case(grad=F16),
    "float, bfloat16 states": Case(state=BF16, grad=BF16),
    "half with masters": Case(param=F16, grad=F16, master=True),
    "bfloat16 with masters": Case(param=BF16, grad=F32, master=True, average=BF16),
    "averages of another dtype": Case(average=F16),
    "float, double gradients and averages": Case(grad=F64, average=F64),
    "float, double states": Case(state=F64),
    "double": Case(param=F64, grad=F64, state=F64, average=F64),
    "double, half gradients": Case(param=F64, grad=F16, average=BF16),
    "mixed": Case(param=(F32, F64, BF16, F16), grad=BF16, state=BF16, master=True, average=F32),
}


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
    case = Case("sgd", shapes=SIZES, param=dtype, grad=dtype, state=dtype, layout=layout, step=AMP)
    check(emulator, case)


UNITS = {"measures": FINITE | GRADIENTS | PARAMETERS, "unit_factor": 0.05}
SHAPES = ((0, 3), (1, 5), (7,), (3000,), (70, 9), (5, 2500), (40, 3, 4, 4), (2, 3), (64, 8, 3, 3))
LAYOUTS = ("contiguous", "offset", "channels_last", "transposed")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units(emulator: cuda_emulator.Emulator, layout: str) -> None:
    """Clipped unit by unit, in any order of elements in memory; and globally as well."""
    case = Case(
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
    case = Case("lamb", shapes=SHAPES, param=dtypes, grad=BF16, master=True, step=UNITS)
    check(emulator, replace(case, group={"cautious": 1}), orders=("reverse",))


@pytest.mark.parametrize("measures", [0, FINITE, GRADIENTS])
def test_units_that_nobody_measures(emulator: cuda_emulator.Emulator, measures: int) -> None:
    """Of gradients alone units are clipped, too; where nothing is measured none is."""
    step = {"measures": measures, "unit_factor": 0.05}
    check(emulator, Case("sgd", shapes=SHAPES, step=step), orders=("shuffled",))


def test_a_unit_of_more_elements_than_a_piece(emulator: cuda_emulator.Emulator) -> None:
    call = Call(Case("sgd", shapes=((1, 2**20 + 8),), step=UNITS))
    emulator.set_order("forward")
    found = emulator.call("measure_gradients", *call.arguments())
    assert isinstance(found, Tensor)
    torch.testing.assert_close(
        found, cpu("measure_gradients", *call.arguments()), rtol=5e-7, atol=0
    )


@pytest.mark.parametrize("layout", LAYOUTS[2:])
def test_layouts(emulator: cuda_emulator.Emulator, layout: str) -> None:
    shapes = ((8, 4, 3, 3), (32, 7), (5,))
    check(emulator, Case(shapes=shapes, layout=layout, step=AMP), orders=("shuffled",))
    other = Case(shapes=shapes, layout=layout, grad_layout="offset", step={"write_back": 1})
    check(emulator, other, orders=("shuffled",))


@pytest.mark.parametrize("write_back", [0, 1, 2])
@pytest.mark.parametrize(
    ("bad", "found_inf", "skips"),
    [
        (float("inf"), None, True),
        (float("-inf"), 0.0, True),
        (float("nan"), None, True),
        (None, 1.0, True),
        (None, 3.0, True),
        (None, float("nan"), True),
        (None, 0.0, False),
        (1e30, None, True),  # finite, but not when divided by the scale
    ],
    ids=str,
)
def test_skipped_steps(
    emulator: cuda_emulator.Emulator,
    write_back: int,
    bad: float | None,
    found_inf: float | None,
    skips: bool,
) -> None:
    case = Case(
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
    case = Case(rule, bad=float("inf"), group={"cautious": 1}, step=step)
    assert not changed(check(emulator, case), case)


def test_a_bad_gradient_that_nobody_asks_for(emulator: cuda_emulator.Emulator) -> None:
    case = Case("sgd", bad=float("inf"), step={"measures": GRADIENTS})
    assert changed(check(emulator, case, orders=("forward",)), case)
    case = Case("sgd", bad=float("nan"))
    call = check(emulator, case, orders=("forward",))
    assert changed(call, case)
    assert call.control[2].isnan()


@pytest.mark.parametrize("rule", ["sgd", "adam", "lion", "lamb"])
@pytest.mark.parametrize("master", [False, True])
def test_caution(emulator: cuda_emulator.Emulator, rule: str, master: bool) -> None:
    case = Case(
        rule, param=F16 if master else F32, grad=F16, master=master, group={"cautious": 1},
        step={**AMP, "trial": 1}, shapes=(*SMALL, (9000,)),
    )  # fmt: skip
    assert changed(check(emulator, case), case)


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
def test_stochastic_rounding(emulator: cuda_emulator.Emulator, layout: str) -> None:
    """The CPU's random bits: hardly an element differs, and none but by one place."""
    shapes = ((1,), (17,), (5000,), (0,), (12000,))
    case = Case(
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
    case = Case("sgd", 0, param=BF16, step={"stochastic": 1}, options=(0, 0, 0, 0))
    for bad in (float("inf"), float("-inf"), float("nan")):
        call = check(emulator, replace(case, bad=bad), orders=("forward",))
        assert not call.params[-1].view(-1)[-1].isfinite()
    # A GPU's own NaN: with a random bit more it would be -0.
    for op in (cpu, emulator.call):
        call = Call(case)
        call.grads[-1].view(torch.int32).fill_(0x7FFFFFFF)
        one_call(op, call)  # type: ignore[arg-type]
        assert call.params[-1].isnan().all()


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_averages_that_stay_or_follow(emulator: cuda_emulator.Emulator, weight: float) -> None:
    case = Case("sgd", average=F32, step={"average_weight": weight})
    call = check(emulator, case, orders=("shuffled",))
    left, followed = Call(case).averages, call.params
    torch.testing.assert_close(call.averages, followed if weight else left)


@pytest.mark.parametrize("rule", ["lamb", "adam", "novograd"])
def test_sums_that_were_measured_before(emulator: cuda_emulator.Emulator, rule: str) -> None:
    case = Case(rule, step={**AMP, "trial": 1}, group={"cautious": 1}, scale=2.0)
    check(emulator, case, three_calls)
    check(emulator, replace(case, bad=float("inf")), three_calls, orders=("shuffled",))
    apart, together = Call(case), Call(case)
    three_calls(emulator.call, apart)
    one_call(emulator.call, together)
    assert all(map(same_bits, apart.results().values(), together.results().values()))


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e-16, 1e17, 1e19, 1e30])
def test_squares_beyond_float(emulator: cuda_emulator.Emulator, size: float) -> None:
    """Eight squares at a time are added in float only where float can hold them."""
    case = Case(shapes=((9000,), (37,)), size=size, step=AMP)
    sums = emulator.call("measure_gradients", *Call(case).arguments())
    assert isinstance(sums, Tensor)
    want = torch.stack([g.double().square().sum() for g in Call(case).grads])
    torch.testing.assert_close(sums[:, 1], want, rtol=3e-7, atol=0)
    torch.testing.assert_close(
        sums, cpu("measure_gradients", *Call(case).arguments()), rtol=3e-7, atol=0
    )


def test_gradients_are_measured_without_states(emulator: cuda_emulator.Emulator) -> None:
    call = Call(Case(shapes=((9000,), (37,), (130, 31)), step={**AMP, "measures": 3.0}))
    sums = emulator.call("measure_gradients", *call.arguments())
    assert isinstance(sums, Tensor)
    assert sums[:, 1].min() > 0
    arguments = list(call.arguments())
    arguments[3:6], arguments[10] = ([], [], []), arguments[10].clone()
    arguments[10][:, 2:] = -1
    assert torch.equal(emulator.call("measure_gradients", *arguments), sums)


def launches(emulator: cuda_emulator.Emulator, case: Case) -> int:
    call = Call(case)
    before = emulator.c.emulator_launches()
    one_call(emulator.call, call)
    return int(emulator.c.emulator_launches() - before)


def test_number_of_launches(emulator: cuda_emulator.Emulator) -> None:
    """The sweeps, sums by tensor and coefficients; a trial makes three more."""
    cnn = Case(shapes=((2,),) * 300, groups=40, step=AMP)
    assert launches(emulator, cnn) == 4
    assert launches(emulator, replace(cnn, step={})) == 2
    assert launches(emulator, replace(cnn, step={**AMP, "trial": 1})) == 7


def test_more_tensors_than_a_launch_holds(emulator: cuda_emulator.Emulator) -> None:
    shapes = tuple((i % 4,) for i in range(1600))
    case = Case(shapes=shapes, param=(F32, F32, BF16), step=AMP, groups=3)
    check(emulator, case, orders=("shuffled",))
    assert launches(emulator, case) == 5 + 2 + 2 + 5
    case = Case("lamb", shapes=shapes[:750], step={**AMP, "unit_factor": 0.1}, param=(F32, F64))
    check(emulator, case, orders=("reverse",))


@pytest.mark.parametrize("groups", [64, 150])
def test_many_groups(emulator: cuda_emulator.Emulator, groups: int) -> None:
    shapes = tuple((i % 6,) for i in range(160))
    case = Case("lars", shapes=shapes, groups=groups, lr=F32, step=AMP)
    check(emulator, case, orders=("shuffled",))


def test_no_elements_at_all(emulator: cuda_emulator.Emulator) -> None:
    """Steps are counted all the same."""
    for trial in (0, 1):
        case = Case(shapes=((0,), (3, 0)), step={**AMP, "trial": trial})
        call = check(emulator, case)
        assert call.scalars[0].tolist() == [1, 4]
        assert call.control[5] == 7
    case = Case(shapes=())
    assert check(emulator, case).control[5] == 6


@pytest.mark.parametrize("found_inf", [0.0, 1.0, 2.0, float("nan")])
def test_update_scale(emulator: cuda_emulator.Emulator, found_inf: float) -> None:
    results = []
    for op in (cpu, emulator.call):
        numbers = torch.tensor([8.0]), *(torch.tensor([n], dtype=torch.int32) for n in (1, 1))
        for _ in range(2):
            op("update_scale", *numbers, torch.tensor([found_inf]), 2.0, 0.5, 2, 2, 1.0, 12.0)
        results.append(torch.cat(numbers))
    assert torch.equal(*results)
    assert results[0][0] == (12 if found_inf == 0 else 2)


def test_zero_tensors(emulator: cuda_emulator.Emulator) -> None:
    around = [torch.ones(n + 2, dtype=torch.uint8) for n in (*range(40), 32768, 100003, *[1] * 300)]
    emulator.set_order("shuffled")
    emulator.call("zero_tensors", [t[1:-1] for t in around])
    assert all(t.sum() == 2 for t in around)
    strided = torch.ones(6, 5)
    emulator.call("zero_tensors", [strided[:, 1:3], strided[:1, :1]])
    assert strided.sum() == 30 - 12 - 1
