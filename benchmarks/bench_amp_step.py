"""The fused AMP step against torch's and timm's optimizers, on the parameters of real networks.

A job (``steps.JOBS``) is what stands between ``backward()`` and the next ``forward()``.
Rivals take turns within one test and work on the same parameters and gradients, each with states
of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import pytest
import torch
from torch import Tensor

from benchmarks.harness.cases import Options
from benchmarks.harness.networks import import_module
from benchmarks.harness.race import Prepare, Race, admit, refuse_the_reference
from benchmarks.harness.rows import medians
from benchmarks.harness.shapes import MODELS, Shape, shapes
from fusedtrain.advisor.bench import amp_step, copies_of, steps
from fusedtrain.advisor.bench.amp_step import copied
from fusedtrain.advisor.bench.clock import Call
from fusedtrain.advisor.bench.steps import (
    CODED,
    DEEPSPEED,
    JOBS,
    KINDS,
    LR,
    RULES,
    TORCHAO,
    Contestant,
    does,
    parameters,
)

FAMILY = "amp_step"
# On the CPU the largest takes 13 to 20 GB and a minute a row: only by --model.
CPU_MODELS = MODELS[:-1]
ALL_JOBS = ("adamw", "sgd")  # the others: "check", unless --full
SMALL_NETS = ("efficientnet_b0", "resnet50")  # for all optimizers but AdamW


@dataclass(frozen=True)
class Case:
    """One row: all its rivals share parameters, gradients and the measurement loop."""

    model: str
    op: str  # the optimizer
    kind: str
    job: str

    def __str__(self) -> str:
        return f"{self.op}-{self.job}-{self.kind}-{self.model}"


FIRST = [
    Case("resnet50", "adamw", kind, "check") for kind in KINDS if kind != "bfloat16"
]  # fmt: skip


def select(options: Options) -> list[Case]:
    """The cases of a run, those of one network and dtype together."""
    if options.quick:
        return [
            Case(model, op, "float32", "zero")
            for op in options.ops or ("adamw",)
            if op in RULES
            for model in options.models or ("efficientnet_b0",)
        ]
    cases = []
    for model in MODELS if options.device == "cuda" or options.models else CPU_MODELS:
        for kind in KINDS:
            for op in RULES:
                whole = op == "adamw" and (kind == "float32" or model in ("resnet50", MODELS[-1]))
                small = kind == "float32" and model in SMALL_NETS
                whole |= op == "adamw" and kind == "bfloat16+q8" and model in SMALL_NETS
                for job in JOBS:
                    common = job == "check" or op in ALL_JOBS
                    wanted = options.full or whole or (small and common)
                    if wanted and options.wants(op, model):
                        cases.append(Case(model, op, kind, job))
    return cases


@cache
def _entrants(op: str, kind: str, job: str, device: str) -> list[str]:
    """Contestants to be timed: they passed the gate, and ours must."""

    def gate(who: str, name: str) -> None:
        amp_step.check(who, op, job, KINDS[kind], device)

    import_module(RULES[op].theirs.rpartition(".")[0])
    names = ["fusedtrain", *steps.rivals(op, KINDS[kind], device)]
    # A peer that is installed and does not build is no reason to lose the row.
    where, peers = f"{op} {job} {kind} on {device}", (DEEPSPEED, *CODED)
    return list(admit({who: who for who in names}, gate, where, may_break=peers))


@lru_cache(maxsize=1)
def _tensors(model: str, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    return _random(shapes(model), dtype, device)


def _random(
    of: Iterable[Shape], dtype: torch.dtype, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    values = [0.05 * torch.randn(shape, dtype=dtype, device=device) for shape in of]
    return values, [1e-2 * torch.randn_like(value) for value in values]


def _contestant(who: str, case: Case, tensors: tuple[list[Tensor], list[Tensor]]) -> Contestant:
    kind = KINDS[case.kind]
    values, grads = tensors
    if kind.master:  # its owner follows what others write to its parameters
        values = [value.clone() for value in values]
    params = parameters(values, grads)
    return steps.contestant(who, case.op, case.job, kind, params, lr=LR)


def _prepare(case: Case, grads: list[Tensor]) -> Prepare | None:
    """Gradients for the next sample, where the job zeroes them.

    Updates of zero gradients would also let moments decay to denormal numbers, which are slow.
    """
    if not does(case.job, "zero"):
        return None
    kept = [grad.clone() for grad in grads]
    return lambda who: torch._foreach_copy_(grads, kept)


def _host_samples(race: Race, case: Case, entrants: list[str]) -> dict[str, list[float]]:
    """The same calls on one element a tensor: everything that is not memory."""
    tensors = _random([(1,)] * len(shapes(case.model)), KINDS[case.kind].dtype, race.device)
    calls: dict[str, Call] = {who: _contestant(who, case, tensors).call for who in entrants}
    return race.host().samples(calls, _prepare(case, tensors[1]))


def _counts(race: Race, calls: Mapping[str, Call]) -> dict[str, int]:
    """Launches or operators of each call.

    On the CPU a dispatch mode counts operators, and what torchao compiles refuses to run below one,
    then and ever after in this process.
    """
    compiled = (TORCHAO,) if race.device == "cpu" else ()
    return {who: race.count(call) for who, call in calls.items() if who not in compiled}


def test_amp_step(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("optimizer_step", race.device)
    kind = KINDS[case.kind]
    try:
        entrants = _entrants(case.op, case.kind, case.job, race.device)
    except ImportError as error:
        pytest.skip(f"{case.op}: no rival, {error}")
    if race.is_off:
        return
    tensors = _tensors(case.model, kind.dtype, race.device)
    contestants = {who: _contestant(who, case, tensors) for who in entrants}
    calls: dict[str, Call] = {who: c.call for who, c in contestants.items()}
    numel = sum(p.numel() for p in tensors[0])
    moved = numel * steps.bytes_per_parameter(case.op, case.job, kind)
    source = copied(moved, race.device)
    samples = race.samples(
        {**calls, **copies_of(source, in_place=True)}, _prepare(case, tensors[1])
    )
    counts = _counts(race, {who: calls[who] for who in entrants})
    del contestants, calls
    race.finish(
        FAMILY,
        samples,
        moved=moved,
        copied=2 * source.nbytes,
        model=case.model,
        op=case.op,
        job=case.job,
        dtype=case.kind,
        numel=numel,
        tensors=len(tensors[0]),
        host_ns=medians(_host_samples(race, case, entrants)),
        counts=counts,
    )
