"""The step of a script with Apex's calls against fusedtrain's own step and torch's.

Contestants (``_apex_contestants``) take turns within one test, each with weights and states of its
own, on gradients that are restored before every call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import pytest
import torch

from benchmarks import _apex_gate
from benchmarks._apex_contestants import (
    JOBS,
    OWN,
    RULES,
    SCALE,
    Contestant,
    Data,
    bytes_moved,
    contestant,
    contestants,
    norm_places,
)
from benchmarks._apex_rows import FAMILY
from benchmarks._guards import admit, refuse_the_reference
from benchmarks._measure import (
    Call,
    Clock,
    Effort,
    FlushingCudaClock,
    ReplayClock,
    cpu_clock,
    cuda_clock,
    interleave,
)
from benchmarks._parameter_lists import count, shapes
from benchmarks._step_rows import step_row
from benchmarks.bench_amp_step import COPY_BYTES, copy_buffers, count_launches, count_ops
from fusedtrain.amp._functions import switch_autocast

NETWORKS = ("resnet50", "efficientnet_b0")
SCRIPTS = (("O2", "FusedSGD"), ("O1", "FusedAdam"))
MORE = (("O1", "FusedSGD"), ("O2", "FusedAdam"))  # with --full
KINDS = {"O1": "float32", "O2": "float16+float32"}  # of the model
LR = 1e-6  # what is timed does not depend on it, and thousands of steps leave the weights sane
REPLAY = ReplayClock()


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


def select(
    *,
    full: bool = False,
    quick: bool = False,
    ops: tuple[str, ...] = (),
    models: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a run, those of one network together."""
    scripts = (*SCRIPTS, *MORE) if full or ops else SCRIPTS
    cases = [
        Case(model, level, rule, job)
        for model in (NETWORKS[-1:] if quick and not models else NETWORKS)
        for level, rule in scripts
        for job in JOBS
    ]
    return [
        case
        for case in cases
        if (not ops or case.op in ops) and (not models or case.model in models)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    cases = select(
        full=option("--full"),
        quick=option("--quick"),
        ops=tuple(option("--op")),
        models=tuple(option("--model")),
    )
    metafunc.parametrize("case", cases, ids=str)


@cache
def _entrants(level: str, rule: str, job: str, device: str) -> list[str]:
    """Those that are to be timed: they passed the gate, and both of ours must."""
    where = f"{level}+{rule} {job} on {device}"

    def gate(who: str, name: str) -> None:
        data, rules = _apex_gate.tensors(device), RULES[rule]
        options = {"lr": rules.gate_lr, "weight_decay": _apex_gate.DECAY}
        entrant = contestant(name, level, rules, job, data, **options)
        _apex_gate.check(entrant, rules, job, data)

    found = list(admit({who: who for who in contestants(level, job)}, gate, where))
    if OWN not in found:
        pytest.fail(f"{where}: there is nothing to keep the promise against", pytrace=False)
    return found


@lru_cache(maxsize=1)
def _tensors(model: str, device: str, *, tiny: bool = False) -> Data:
    """As in the network; ``tiny``: as many of one element."""
    of = shapes(model)
    torch.manual_seed(0)
    values = [0.05 * torch.randn((1,) if tiny else shape, device=device) for shape in of]
    # None is near 0: clipped to a norm of 1, they are still no denormal numbers in float16.
    grads = [0.01 * (0.5 + torch.rand_like(v)) * torch.randn_like(v).sign() for v in values]
    return Data(values, grads, norm_places(of), SCALE)


def _race(
    case: Case,
    entrants: list[str],
    data: Data,
    clock: Clock,
    effort: Effort,
    others: dict[str, Call],
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Samples, of one call each, and how much a call launches or dispatches."""
    by_name = {
        who: contestant(who, case.level, RULES[case.rule], case.job, data, lr=LR)
        for who in entrants
    }
    calls = {**{who: c.call for who, c in by_name.items()}, **others}

    def prepare(who: str) -> None:
        if who in by_name:
            by_name[who].ready()

    counter = count_ops if data.device.type == "cpu" else count_launches
    try:
        # Between two calls gradients have to be restored.
        samples = interleave(calls, clock, replace(effort, sample_ns=1.0), prepare)
        counts = {who: _counted(counter, c) for who, c in by_name.items()}
    finally:
        switch_autocast(frozenset())
    return samples, counts


def _counted(counter: Any, one: Contestant) -> int:
    one.ready()
    found: int = counter(one.call)
    return found


@pytest.mark.benchmark(timer=REPLAY)
def test_apex(benchmark: Any, clock: Clock, effort: Effort, device: str, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("optimizer_step", device)
    entrants = _entrants(case.level, case.rule, case.job, device)
    if benchmark.disabled:
        benchmark.pedantic(lambda: None)
        return
    of = shapes(case.model)
    moved = bytes_moved(case.level, RULES[case.rule], of)
    source, target = copy_buffers(min(moved // 2, COPY_BYTES), device)
    race = partial(_race, case, entrants)
    copy: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    samples, counts = race(_tensors(case.model, device), clock, effort, copy)
    tiny = _tensors(case.model, device, tiny=True)
    host_clock = cpu_clock if device == "cpu" else cuda_clock
    brief = replace(effort, seconds=min(effort.seconds, 0.1))
    host, _ = race(tiny, host_clock, brief, {})
    benchmark.group = f"{case.model} {case.job}"
    benchmark.extra_info["l2_flushed"] = isinstance(clock, FlushingCudaClock)
    benchmark.extra_info.update(
        step_row(
            family=FAMILY,
            model=case.model,
            op=case.op,
            job=case.job,
            kind=KINDS[case.level],
            numel=count(of),
            tensors=len(of),
            device=device,
            moved=moved,
            copied=2 * source.nbytes,
            samples=samples,
            host=host,
            counts=counts,
        )
    )
    REPLAY.replay(benchmark, samples["fusedtrain"])
