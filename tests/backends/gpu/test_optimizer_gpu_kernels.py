"""The optimizer step of every GPU backend beside the CPU's: with data that lie on a GPU, where
there is one, as they lie here. test_cuda_optimizers.py has the long table, emulated.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from fusedtrain.reference.state_codes import SIGNED, SQUARES
from helpers.backends import BACKENDS, Kernels, placed
from helpers.optimizer_calls import AMP, BF16, DTYPES, F16, F32, F64, SHAPES, UNITS, Call, Kind, cpu
from helpers.optimizer_cases import Arguments, Case, Spec, bits
from helpers.optimizers import busy
from helpers.state_codes import coded, groups_of_all_kinds, holder, random_states

OPS = ("measure_gradients", "try_update", "optimizer_step", "update_scale", "zero_tensors")
SIZES = ((0,), (1,), (15,), (17,), (1023,), (4099,))
STEP = {**AMP, "average_weight": 0.25, "write_back": 1}


@pytest.fixture(params=["emulated", "triton", "cuda"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    kernels = BACKENDS[request.param]()
    if not all(map(kernels.has, OPS)):
        pytest.skip(f"not a case: {request.param} has no optimizer step")
    return kernels


A = TypeVar("A", bound=Arguments)


def place(call: A, device: str) -> A:
    """Moves it to the device, misaligned where it is."""
    for name in ("params", "grads", "states", "masters", "averages", "lrs"):
        setattr(call, name, [placed(t, device) for t in getattr(call, name)])
    for name in ("scalars", "control", "scale", "found_inf"):
        value = getattr(call, name)
        setattr(call, name, None if value is None else placed(value, device))
    return call


# Relative to the largest of what a number is, was, and 1e-3. A GPU divides to 2 units in the last
# place; 16-bit numbers are then sometimes rounded to a neighbour.
TOLERANCE = {F32: 2e-5, F64: 1e-6, F16: 2.0**-10, BF16: 2.0**-7}


def assert_close(name: str, got: Tensor, want: Tensor, before: Tensor) -> None:
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan()), name
    size = torch.maximum(want.double().abs(), before.double().abs()).clamp(min=1e-3)
    off = ((got.double() - want.double()).abs() / size).nan_to_num()
    assert not off.numel() or off.max() <= TOLERANCE[got.dtype], f"{name}: {off.max()}"
    if got.dtype in (F16, BF16) and got.numel() > 100:
        assert (got != want).double().mean() < 0.05, name
    assert torch.equal(got, before) == torch.equal(want, before), f"{name}: written on one side"


def check(ops: Kernels, case: Kind) -> None:
    before, want = Call(case).results(), Call(case)
    sums = cpu("optimizer_step", *want.arguments(), None, None)
    got = place(Call(case), ops.device)
    if case.layout == "offset":
        assert any(t.data_ptr() % 16 for t in got.params)
        assert any(t.data_ptr() % 16 for t in got.grads)
    gpu_sums = ops("optimizer_step", *got.arguments(), None, None)
    torch.testing.assert_close(gpu_sums.cpu(), sums, rtol=5e-6, atol=1e-9)
    for (name, ours), theirs in zip(got.results().items(), want.results().values(), strict=True):
        assert_close(name, ours, theirs, before[name])
    moved = [a for a, b in zip(want.params, Call(case).params, strict=True) if not a.equal(b)]
    assert moved


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "contiguous") for name in DTYPES),
        *zip(DTYPES, cycle(("offset", "transposed")), strict=False),
    ],
)
def test_dtypes(ops: Kernels, name: str, layout: str) -> None:
    shapes = ((15,), (33, 31), (8, 3, 3, 3))
    check(ops, replace(DTYPES[name], layout=layout, scale=8.0, step=STEP, shapes=shapes))


@pytest.mark.parametrize(
    ("rule", "dtype", "layout"),
    [  # every two of the three
        ("sgd", F32, "offset"), ("sgd", BF16, "contiguous"), ("adam", F32, "contiguous"),
        ("adam", BF16, "offset"), ("lamb", F32, "offset"), ("lamb", BF16, "contiguous"),
    ],
    ids=str,
)  # fmt: skip
def test_sizes(ops: Kernels, rule: str, dtype: torch.dtype, layout: str) -> None:
    case = Kind(rule, shapes=SIZES, param=dtype, grad=dtype, state=dtype, layout=layout, step=AMP)
    check(ops, case)


@pytest.mark.parametrize("layout", ["contiguous", "offset", "channels_last"])
def test_units(ops: Kernels, layout: str) -> None:
    step: dict[str, Any] = {**UNITS, "max_norm": 5.0, "write_back": 1}
    interpreted = ops.counter == "triton" and ops.slow
    shapes = ((1, 5), (7,), (20, 9), (12, 3, 4, 4)) if interpreted else SHAPES
    check(ops, Kind("lars", shapes=shapes, layout=layout, step=step))


def test_parts_of_a_step(ops: Kernels) -> None:
    """Gradients are measured and the update is tried before the step."""
    case = Kind("lamb", shapes=SIZES, layout="offset", step={**AMP, "trial": 1}, scale=2.0)
    want, got = Call(case), place(Call(case), ops.device)
    sums = cpu("measure_gradients", *want.arguments())
    gpu_sums = ops("measure_gradients", *got.arguments())
    torch.testing.assert_close(gpu_sums.cpu(), sums, rtol=5e-6, atol=1e-9)
    trials = cpu("try_update", *want.arguments(), sums)
    tried = ops("try_update", *got.arguments(), gpu_sums)
    torch.testing.assert_close(tried.cpu(), trials, rtol=2e-4, atol=1e-6)
    cpu("optimizer_step", *want.arguments(), sums, trials)
    ops("optimizer_step", *got.arguments(), gpu_sums, tried)
    before = Call(case).results()
    for (name, ours), theirs in zip(got.results().items(), want.results().values(), strict=True):
        assert_close(name, ours, theirs, before[name])


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("dtype", [SIGNED, SQUARES], ids=["signed", "squares"])
def test_bits_of_codes(ops: Kernels, dtype: torch.dtype, layout: str) -> None:
    """Where the rule computes nothing: every code and scale is the CPU's."""
    values = groups_of_all_kinds()
    for length in (len(values), len(values) - 15):
        want = holder(values[:length], dtype, layout)
        got = place(holder(values[:length], dtype, layout), ops.device)
        cpu("optimizer_step", *want.arguments(), None, None)
        ops("optimizer_step", *got.arguments(), None, None)
        codes, scales = (t.cpu() for t in got.states)
        assert torch.equal(codes, want.states[0])
        finite = want.states[1].isfinite()
        assert torch.equal(scales.isfinite(), finite)
        assert bits(scales[finite]) == bits(want.states[1][finite])


