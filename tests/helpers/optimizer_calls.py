"""Calls of the optimizer ops for the tests of the CUDA kernels: their kinds, tensors, comparison.

Each call runs on the CPU's kernels and on a GPU's (emulated or not), from the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cuda_emulator
from fusedtrain.reference import RULES
from fusedtrain.reference.optimizers import GroupOptions, StepOptions
from helpers.backends import same_bits
from helpers.optimizer_cases import RULE_NAMES, Arguments, in_layout
from helpers.optimizers import NAMES, RULES as OF_RULES, class_of

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
FINITE, GRADIENTS, PARAMETERS = 1, 2, 4  # what a step measures
# How many states an element may have, by rule.
STATES = {rule.name: (*range(rule.least, rule.most + 1),) for rule in RULES}
# Measurements of a step of the rule, and whether it tries the update first.
NEEDS = {kind._rule: (kind._norms, kind._tries) for kind in map(class_of, NAMES)}

SMALL = ((0,), (1,), (15,), (17,), (1023,), (8, 3, 3, 3))
SIZES = ((0,), (1,), (15,), (17,), (1023,), (4097,), (40000,))


@dataclass(frozen=True)
class Kind:
    """Properties that all parameters of one call share."""

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
    options: dict[str, float] = field(default_factory=dict)
    step: dict[str, float] = field(default_factory=dict)
    groups: int = 2
    lr: torch.dtype | None = None
    scale: float | None = None
    found_inf: float | None = None
    bad: float | None = None  # the last four elements of the last gradient
    size: float = 1.0  # of gradients
    steps_done: int = 3


class Call(Arguments):
    """The tensors of a kind of call, always the same ones."""

    def __init__(self, case: Kind) -> None:
        random = torch.Generator().manual_seed(1)
        norms, tries = NEEDS[case.rule]

        def normal(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape, generator=random, dtype=F64)

        def companion(values: Tensor, dtype: torch.dtype, layout: str = "") -> Tensor:
            return in_layout(values.to(dtype), layout or case.layout)

        count = len(case.shapes)
        states = STATES[case.rule][-1] if case.states < 0 else case.states
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
            "measures": norms, "norm_eps": 1e-6, "unit_eps": 1e-3, "seed": 2**40 + 17,
            "seed_high": 2**31 + 3, "trial": tries, **case.step,
        }  # fmt: skip
        table = [StepOptions(*(float(step.get(name, 0)) for name in StepOptions._fields)).row()]
        rule = OF_RULES[case.rule]
        options = {**rule.busy, **case.options}
        option = tuple(float(options.get(name, 0)) for name in rule.options)
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
            shared = (float(group.get(name, 0)) for name in GroupOptions._fields[:-1])
            table.append(GroupOptions(*shared, option=option).row())
        self.table = torch.tensor(table, dtype=F64)
        self.rule = RULE_NAMES.index(case.rule)
        self.scale = None if case.scale is None else torch.tensor([case.scale])
        self.found_inf = None if case.found_inf is None else torch.tensor([case.found_inf])

    def results(self) -> dict[str, Tensor]:
        return {f"{name} {t.dtype} {tuple(t.shape)}": t for name, t in self.written()}


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


AMP = {"measures": FINITE | GRADIENTS | PARAMETERS, "max_norm": 2.0}
DTYPES = {
    "half": Kind(param=F16, grad=F16, state=F16),
    "bfloat16, float states": Kind(param=BF16, grad=BF16),
    "float, half gradients": Kind(grad=F16),
    "float, bfloat16 states": Kind(state=BF16, grad=BF16),
    "half with masters": Kind(param=F16, grad=F16, master=True),
    "bfloat16 with masters": Kind(param=BF16, grad=F32, master=True, average=BF16),
    "averages of another dtype": Kind(average=F16),
    "float, double gradients and averages": Kind(grad=F64, average=F64),
    "float, double states": Kind(state=F64),
    "double": Kind(param=F64, grad=F64, state=F64, average=F64),
    "double, half gradients": Kind(param=F64, grad=F16, average=BF16),
    "mixed": Kind(param=(F32, F64, BF16, F16), grad=BF16, state=BF16, master=True, average=F32),
}
UNITS = {"measures": FINITE | GRADIENTS | PARAMETERS, "unit_factor": 0.05}
SHAPES = ((0, 3), (1, 5), (7,), (3000,), (70, 9), (5, 2500), (40, 3, 4, 4), (2, 3), (64, 8, 3, 3))


TOLERANCE = {F32: 1e-6, BF16: 2.0**-7, F16: 2.0**-10}


def in_double(case: Kind) -> float:
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
    case: Kind,
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
        for ours, theirs, off in zip(sums, want_sums, (5e-7, 4e-6)[: len(sums)], strict=True):
            # Counts are equal. Squares: CUDA adds eight of them in float, and those of trial
            # updates have quotients and roots of 2 ULP.
            torch.testing.assert_close(
                ours[:, 0], theirs[:, 0], rtol=0, atol=0, equal_nan=True, msg="counts"
            )
            torch.testing.assert_close(
                ours[:, 1:], theirs[:, 1:], rtol=off, atol=1e-9, equal_nan=True
            )
        for (name, ours), theirs in zip(
            got.results().items(), want.results().values(), strict=True
        ):
            assert_close(name, ours, theirs, before[name], in_double(case))
    return want


def changed(call: Call, case: Kind) -> bool:
    return not torch.equal(call.params[-1], Call(case).params[-1])
