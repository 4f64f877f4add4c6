"""Pointwise chains against eager torch and torch.compile: gated linear units, bias + activation +
dropout, gates over space, residual branches. Rivals take turns within one test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import ops
from benchmarks.harness.cases import LAYOUTS, Options, dtype_name
from benchmarks.harness.guards import admit, refuse_the_reference
from benchmarks.harness.race import Race
from fusedtrain.advisor.bench.chains import CHAINS, IMAGE, PASSES, check
from fusedtrain.advisor.bench.clock import Call, Function, compiled

FAMILY = "chains"
REPORT = ops.report(FAMILY)
SIZES = {"cpu": (2**22, 2**24), "cuda": (2**22, 2**26)}
QUICK_SIZE = 2**16
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
GATE = 2**19  # elements that the gate looks at


@dataclass(frozen=True)
class Case:
    """One row."""

    op: str
    size: int
    dtype: torch.dtype
    layout: str
    pass_name: str
    compiled: bool
    model: str = ""

    def __str__(self) -> str:
        exponent = self.size.bit_length() - 1
        parts = (self.op, self.pass_name, dtype_name(self.dtype), self.layout, f"2^{exponent}")
        return "-".join(filter(None, parts))


def select(options: Options) -> list[Case]:
    """The cases of a run. torch.compile takes part in forward+backward of the first dtype, at the
    larger size; --full has it everywhere."""
    if options.models:
        return []
    dtypes, sizes = DTYPES[options.device], SIZES[options.device]
    cases = []
    for size in (QUICK_SIZE,) if options.quick else sizes:
        for dtype in dtypes[:1] if options.quick else dtypes:
            for op, chain in CHAINS.items():
                for layout in LAYOUTS if chain.image else ("",):
                    for pass_name in PASSES:
                        common = pass_name == PASSES[1] and dtype == dtypes[0]
                        rival = options.full or (common and size == sizes[-1])
                        compiled = options.compiled and rival
                        cases.append(Case(op, size, dtype, layout, pass_name, compiled))
    return [case for case in cases if options.wants(case.op)]


@lru_cache(maxsize=1)
def _tensors(op: str, size: int, dtype: torch.dtype, layout: str, device: str) -> tuple[Any, ...]:
    """The arguments, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    chain = CHAINS[op]
    shapes = chain.shapes(max(size, IMAGE) if chain.image else size)
    made = []
    for shape in shapes:
        t = torch.randn(shape, generator=generator).to(device, dtype)
        kind = LAYOUTS.get(layout, torch.contiguous_format)
        made.append(t.contiguous(memory_format=kind) if t.dim() == 4 else t)
    grad = torch.randn(chain.eager(*made).shape, generator=generator).to(device, dtype)
    if grad.dim() == 4:
        grad = grad.contiguous(memory_format=LAYOUTS[layout])
    return tuple(made), grad


def _entrants(case: Case, tensors: tuple[Tensor, ...], grad: Tensor) -> dict[str, Function]:
    """The contestants that passed the gate."""
    chain = CHAINS[case.op]
    contestants: dict[str, Function] = {"fusedtrain": chain.ours, "eager": chain.eager}
    if case.compiled:
        contestants["compile"] = compiled(chain.eager)
    few = max(1, GATE // (tensors[0].numel() // len(tensors[0])))
    batch = len(tensors[0])
    # Biases are not split, even if they are as many as the rows. Stochastic depth's numbers are.
    split = [t.dim() > 1 or i >= len(tensors) - chain.constants for i, t in enumerate(tensors)]
    part = tuple(
        t[:few] if is_split and len(t) == batch else t
        for t, is_split in zip(tensors, split, strict=True)
    )

    def gate(who: str, function: Function) -> None:
        whole = who == "compile"  # which compiles for one size
        check(chain, function, tensors if whole else part, grad if whole else grad[:few])

    return admit(contestants, gate, str(case))


def _call(function: Function, case: Case, tensors: tuple[Tensor, ...], grad: Tensor) -> Call:
    if case.pass_name == "forward":
        return lambda: function(*tensors)
    trained = len(tensors) - CHAINS[case.op].constants
    leaves = [t.detach().requires_grad_(i < trained) for i, t in enumerate(tensors)]
    return lambda: torch.autograd.grad(function(*leaves), leaves[:trained], grad)


def test_chain(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("gated", race.device)
    tensors, grad = _tensors(case.op, case.size, case.dtype, case.layout, race.device)
    entrants = _entrants(case, tensors, grad)
    if race.is_off:
        return
    forward, backward = CHAINS[case.op].tensors
    race.tensors(
        {who: _call(function, case, tensors, grad) for who, function in entrants.items()},
        tensors[0],
        family=FAMILY,
        op=case.op,
        pass_name=case.pass_name,
        tensors=forward if case.pass_name == "forward" else forward + backward,
        shape=list(tensors[0].shape),
        layout=case.layout,
    )