@pytest.mark.parametrize("rule", ["adam", "lamb", "rmsprop"])
def test_states_in_codes(ops: Kernels, rule: str) -> None:
    """Beside the CPU's: a code is its neighbour where the rule rounds otherwise, and rarely."""
    layouts = ("contiguous", "channels_last", "contiguous", "offset")
    shapes = ((1,), (6, 3, 5, 4), (4133,), (33,))
    specs = [Spec(s, layout=at, state_dtype=SIGNED) for s, at in zip(shapes, layouts, strict=True)]
    specs.append(Spec((130,), F16, state_dtype=F32, master=True))
    case = Case(rule, specs, [busy(rule)], scale=4.0, measures=7, trial=1, average_weight=0.0)
    random_states(case)
    got = place(case.clone(), ops.device)
    sums = cpu("optimizer_step", *case.arguments(), None, None)
    gpu_sums = ops("optimizer_step", *got.arguments(), None, None)
    torch.testing.assert_close(gpu_sums.cpu(), sums, rtol=5e-6, atol=1e-9)
    for ours, theirs in zip(got.params, case.params, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    total = others = 0
    for _, _, index in coded(case):
        ours, theirs = (t.states[index].cpu().to(torch.int16) for t in (got, case))
        assert (ours - theirs).abs().max() <= 1
        total, others = total + ours.numel(), others + int((ours != theirs).sum())
        torch.testing.assert_close(got.states[index + 1].cpu(), case.states[index + 1])
    assert others <= total / 300


# Steps without and with an overflow; two in a row reach the least scale, many none the largest.
FLAGS = [0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 2, math.nan, math.inf, *[0] * 12, *[1] * 8]


@pytest.mark.parametrize("limits", [(3.0, 0.01, 100.0), (3e38, 0.0, math.inf), (1e-3, 1e-3, 1.0)])
@pytest.mark.parametrize("hysteresis", [1, 2])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.7, 0.3)])
def test_update_scale(
    ops: Kernels, factors: tuple[float, float], hysteresis: int, limits: tuple[float, ...]
) -> None:
    """The CPU's numbers after each step."""
    first, low, high = limits
    counts = (torch.tensor([n], dtype=torch.int32) for n in (0, hysteresis))
    theirs = [torch.tensor([first]), *counts]
    ours = [t.clone().to(ops.device) for t in theirs]
    for flag in FLAGS:
        overflow, options = torch.tensor([float(flag)]), (*factors, 2, hysteresis, low, high)
        cpu("update_scale", *theirs, overflow, *options)
        ops("update_scale", *ours, overflow.to(ops.device), *options)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


def test_zero_tensors(ops: Kernels) -> None:
    """To the byte, at every alignment, in every dtype and many at once; nothing around them."""
    sizes = (*range(40), 1023, 4097, 32_768, 100_003, *[1] * 300)
    around = [torch.ones(n + 3, dtype=torch.uint8).to(ops.device) for n in sizes]
    ops("zero_tensors", [t[i % 3 : i % 3 + t.numel() - 3] for i, t in enumerate(around)])
    assert all(t.cpu().sum() == 3 for t in around)
    made = [
        torch.ones(n + 32, dtype=dtype).to(ops.device)
        for dtype in (F32, F64, F16, BF16, torch.int32, torch.bool)
        for n in (0, 1, 3, 15, 17, 1023, 4097)
    ]
    ops("zero_tensors", [t[9:-23] for t in made])
    assert all(t[:9].all() and t[-23:].all() and not t[9:-23].any() for t in made)
    strided = torch.ones(6, 5).to(ops.device)
    ops("zero_tensors", [strided[:, 1:3], strided[:1, :1], torch.ones(4, 6).to(ops.device).t()])
    assert strided.sum() == 30 - 12 - 1
