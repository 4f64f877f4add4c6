"""Batches of bytes to normalised numbers, between layouts, against eager torch, torchvision and
torch.compile. Rivals take turns within one test."""

from __future__ import annotations

import importlib
import warnings
from functools import partial

import torch
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness.cases import LAYOUTS, Case, Options, Work, dtype_name, joined
from benchmarks.harness.race import Race
from fusedtrain.advisor.bench import COMPILE, Contest, duel
from fusedtrain.advisor.bench.clock import Function
from fusedtrain.advisor.bench.gate import Tolerance, agrees, same_kind

FAMILY = "images"
OP = "normalize_images"
BATCHES = {"cpu": (1, 64), "cuda": (1, 256)}
QUICK_BATCH = 1
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
SIDE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _row(batch: int, dtype: torch.dtype, read: str, written: str, compiled: bool = False) -> Case:
    """A row; the images are read and written in these layouts."""
    layout = read if read == written else f"{read} to {written}"
    name = joined(dtype_name(dtype), layout.replace(" ", "-"), batch)
    shape, arguments = (batch, 3, SIDE, SIDE), (batch, read, written)
    return Case(
        name, OP, "forward", dtype, shape, contest, arguments, layout=layout, compiled=compiled
    )  # fmt: skip


def select(options: Options) -> list[Case]:
    """The cases of a run."""
    if not options.wants(OP, "") or options.models:
        return []
    return [
        _row(batch, dtype, read, written, options.compiled)
        for batch in ((QUICK_BATCH,) if options.quick else BATCHES[options.device])
        for dtype in DTYPES[options.device][: 1 if options.quick else None]
        for read in LAYOUTS
        for written in LAYOUTS
    ]


def _eager(x: Tensor) -> Tensor:
    mean, std = (torch.tensor(v, device=x.device).view(-1, 1, 1) for v in (MEAN, STD))
    return (x.float() / 255 - mean) / std


def _torchvision() -> Function | None:
    """torchvision's two calls; None, with a warning, where it is missing."""
    try:
        vision = importlib.import_module("torchvision.transforms.v2.functional")
    except (ImportError, RuntimeError) as error:  # the latter: built for another torch
        warnings.warn(f"no torchvision rival: {error}", stacklevel=1)
        return None
    return lambda x: vision.normalize(vision.to_dtype(x, torch.float32, scale=True), MEAN, STD)


def check(function: Function, x: Tensor, dtype: torch.dtype, written: str) -> None:
    """Raise NotTheJob unless numbers, dtype and layout are right."""
    mean, std = (
        torch.tensor(v, dtype=torch.float64, device=x.device).view(-1, 1, 1) for v in (MEAN, STD)
    )
    exact = (x.double() / 255 - mean) / std
    y = function(x)
    same_kind(y, exact.to(dtype).contiguous(memory_format=LAYOUTS[written]))
    agrees("output", y, exact, Tolerance(atol=ALLOWED[dtype]))


def contest(work: Work, batch: int, read: str, written: str) -> Contest:
    """Images of so many bytes, between these layouts."""
    dtype, memory_format = work.dtype, LAYOUTS[written]
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (batch, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    x = x.to(work.device).contiguous(memory_format=LAYOUTS[read])

    def converted(function: Function) -> Function:
        return lambda x: function(x).to(dtype).contiguous(memory_format=memory_format)

    def ours(x: Tensor) -> Tensor:
        return F.normalize_images(x, MEAN, STD, dtype, memory_format)

    functions = duel(work, ours, converted(_eager))
    if torchvision := _torchvision():
        functions["torchvision"] = converted(torchvision)

    def gate(who: str, function: Function) -> None:
        few = x if who == COMPILE else x[:1]  # torch.compile compiles for one size
        check(function, few, dtype, written)

    source = ours(x)
    moved = (1 + 1 / dtype.itemsize) * source.nbytes  # bytes are read
    return Contest(functions, gate, lambda f, _: partial(f, x), lambda _: moved, source)


FIRST = [_row(256, torch.bfloat16, "contiguous", "channels_last")]


def test_images(race: Race, case: Case) -> None:
    """One row of the results."""
    race.op(FAMILY, case, kernel=OP)
