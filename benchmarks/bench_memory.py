"""Memory in training: what forward keeps, the peak of a step, the largest batch that fits.

`convert(memory="recompute")` ("fusedtrain") against eager torch, torch.compile and
`convert(memory="store")`, by the allocations of torch's profiler (CPU) or of CUDA's caching
allocator. Rivals take turns within one test.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fusedtrain
from benchmarks.harness import networks
from benchmarks.harness.cases import Options
from benchmarks.harness.memory import bytes_of_step, step_of
from benchmarks.harness.networks import NetworkCase, Setup
from benchmarks.harness.race import Race, admit, refuse_the_reference
from fusedtrain.planning import _batches

FAMILY = "memory"
CASES: dict[str, tuple[Setup, ...]] = {
    "cpu": (
        Setup("train", "resnet50", 8, 224, "contiguous"),
        Setup("train", "efficientnet_b0", 8, 224, "contiguous"),
    ),
    "cuda": (
        Setup("train", "resnet50", 64, 224, "channels_last"),
        Setup("train", "efficientnet_b0", 64, 224, "channels_last"),
    ),
}
MOST = 4  # times the batch are tried
CONTESTANTS = ("eager", "compile", "store", "fusedtrain")
OURS = ("store", "fusedtrain")
QUICK = (Setup("train", "resnet18", 4, 64, "contiguous"),)


class Case(NetworkCase):
    """One row."""

    op = "memory"

    def __str__(self) -> str:
        return f"{self.setup.model}-{self.setup.batch}-{self.setup.layout}"


def select(options: Options) -> list[Case]:
    """The cases of a run."""
    return [
        Case(setup, options.compiled and not options.quick)
        for setup in (QUICK if options.quick else CASES[options.device])
        if options.wants("memory", setup.model)
    ]


def contestants(setup: Setup, device: str, compiled: bool) -> dict[str, Any]:
    """Copies of one network. fusedtrain's two differ in nothing but what they keep."""
    stock = networks.stock_of(setup, device)
    models: dict[str, Any] = {"eager": copy.deepcopy(stock)}
    for who, memory in (("store", "store"), ("fusedtrain", "recompute")):
        models[who] = copy.deepcopy(stock)
        fusedtrain.convert(models[who], memory="recompute")
        fusedtrain.convert(models[who], memory=memory)
    if compiled:
        torch.compiler.reset()
        models["compile"] = torch.compile(copy.deepcopy(stock), dynamic=False)
    return models


def bytes_of(model: Any, setup: Setup, device: str, batch: int = 0) -> tuple[int, int]:
    """Peak of forward and backward with gradients, and what forward keeps."""
    return bytes_of_step(model, *networks.batch_of(setup, device, batch))


def largest(model: Any, setup: Setup, device: str, limit: int) -> int:
    """Images of the largest batch whose peak is `limit` at the most."""

    def fits(batch: int) -> bool:
        return bytes_of(model, setup, device, batch)[0] <= limit

    most = MOST * setup.batch
    return _batches.largest(fits, most, _batches.doubling(setup.batch, most))


def test_memory(race: Race, case: Case) -> None:
    """One row of the results."""
    setup, device = case.setup, race.device
    refuse_the_reference("batch_norm_act", device)
    try:
        models = contestants(setup, device, case.compiled)
    except ImportError as error:
        pytest.skip(f"{case}: {error}")
    gate = networks.Gate(networks.stock_of(setup, device), setup, device, whole=case.compiled)
    models = admit(models, gate.check, f"{case} on {device}", ours=OURS)
    if race.is_off:
        return
    peak, kept, fits = {}, {}, {"eager": setup.batch}
    for who, model in models.items():
        bytes_of(model, setup, device, min(2, setup.batch))  # what is made at the first call
        peak[who], kept[who] = bytes_of(model, setup, device)
    batch = networks.batch_of(setup, device)
    for who in OURS:
        fits[who] = largest(models[who], setup, device, peak["eager"])
    race.finish(
        FAMILY,
        race.samples({who: step_of(model, *batch) for who, model in models.items()}),
        model=setup.model,
        batch=setup.batch,
        pixels=setup.pixels,
        layout=setup.layout,
        dtype=setup.dtype,
        kept=kept,
        peak=peak,
        fits=fits,
    )
