"""Whole networks: a training step with convert, folded inference, a step with frozen batch norms.

Against eager torch, and in inference against torch.compile with freezing. Rivals take turns within
one test, each with a copy of the same network.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import _networks
from benchmarks._guards import refuse_the_reference
from benchmarks._measure import Clock, Effort, FlushingCudaClock, ReplayClock, interleave
from benchmarks._net_rows import net_row
from benchmarks._networks import Contestant, Setup

REPLAY = ReplayClock()
CPU: tuple[Setup, ...] = (
    Setup("train", "efficientnet_b0", 32, 96, "channels_last", optimizer="AdamW"),
    Setup("train", "resnet18", 32, 96, "contiguous"),
    Setup("tune", "efficientnet_b0", 32, 96, "channels_last", optimizer="AdamW"),
    Setup("tune", "resnet50", 8, 224, "channels_last"),
    Setup("inference", "resnet50", 1, 224, "channels_last"),
    Setup("inference", "resnet50", 8, 224, "channels_last"),
)
CUDA: tuple[Setup, ...] = (
    Setup("train", "efficientnet_b0", 128, 224, "channels_last", "float16 AMP", "AdamW"),
    Setup("train", "resnet50", 128, 224, "channels_last", "float16 AMP"),
    Setup("tune", "resnet50", 64, 224, "channels_last", "float16 AMP"),
    Setup("inference", "resnet50", 1, 224, "channels_last", "float16"),
    Setup("inference", "resnet50", 64, 224, "channels_last", "float16"),
)
QUICK: tuple[Setup, ...] = (
    Setup("train", "resnet18", 4, 64),
    Setup("tune", "resnet18", 4, 64),
    Setup("inference", "resnet18", 1, 64),
)


@dataclass(frozen=True)
class Case:
    """One row: its rivals share the network, its input and the measurement loop."""

    setup: Setup
    compiled: bool = False

    @property
    def op(self) -> str:
        """What --op selects."""
        return self.setup.job

    @property
    def model(self) -> str:
        """What --model selects."""
        return self.setup.model

    def __str__(self) -> str:
        parts = map(str, vars(self.setup).values())
        return "-".join(part.replace(" ", "_") for part in parts)


def select(
    device: str = "cpu",
    *,
    full: bool = False,
    quick: bool = False,
    compiled: bool = True,
    ops: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a run."""
    setups = {"cpu": CPU, "cuda": CUDA}[device]
    if full:
        other = {"contiguous": "channels_last", "channels_last": "contiguous"}
        setups += tuple(replace(setup, layout=other[setup.layout]) for setup in setups)
    if quick:
        setups = QUICK
    return [
        Case(setup, compiled and not quick and (full or setup.job == "inference"))
        for setup in setups
        if (not ops or setup.job in ops) and (not models or setup.model in models)
    ]


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
def _stock(setup: Setup, device: str) -> nn.Module:
    return _networks.build(setup, device)


def _entrants(case: Case, device: str) -> tuple[dict[str, Contestant], dict[str, float]]:
    """Those that are to be timed, and the errors of ours: it must pass the gate."""
    setup, stock = case.setup, _stock(case.setup, device)
    # torch.compile compiles for one size.
    size = setup.batch if case.compiled else min(setup.batch, _networks.GATE_BATCH)
    batches = [_networks.batch_of(setup, device, size, seed) for seed in _networks.GATE_SEEDS]
    found: dict[str, Contestant] = {}
    errors: dict[str, dict[str, float]] = {}
    for who in ("eager", "fusedtrain", *(["compile"] if case.compiled else [])):
        try:
            contestant = _networks.contestant(who, setup, stock)
            errors[who] = _networks.pass_gate(contestant.model, stock, setup, batches)
        except _networks.NotTheJob as error:
            if who == "fusedtrain":
                pytest.fail(f"{case} on {device}: {error}. Not timed", pytrace=False)
            warnings.warn(f"{case} on {device}: {who} left out: {error}", stacklevel=1)
        except Exception as error:
            if who != "compile":
                raise
            warnings.warn(f"{case}: no torch.compile rival: {error}", stacklevel=1)
        else:
            found[who] = contestant
    return found, errors["fusedtrain"]


def _saved(contestant: Contestant, setup: Setup, batch: tuple[Tensor, Tensor]) -> int:
    return 0 if setup.job == "inference" else _networks.saved_bytes(contestant.model, setup, *batch)


@pytest.mark.benchmark(timer=REPLAY)
def test_conv_bn(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    setup = case.setup
    if setup.job == "train":
        refuse_the_reference("batch_norm_act", device)
    # Read by torch.compile while it compiles, which is at the first call.
    with torch._inductor.config.patch(freezing=setup.job == "inference"):
        try:
            entrants, errors = _entrants(case, device)
        except (ImportError, _networks.Missing) as error:
            pytest.skip(f"{case}: {error}")
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    batch = _networks.batch_of(setup, device)
    saved = {who: _saved(c, setup, batch) for who, c in entrants.items() if who != "compile"}
    calls = {who: _networks.call(c.model, setup, *batch) for who, c in entrants.items()}
    samples = interleave(calls, clock, effort)
    benchmark.group = f"{setup.job} {setup.model}"
    benchmark.extra_info["l2_flushed"] = isinstance(clock, FlushingCudaClock)
    benchmark.extra_info.update(
        net_row(
            setup,
            device=device,
            samples=samples,
            saved=saved,
            note=entrants["fusedtrain"].note,
            errors=errors,
        )
    )
    REPLAY.replay(benchmark, samples["fusedtrain"])
