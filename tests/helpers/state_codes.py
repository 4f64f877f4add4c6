"""Helpers of the tests of states in 8-bit codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtrain.reference.optimizers import GroupOptions
from fusedtrain.reference.state_codes import (
    GROUP,
    SIGNED,
    SQUARES,
    dequantise,
    group_count,
    in_memory_order,
    is_codes,
    quantise,
)
from helpers.optimizer_cases import F32, Case, Spec
from helpers.optimizers import RULES

SEED = 2**40 + 77


def coded(case: Case) -> list[tuple[int, int, int]]:
    """Parameter, slot and index in the list of each state that is in codes."""
    return [
        (i, k, row[2 + k])
        for i, row in enumerate(case.rows.tolist())
        for k in range(3)
        if row[2 + k] >= 0 and is_codes(case.states[row[2 + k]])
    ]


def numbers(case: Case, index: int) -> Tensor:
    """Numbers of the codes at that place of the list, in the order of memory."""
    return in_memory_order(dequantise(case.states[index], case.states[index + 1]))


def set_numbers(case: Case, index: int, values: Tensor) -> None:
    """Rounds the values, in the order of memory, to the nearest numbers of codes."""
    codes, scales = quantise(values, case.states[index].dtype)
    in_memory_order(case.states[index]).copy_(codes)
    case.states[index + 1].copy_(scales)


def random_states(case: Case) -> None:
    """Sets states to numbers whose sizes differ from group to group; squares are positive."""
    for _, _, index in coded(case):
        n = case.states[index].numel()
        size = 10.0 ** torch.randint(-4, 2, (group_count(n),), generator=case.generator)
        values = torch.randn(n, generator=case.generator) * size.repeat_interleave(GROUP)[:n]
        values = values.abs() if case.states[index].dtype == SQUARES else values
        set_numbers(case, index, values)


def holder(values: Tensor, dtype: torch.dtype, layout: str = "contiguous", **step: Any) -> Case:
    """A step of SGD with momentum 0: the new state is the gradient."""
    spec = Spec(tuple(values.shape), layout=layout, states=[0], state_dtype=SIGNED)
    step = {"measures": 0, "seed": float(SEED % 2**32), "seed_high": float(SEED >> 32), **step}
    case = Case("sgd", [spec], [{"lr": 0.0, "momentum": 0.0}], **step)
    case.grads[0].copy_(values)
    if dtype == SQUARES:
        case.states[0] = case.states[0].view(SQUARES)
    return case


def groups_of_all_kinds() -> Tensor:
    """Zeros, denormals, the bounds of scales, huge numbers, infinities, NaN, and mixtures."""
    g = torch.Generator().manual_seed(5)
    random = torch.randint(-(2**31), 2**31, (12 * GROUP,), generator=g).to(torch.int32)
    normal = torch.randn(40 * GROUP, generator=g)
    rows = [random.view(F32), normal, normal[: 20 * GROUP] * normal[20 * GROUP :] ** 9]
    even = torch.randn(GROUP, generator=g)
    for size in (0.0, 1e-45, 1e-38, 2.0**-101, 2.0**-100, 2.0**-99, 1e-20, 1e20, 2.0**118):
        rows += [even * size, torch.cat([even[:9] * size, torch.full((23,), size)])]
    edges = torch.tensor([2.0**-100, 2.0**119, -(2.0**119), 3e38])
    below = (edges.view(torch.int32) - 1).view(F32)
    for x in [*edges.tolist(), *below.tolist(), float("inf"), float("-inf"), float("nan")]:
        rows.append(torch.cat([even[:7] * min(abs(x), 1.0), torch.tensor([x]), even[:24] * 1e-3]))
    one = torch.zeros(GROUP)
    one[31] = -1.0
    rows += [one, -one, torch.cat([one[:-1], torch.tensor([1e-30])]), one + 1e-42]
    rows += [one * -x for x in (*edges.tolist(), *below.tolist())]
    # Numbers of codes exactly, and those halfway between two.
    k = torch.arange(-127.0, 128.0)
    codes = k / (254 - k.abs())
    rows += [torch.cat([part, torch.ones(GROUP - len(part))]) for part in codes.split(GROUP - 1)]
    half = (k[:-1] + 0.5) / (254 - (k[:-1] + 0.5).abs())
    rows += [torch.cat([part, torch.ones(GROUP - len(part))]) for part in half.split(GROUP - 1)]
    return torch.cat([row.flatten() for row in rows])


def column_of(name: str) -> int:
    """The column of an option of SGD in the table."""
    return len(GroupOptions._fields) - 1 + RULES["sgd"].options.index(name)


def neighbours(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the codes below and above, in the order of memory."""
    signed = codes.dtype == SIGNED
    k = in_memory_order(codes).to(torch.int16)
    least, most = (-127, 127) if signed else (0, 255)
    beside = [
        in_memory_order(dequantise((k + by).clamp(least, most).to(codes.dtype), scales))
        for by in (-1, 1)
    ]
    return beside[0], beside[1]
