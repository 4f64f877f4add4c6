"""Pointwise chains against eager torch and torch.compile: gated linear units, bias + activation +
dropout, gates over space, residual branches. Rivals take turns within one test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks._chain_contestants import CHAINS, Function, check
from benchmarks._guards import admit, refuse_the_reference
from benchmarks._measure import Call, Clock, Effort, ReplayClock, dtype_name
from benchmarks._race import race

FAMILY = "chains"
PASSES = ("forward", "forward+backward")
SIZES = {"cpu": (2**22, 2**24), "cuda": (2**22, 2**26)}
QUICK_SIZE = 2**16
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
GATE = 2**19  # elements that the gate looks at
IMAGE = 96 * 56 * 56
REPLAY = ReplayClock()


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


def select(
    device: str = "cpu",
    *,
    full: bool = False,
    quick: bool = False,
    compiled: bool = True,
    ops: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a run. torch.compile takes part in forward+backward of the first dtype, at the
    larger size; --full has it everywhere."""
    first = DTYPES[device][0]
    cases = []
    for size in (QUICK_SIZE,) if quick else SIZES[device]:
        for dtype in (first,) if quick else DTYPES[device]:
            for op, chain in CHAINS.items():
                for layout in LAYOUTS if chain.image else ("",):
                    for pass_name in PASSES:
                        common = pass_name == PASSES[1] and dtype == first
                        rival = full or (common and size == SIZES[device][-1])
                        cases.append(Case(op, size, dtype, layout, pass_name, compiled and rival))
    return [case for case in cases if not ops or case.op in ops]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        option("--device"),
        full=option("--full"),
        quick=option("--quick"),
        compiled=not option("--no-compile"),
        ops=tuple(option("--op")),
    )
    metafunc.parametrize("case", [] if option("--model") else cases, ids=str)


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
    """Those that passed the gate."""
    chain = CHAINS[case.op]
    found: dict[str, Function] = {"fusedtrain": chain.ours, "eager": chain.eager}
    if case.compiled:
        torch.compiler.reset()
        found["compile"] = torch.compile(chain.eager, fullgraph=True, dynamic=False)
    few = max(1, GATE // (tensors[0].numel() // len(tensors[0])))
    batch = len(tensors[0])
    # Not biases, which may be as many as rows; but the one number a sample of stochastic depth.
    split = [t.dim() > 1 or i >= len(tensors) - chain.constants for i, t in enumerate(tensors)]
    part = tuple(
        t[:few] if apart and len(t) == batch else t for t, apart in zip(tensors, split, strict=True)
    )

    def gate(who: str, function: Function) -> None:
        whole = who == "compile"  # which compiles for one size
        check(chain, function, tensors if whole else part, grad if whole else grad[:few])

    return admit(found, gate, str(case))


def _call(function: Function, case: Case, tensors: tuple[Tensor, ...], grad: Tensor) -> Call:
    if case.pass_name == "forward":
        return lambda: function(*tensors)
    trained = len(tensors) - CHAINS[case.op].constants
    leaves = [t.detach().requires_grad_(i < trained) for i, t in enumerate(tensors)]
    return lambda: torch.autograd.grad(function(*leaves), leaves[:trained], grad)


@pytest.mark.benchmark(timer=REPLAY)
def test_chain(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("gated", device)
    tensors, grad = _tensors(case.op, case.size, case.dtype, case.layout, device)
    entrants = _entrants(case, tensors, grad)
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    calls = {who: _call(function, case, tensors, grad) for who, function in entrants.items()}
    x = tensors[0]
    forward, backward = CHAINS[case.op].tensors
    benchmark.group = f"{dtype_name(case.dtype)} {case.size} {case.pass_name}"
    race(
        benchmark,
        REPLAY,
        calls,
        x,
        clock,
        effort,
        op=case.op,
        pass_name=case.pass_name,
        tensors=forward if case.pass_name == "forward" else forward + backward,
        family=FAMILY,
        shape=list(x.shape),
        layout=case.layout,
    )
