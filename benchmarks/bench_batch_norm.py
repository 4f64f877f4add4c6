"""Batch norm with what follows it against eager torch and torch.compile of that.

The standard shapes, in every layout and dtype; and every distinct batch norm of real networks
(``_norm_shapes.py``) against eager. Rivals take turns within one test.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks._guards import admit, refuse_the_reference
from benchmarks._measure import Call, Clock, Effort, ReplayClock, dtype_name
from benchmarks._norm_contestants import (
    CONTESTANTS,
    OPS,
    Contestant,
    Exact,
    NormOp,
    check,
    exact,
)
from benchmarks._norm_shapes import NETWORKS, distinct_layers
from benchmarks._race import race

FAMILY = "batch_norm"
Shape = tuple[int, ...]
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cpu": ((16, 96, 56, 56), (32, 96, 56, 56)),
    "cuda": ((32, 96, 56, 56), (256, 96, 56, 56)),  # the smaller fits into the L2 cache
}
QUICK_SHAPE = (2, 16, 14, 14)
# In which a device trains. The second only at the last shape; torch.compile, which takes 5 s and
# more a row on the CPU, there in the first, forward+backward. --full has all with all.
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STANDARD = ("bn_relu", "bn_silu", "bn_add_relu", "frozen_bn_relu")
LAYER_BATCHES = (8, 32)
GATE_BATCH = 8  # a row with torch.compile has its whole batch checked: it compiles for one size
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
PASSES = ("forward", "forward+backward")
REPLAY = ReplayClock()


@dataclass(frozen=True)
class Case:
    """One row: its rivals share the tensors and the measurement loop."""

    op: str
    shape: Shape
    dtype: torch.dtype
    layout: str
    pass_name: str
    model: str = ""  # the network that has this layer
    compiled: bool = False

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        parts = (self.model, self.op, self.pass_name, dtype_name(self.dtype), self.layout, size)
        return "-".join(filter(None, parts))


def select(
    device: str = "cpu",
    *,
    full: bool = False,
    quick: bool = False,
    compiled: bool = True,
    ops: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a run, those that share tensors together."""
    cases = []
    if quick and not models:
        cases = [
            Case(op, QUICK_SHAPE, torch.float32, layout, PASSES[1])
            for layout in LAYOUTS
            for op in ops or ("bn_silu", "bn_add_relu")
            if op in STANDARD
        ]
    if not quick and not models:
        cases = _standard(device, full, compiled)
    if not quick or models:
        cases += _of_networks(full, compiled, models)
    if quick and models:
        cases = cases[:2]
    return [case for case in cases if not ops or case.op in ops]


def _standard(device: str, full: bool, compiled: bool) -> list[Case]:
    first, *others = DTYPES[device]
    cases = []
    for shape in SHAPES[device]:
        for dtype in ALL_DTYPES if full else (first, *others):
            if not full and dtype != first and shape != SHAPES[device][-1]:
                continue
            for layout in LAYOUTS:
                for op in STANDARD:
                    for pass_name in PASSES:
                        trains = pass_name == PASSES[1] and not OPS[op].frozen
                        common = trains and dtype == first and shape == SHAPES[device][-1]
                        rival = full or common
                        cases.append(
                            Case(op, shape, dtype, layout, pass_name, compiled=compiled and rival)
                        )
    return cases


def _of_networks(full: bool, compiled: bool, models: tuple[str, ...]) -> list[Case]:
    return [
        Case(
            layer.op, (batch, *layer[1:]), torch.float32, layout, pass_name, network,
            compiled and full,
        )
        for network in NETWORKS
        if not models or network in models
        for layer in distinct_layers(network)
        for batch in LAYER_BATCHES
        for layout in LAYOUTS
        for pass_name in (PASSES if full else PASSES[1:])
    ]  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        option("--device"),
        full=option("--full"),
        quick=option("--quick"),
        compiled=not option("--no-compile"),
        ops=tuple(option("--op")),
        models=tuple(option("--model")),
    )
    metafunc.parametrize("case", cases, ids=str)


@lru_cache(maxsize=1)
def _tensors(shape: Shape, dtype: torch.dtype, layout: str, device: str) -> tuple[Tensor, ...]:
    """Input, residual, gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(shape, generator=generator) for _ in range(3))
    kind = LAYOUTS[layout]
    x, residual, gradient = (t.to(device, dtype).contiguous(memory_format=kind) for t in numbers)
    return 0.5 + 2 * x, residual, gradient


@lru_cache(maxsize=1)
def _exact(
    op: NormOp, shape: Shape, dtype: torch.dtype, layout: str, device: str, batch: int
) -> Exact:
    x, residual, gradient = (t[:batch] for t in _tensors(shape, dtype, layout, device))
    return exact(op, x, residual if op.add else None, gradient)


def _entrants(case: Case, device: str) -> dict[str, Contestant]:
    """Those that passed the gate."""
    op = OPS[case.op]
    key = (case.shape, case.dtype, case.layout, device)
    batch = case.shape[0] if case.compiled else GATE_BATCH
    x, residual, _ = (t[:batch] for t in _tensors(*key))
    found = {
        who: make(op, case.shape[1], device)
        for who, make in CONTESTANTS.items()
        if who != "compile" or case.compiled
    }

    def gate(who: str, contestant: Contestant) -> None:
        check(contestant, _exact(op, *key, batch), x, residual if op.add else None)

    return admit(found, gate, f"{case} on {device}")


def _call(contestant: Contestant, case: Case, tensors: tuple[Tensor, ...]) -> Call:
    x, residual, gradient = tensors
    function = contestant.function
    added = residual if OPS[case.op].add else None
    if case.pass_name == "forward":
        return lambda: function(x, added)
    x = x.detach().requires_grad_()
    added = None if added is None else added.detach().requires_grad_()
    leaves = contestant.leaves(x, added)
    return lambda: torch.autograd.grad(function(x, added), leaves, gradient)


@pytest.mark.benchmark(timer=REPLAY)
def test_batch_norm(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("batch_norm_act", device)
    entrants = _entrants(case, device)
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    tensors = _tensors(case.shape, case.dtype, case.layout, device)
    calls: dict[str, Call] = {who: _call(c, case, tensors) for who, c in entrants.items()}
    benchmark.group = f"{dtype_name(case.dtype)} {case.shape} {case.pass_name}"
    race(
        benchmark,
        REPLAY,
        calls,
        tensors[0],
        clock,
        effort,
        op=case.op,
        pass_name=case.pass_name,
        tensors=OPS[case.op].tensors(case.pass_name),
        family=FAMILY,
        shape=list(case.shape),
        layout=case.layout,
        model=case.model,
    )
