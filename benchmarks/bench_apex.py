"""The step of a script with Apex's calls against fusedtrain's own step and torch's.

Contestants (``harness/apex.py``) take turns within one test, each with weights and states of its
own, on gradients that are restored before every call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from benchmarks.harness import apex
from benchmarks.harness.apex import JOBS, Data
from benchmarks.harness.cases import Options
from benchmarks.harness.race import Race, admit, refuse_the_reference
from benchmarks.harness.rows import medians
from benchmarks.harness.shapes import count, shapes
from fusedtrain.advisor.bench import copies_of
from fusedtrain.advisor.bench.amp_step import copied
from fusedtrain.advisor.bench.clock import Call
from fusedtrain.advisor.bench.steps import LR, OWN
from fusedtrain.apex.amp._functions import switch_autocast

FAMILY = "apex"
NETWORKS = ("resnet50", "efficientnet_b0")
SCRIPTS = (("O2", "FusedSGD"), ("O1", "FusedAdam"))
MORE = (("O1", "FusedSGD"), ("O2", "FusedAdam"))  # with --full
KINDS = {"O1": "float32", "O2": "float16+float32"}  # of the model


@dataclass(frozen=True)
class Case:
    """One row."""

    model: str
    level: str
    rule: str
    job: str

    @property
    def op(self) -> str:
        return f"{self.level}+{self.rule}"

    def __str__(self) -> str:
        return f"{self.op}-{self.job}-{self.model}"


def select(options: Options) -> list[Case]:
    """The cases of a run, those of one network together."""
    scripts = (*SCRIPTS, *MORE) if options.full or options.ops else SCRIPTS
    cases = [
        Case(model, level, rule, job)
        for model in (NETWORKS[-1:] if options.quick and not options.models else NETWORKS)
        for level, rule in scripts
        for job in JOBS
    ]
    return [case for case in cases if options.wants(case.op, case.model)]


@cache
def _entrants(level: str, rule: str, job: str, device: str) -> list[str]:
    """Contestants to be timed: they passed the gate, and both of ours must."""

    def gate(who: str, name: str) -> None:
        data, lr = apex.gate_data(device), apex.rule_of(rule).gate_lr
        entrant = apex.contestant(name, level, rule, job, data, lr=lr, weight_decay=apex.DECAY)
        apex.check(entrant, rule, job, data)

    names = {who: who for who in apex.contestants(level, job)}
    where = f"{level}+{rule} {job} on {device}"
    return list(admit(names, gate, where, ours=("fusedtrain", OWN)))


@lru_cache(maxsize=1)
def _tensors(model: str, device: str, *, tiny: bool = False) -> Data:
    """As in the network; ``tiny``: as many of one element."""
    of = shapes(model)
    torch.manual_seed(0)
    values = [0.05 * torch.randn((1,) if tiny else shape, device=device) for shape in of]
    # None is near 0: clipped to a norm of 1, they are still no denormal numbers in float16.
    grads = [0.01 * (0.5 + torch.rand_like(v)) * torch.randn_like(v).sign() for v in values]
    return Data(values, grads, apex.norm_places(of), apex.SCALE)


def _race(
    race: Race, case: Case, entrants: list[str], data: Data, others: dict[str, Call]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Samples, of one call each, and how much a call launches or dispatches."""
    by_name = {
        who: apex.contestant(who, case.level, case.rule, case.job, data, lr=LR) for who in entrants
    }
    calls = {**{who: c.call for who, c in by_name.items()}, **others}

    def prepare(who: str) -> None:
        if who in by_name:
            by_name[who].ready()

    counts = {}
    try:
        # Between two calls gradients have to be restored.
        single = replace(race, effort=replace(race.effort, sample_ns=1.0))
        samples = single.samples(calls, prepare)
        for who, one in by_name.items():
            one.ready()
            counts[who] = race.count(one.call)
    finally:
        switch_autocast(frozenset())
    return samples, counts


def test_apex(race: Race, case: Case) -> None:
    """One row of the results."""
    device = race.device
    refuse_the_reference("optimizer_step", device)
    entrants = _entrants(case.level, case.rule, case.job, device)
    if race.is_off:
        return
    of = shapes(case.model)
    moved = apex.bytes_moved(case.level, case.rule, of)
    source = copied(moved, device)
    copy = copies_of(source, in_place=True)
    samples, counts = _race(race, case, entrants, _tensors(case.model, device), copy)
    host, _ = _race(race.host(), case, entrants, _tensors(case.model, device, tiny=True), {})
    race.finish(
        FAMILY,
        samples,
        moved=moved,
        copied=2 * source.nbytes,
        model=case.model,
        op=case.op,
        job=case.job,
        dtype=KINDS[case.level],
        numel=count(of),
        tensors=len(of),
        host_ns=medians(host),
        counts=counts,
    )
