"""Batches of bytes to normalised numbers, between layouts, against eager torch, torchvision and
torch.compile. Rivals take turns within one test."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedtrain.functional as F
from benchmarks._guards import NotTheJob, admit, refuse_the_reference
from benchmarks._measure import Call, Clock, Effort, ReplayClock, dtype_name
from benchmarks._race import race

FAMILY = "images"
OP = "normalize_images"
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
BATCHES = {"cpu": (1, 64), "cuda": (1, 256)}
QUICK_BATCH = 1
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
REPLAY = ReplayClock()

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One row."""

    batch: int
    dtype: torch.dtype
    read: str  # the layouts
    written: str
    compiled: bool
    op: str = OP

    @property
    def layout(self) -> str:
        return self.read if self.read == self.written else f"{self.read} to {self.written}"

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}-{self.layout.replace(' ', '-')}-{self.batch}"


def select(device: str = "cpu", *, quick: bool = False, compiled: bool = True) -> list[Case]:
    """The cases of a run."""
    return [
        Case(batch, dtype, read, written, compiled)
        for batch in ((QUICK_BATCH,) if quick else BATCHES[device])
        for dtype in DTYPES[device][: 1 if quick else None]
        for read in LAYOUTS
        for written in LAYOUTS
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        option("--device"), quick=option("--quick"), compiled=not option("--no-compile")
    )  # fmt: skip
    others = option("--model") or (option("--op") and OP not in option("--op"))
    metafunc.parametrize("case", [] if others else cases, ids=str)


@lru_cache(maxsize=1)
def _bytes(batch: int, read: str, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, 3, SIDE, SIDE)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    return x.contiguous(memory_format=LAYOUTS[read])


def contestants(case: Case, device: str) -> dict[str, Function]:
    """Who makes the numbers of the case."""
    dtype, memory_format = case.dtype, LAYOUTS[case.written]
    mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (MEAN, STD))

    def eager(x: Tensor) -> Tensor:
        y = (x.float() / 255 - mean) / std
        return y.to(dtype).contiguous(memory_format=memory_format)

    found: dict[str, Function] = {
        "fusedtrain": lambda x: F.normalize_images(x, MEAN, STD, dtype, memory_format),
        "eager": eager,
    }
    if case.compiled:
        torch.compiler.reset()
        found["compile"] = torch.compile(eager, fullgraph=True, dynamic=False)
    try:
        from torchvision.transforms.v2 import functional as vision
    except (ImportError, RuntimeError) as error:  # the latter: built for another torch
        warnings.warn(f"no torchvision rival: {error}", stacklevel=1)
    else:

        def torchvision(x: Tensor) -> Tensor:
            y = vision.normalize(vision.to_dtype(x, torch.float32, scale=True), MEAN, STD)
            return y.to(dtype).contiguous(memory_format=memory_format)

        found["torchvision"] = torchvision
    return found


def is_right(function: Function, x: Tensor, case: Case) -> bool:
    """Numbers, dtype and layout."""
    y = function(x)
    mean, std = (
        torch.tensor(v, dtype=torch.float64, device=x.device).view(-1, 1, 1) for v in (MEAN, STD)
    )
    want = (x.double() / 255 - mean) / std
    error = (y.double() - want).abs().max().item()
    return (
        y.dtype is case.dtype
        and y.is_contiguous(memory_format=LAYOUTS[case.written])
        and error <= ALLOWED[case.dtype]
    )


@pytest.mark.benchmark(timer=REPLAY)
def test_images(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference(OP, device)
    x = _bytes(case.batch, case.read, device)

    def gate(who: str, function: Function) -> None:
        whole = who == "compile"  # which compiles for one size
        if not is_right(function, x if whole else x[:1], case):
            raise NotTheJob("wrong numbers")

    entrants = admit(contestants(case, device), gate, str(case))
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    calls: dict[str, Call] = {who: partial(function, x) for who, function in entrants.items()}
    benchmark.group = f"{dtype_name(case.dtype)} {case.batch}"
    race(
        benchmark,
        REPLAY,
        calls,
        entrants["fusedtrain"](x),
        clock,
        effort,
        op=OP,
        pass_name="forward",
        tensors=1 + 1 / case.dtype.itemsize,  # bytes are read
        family=FAMILY,
        shape=list(x.shape),
        layout=case.layout,
    )
