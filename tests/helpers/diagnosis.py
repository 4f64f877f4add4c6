"""Runs of the scripts of tests/advisor/diagnosis/scripts, in this process and once each."""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fusedtrain.advisor.diagnosis import Diagnosis, doctor
from helpers import ROOT

SCRIPTS = ROOT / "tests" / "advisor" / "diagnosis" / "scripts"
# In a process of their own: in a process of many tests the heap has room for their large buffers,
# which then are no fresh memory.
FRESH = ("large",)


@functools.cache
def examined(name: str, assume_gpu: bool = False) -> Diagnosis:
    """A script of the folder, eight steps."""
    if name in FRESH:
        return doctor(SCRIPTS / f"{name}.py", steps=8, assume_gpu=assume_gpu)
    return examine(SCRIPTS / f"{name}.py", assume_gpu=assume_gpu)


def examine(script: Path, **options: Any) -> Diagnosis:
    with as_before(), importing_from(script.parent), contextlib.redirect_stdout(io.StringIO()):
        return doctor(lambda: run(script), steps=options.pop("steps", 8), **options)


def run(script: Path) -> None:
    runpy.run_path(str(script), run_name="__main__")


@contextmanager
def as_before() -> Iterator[None]:
    """Settings that scripts change."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    benchmark = torch.backends.cudnn.benchmark
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def lines(diagnosis: Diagnosis, rule: str) -> list[str]:
    """The lines of the source that a rule names."""
    return [f.site.code if f.site else "" for f in diagnosis.findings if f.rule == rule]


def rules(diagnosis: Diagnosis) -> set[str]:
    return {finding.rule for finding in diagnosis.findings}


def training(model: torch.nn.Module, example: torch.Tensor) -> Callable[[], None]:
    """A step with an optimizer that is fused already."""
    return stepping(model, lambda: model(example).square().mean())


def stepping(
    model: torch.nn.Module,
    loss: Callable[[], torch.Tensor],
    after: Callable[[torch.Tensor], object] = lambda loss: None,
) -> Callable[[], None]:
    """A step that minimises a loss; `after` gets the loss at the step's end."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        after(value)

    return step


class Network(torch.nn.Sequential):
    """A bias before a norm, an activation in place."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.SiLU(inplace=True),
            torch.nn.Flatten(), torch.nn.Linear(64, 2),
        )  # fmt: skip


def images() -> torch.Tensor:
    """Inputs of a `Network`."""
    return torch.randn(2, 3, 6, 6)
