"""Batch norm with what follows it against eager torch and torch.compile of that.

The standard shapes, in every layout and dtype; and every distinct batch norm of real networks
(``shapes.py``) against eager. Rivals take turns within one test.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.harness import ops, shapes
from benchmarks.harness.cases import LAYOUTS, Options, dtype_name
from benchmarks.harness.guards import admit, refuse_the_reference
from benchmarks.harness.race import Race
from fusedtrain._text import shape_text
from fusedtrain.advisor.bench.clock import Call
from fusedtrain.advisor.bench.norms import (
    CONTESTANTS,
    OPS,
    PASSES,
    Contestant,
    Exact,
    NormOp,
    check,
    exact,
)

FAMILY = "batch_norm"
REPORT = ops.report(FAMILY)
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


# --- the gate ---


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
        size = shape_text(self.shape)
        parts = (self.model, self.op, self.pass_name, dtype_name(self.dtype), self.layout, size)
        return "-".join(filter(None, parts))


def select(options: Options) -> list[Case]:
    """The cases of a run, those that share tensors together."""
    cases: list[Case] = []
    if options.quick and not options.models:
        cases = [
            Case(op, QUICK_SHAPE, torch.float32, layout, PASSES[1])
            for layout in LAYOUTS
            for op in options.ops or ("bn_silu", "bn_add_relu")
            if op in STANDARD
        ]
    elif not options.models:
        cases = _standard(options)
    if not options.quick or options.models:
        cases += _of_networks(options)
    if options.quick and options.models:
        cases = cases[:2]
    return [case for case in cases if not options.ops or case.op in options.ops]


def _standard(options: Options) -> list[Case]:
    first, *others = DTYPES[options.device]
    last = SHAPES[options.device][-1]
    cases = []
    for shape in SHAPES[options.device]:
        for dtype in ALL_DTYPES if options.full else (first, *others):
            if not options.full and dtype != first and shape != last:
                continue
            for layout in LAYOUTS:
                for op in STANDARD:
                    for pass_name in PASSES:
                        trains = pass_name == PASSES[1] and not OPS[op].frozen
                        rival = options.full or (trains and dtype == first and shape == last)
                        compiled = options.compiled and rival
                        cases.append(Case(op, shape, dtype, layout, pass_name, compiled=compiled))
    return cases


def _of_networks(options: Options) -> list[Case]:
    return [
        Case(
            layer.op, (batch, *layer[1:]), torch.float32, layout, pass_name, network,
            options.compiled and options.full,
        )
        for network in shapes.NORM_NETWORKS
        if not options.models or network in options.models
        for layer in shapes.distinct_norms(network)
        for batch in LAYER_BATCHES
        for layout in LAYOUTS
        for pass_name in (PASSES if options.full else PASSES[1:])
    ]  # fmt: skip


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
    """Contestants that passed the gate."""
    op = OPS[case.op]
    key = (case.shape, case.dtype, case.layout, device)
    batch = case.shape[0] if case.compiled else GATE_BATCH
    x, residual, _ = (t[:batch] for t in _tensors(*key))
    contestants = {
        who: make(op, case.shape[1], device)
        for who, make in CONTESTANTS.items()
        if who != "compile" or case.compiled
    }

    def gate(who: str, contestant: Contestant) -> None:
        check(contestant, _exact(op, *key, batch), x, residual if op.add else None)

    return admit(contestants, gate, f"{case} on {device}")


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


def test_batch_norm(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("batch_norm_act", race.device)
    entrants = _entrants(case, race.device)
    if race.is_off():
        return
    tensors = _tensors(case.shape, case.dtype, case.layout, race.device)
    race.tensors(
        {who: _call(contestant, case, tensors) for who, contestant in entrants.items()},
        tensors[0],
        family=FAMILY,
        op=case.op,
        pass_name=case.pass_name,
        tensors=OPS[case.op].tensors(case.pass_name),
        shape=list(case.shape),
        layout=case.layout,
        model=case.model,
    )
