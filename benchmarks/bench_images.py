"""Batches of bytes to normalised numbers, between layouts, against eager torch, torchvision and
torch.compile. Rivals take turns within one test."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness.cases import LAYOUTS, Options, dtype_name
from benchmarks.harness.guards import refuse_the_reference
from benchmarks.harness.race import Race
from fusedtrain.advisor.bench import COMPILE, OURS, Contest
from fusedtrain.advisor.bench.clock import Function, compiled
from fusedtrain.advisor.bench.gate import Tolerance, agrees, same_kind

FAMILY = "images"
OP = "normalize_images"
BATCHES = {"cpu": (1, 64), "cuda": (1, 256)}
QUICK_BATCH = 1
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


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


FIRST = [Case(256, torch.bfloat16, "contiguous", "channels_last", False)]


def select(options: Options) -> list[Case]:
    """The cases of a run."""
    if not options.wants(OP, "") or options.models:
        return []
    return [
        Case(batch, dtype, read, written, options.compiled)
        for batch in ((QUICK_BATCH,) if options.quick else BATCHES[options.device])
        for dtype in DTYPES[options.device][: 1 if options.quick else None]
        for read in LAYOUTS
        for written in LAYOUTS
    ]


@lru_cache(maxsize=1)
def _bytes(batch: int, read: str, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, 3, SIDE, SIDE)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)
    return x.contiguous(memory_format=LAYOUTS[read])


def contestants(case: Case, device: str) -> dict[str, Function]:
    """Contestants of the case."""
    dtype, memory_format = case.dtype, LAYOUTS[case.written]
    mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (MEAN, STD))

    def eager(x: Tensor) -> Tensor:
        y = (x.float() / 255 - mean) / std
        return y.to(dtype).contiguous(memory_format=memory_format)

    result: dict[str, Function] = {
        "fusedtrain": lambda x: F.normalize_images(x, MEAN, STD, dtype, memory_format),
        "eager": eager,
    }
    if case.compiled:
        result["compile"] = compiled(eager)
    try:
        from torchvision.transforms.v2 import functional as vision
    except (ImportError, RuntimeError) as error:  # the latter: built for another torch
        warnings.warn(f"no torchvision rival: {error}", stacklevel=1)
    else:

        def torchvision(x: Tensor) -> Tensor:
            y = vision.normalize(vision.to_dtype(x, torch.float32, scale=True), MEAN, STD)
            return y.to(dtype).contiguous(memory_format=memory_format)

        result["torchvision"] = torchvision
    return result


def check(function: Function, x: Tensor, case: Case) -> None:
    """Raise NotTheJob unless numbers, dtype and layout are right."""
    mean, std = (
        torch.tensor(v, dtype=torch.float64, device=x.device).view(-1, 1, 1) for v in (MEAN, STD)
    )
    exact = (x.double() / 255 - mean) / std
    y = function(x)
    same_kind(y, exact.to(case.dtype).contiguous(memory_format=LAYOUTS[case.written]))
    agrees("output", y, exact, Tolerance(atol=ALLOWED[case.dtype]))


def test_images(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference(OP, race.device)
    x = _bytes(case.batch, case.read, race.device)

    def gate(who: str, function: Function) -> None:
        check(function, x if who == COMPILE else x[:1], case)  # which compiles for one size

    functions = contestants(case, race.device)
    source = functions[OURS](x)
    moved = (1 + 1 / case.dtype.itemsize) * source.nbytes  # bytes are read
    race.match(
        Contest(functions, gate, lambda f, _: partial(f, x), lambda _: moved, source),
        "forward",
        str(case),
        family=FAMILY,
        op=OP,
        shape=list(x.shape),
        layout=case.layout,
    )
