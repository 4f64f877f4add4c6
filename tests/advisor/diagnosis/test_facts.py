"""The rules decide by facts alone: those of runs on a GPU, which is not there, and of clocks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fusedtrain.advisor._views import Site
from fusedtrain.advisor.diagnosis import RunFacts, _operators, decide
from fusedtrain.advisor.diagnosis._facts import (
    Copy,
    Depthwise,
    Event,
    Layer,
    Loader,
    Optimizer,
    Timing,
)
from helpers.diagnosis import examined, rules

LINE = Site(__file__, 1, "main")
LOADER = Loader(LINE, 0, False, batches=10, wait=6e-3)
DEPTHWISE = Depthwise("Net", LINE, 3, "block.0 (8x16x28x28)", now=5e-3, converted=2e-3)
ADAM = Optimizer(LINE, "AdamW", True, None, None, 100, 10**8, 5e-3)
MB, GB = 10**6, 10**9


def gpu(**facts: Any) -> RunFacts:
    """A run on an H100-like GPU, 10 ms a step, on which nothing is wrong."""
    base = RunFacts(
        script=__file__, device="cuda", capability=(9, 0), gpus=1, cores=8, threads=8, steps=20,
        timed=17, step=10e-3, busy=9e-3, drain=4e-3, operators=900, operator=2e-6,
        elements=1e5, model_site=LINE, autotuner=True, tf32_matmul=True, autocast={"bfloat16": 9},
        matmuls={"bfloat16": 80.0}, convolutions=50, half_convolutions=50,
    )  # fmt: skip
    return replace(base, **facts)


def cpu(**facts: Any) -> RunFacts:
    return gpu(device="cpu", capability=(0, 0), gpus=0, drain=None, **facts)


# A rule, and facts that have the fault; then the same without it.
CASES: list[tuple[str, RunFacts, RunFacts]] = [
    ("loader-without-workers", gpu(loaders=[LOADER], wait=6e-3),
     gpu(loaders=[LOADER], wait=0.5e-3)),
    ("loader-without-workers", cpu(loaders=[LOADER], wait=6e-3, threads=1),
     # Two cores compute, and the loader computes too: there is nobody to take over.
     cpu(loaders=[replace(LOADER, wait=2.1e-3)], wait=2.1e-3, loading=2.1e-3, cores=1, threads=1)),
    ("loader-too-slow", gpu(loaders=[replace(LOADER, workers=2)], wait=6e-3),
     gpu(loaders=[replace(LOADER, workers=2, wait=1e-3)], wait=1e-3)),
    ("loader-not-pinned", gpu(loaders=[LOADER], copies=[Copy(LINE, 1, 20 * MB, False, False)]),
     gpu(loaders=[replace(LOADER, pinned=True)], copies=[Copy(LINE, 1, 20 * MB, True, True)])),
    ("blocking-copy", gpu(copies=[Copy(LINE, 1, 20 * MB, True, False)]),
     gpu(copies=[Copy(LINE, 1, 20 * MB, True, True), Copy(LINE, 1, 8, True, False)])),
    ("amp-off", gpu(matmuls={"float32": 80.0}, autocast={}), gpu(matmuls={"bfloat16": 80.0})),
    ("amp-off", gpu(matmuls={"float32": 80.0}, autocast={}, capability=(7, 0)),
     gpu(matmuls={"float32": 80.0}, autocast={}, capability=(6, 1))),
    ("slow-16-bit-convolutions", cpu(half_ratio=2.5), cpu(half_ratio=0.6)),
    ("slow-16-bit-convolutions", cpu(half_ratio=2.5), cpu(half_ratio=2.5, half_convolutions=0)),
    ("memory-nearly-full", gpu(peak=70 * GB, memory=80 * GB), gpu(peak=60 * GB, memory=80 * GB)),
    ("memory-nearly-full", cpu(peak=13 * GB, memory=16 * GB), cpu(peak=13 * GB, memory=None)),
    ("slow-depthwise", cpu(depthwise=[DEPTHWISE]), cpu(depthwise=[replace(DEPTHWISE, now=2.4e-3)])),
    ("slow-depthwise", cpu(depthwise=[DEPTHWISE]), cpu(depthwise=[DEPTHWISE], timed=0)),
    ("clip-before-unscale", gpu(clips=[Event(LINE, "clamped", 1, MB)]), gpu()),
    ("step-beside-scaler", gpu(direct_steps=[Event(LINE, "scaler", 0.5)]), gpu()),
    ("tf32-off", gpu(matmuls={"float32": 80.0}, tf32_matmul=False),
     gpu(matmuls={"float32": 80.0}, tf32_matmul=True)),
    ("tf32-off", gpu(matmuls={"float32": 80.0}, tf32_matmul=False, tf32_conv=False,
                     single_convolutions=80),
     # Convolutions alone use TF32 by default.
     gpu(matmuls={"float32": 80.0}, tf32_matmul=False, single_convolutions=80)),
    ("tf32-off", gpu(matmuls={"float32": 80.0}, tf32_matmul=False, capability=(8, 0)),
     gpu(matmuls={"float32": 80.0}, tf32_matmul=False, capability=(7, 5))),
    ("autotuner-off", gpu(autotuner=False), gpu(autotuner=False, shapes_vary=True)),
    ("autotuner-off", gpu(autotuner=False), gpu(autotuner=False, deterministic=True)),
    ("autotuner-off", gpu(autotuner=False),
     gpu(autotuner=False, convolutions=0, half_convolutions=0)),
    ("not-channels-last", gpu(contiguous=50), gpu(contiguous=2)),
    ("not-channels-last", gpu(contiguous=50), gpu(contiguous=50, half_convolutions=0)),
    ("host-waits", gpu(syncs=[Event(LINE, ".item()", 2, seconds=3e-3, device="cuda")]), gpu()),
    ("small-tensors", gpu(drain=0.1e-3), gpu(drain=4e-3)),
    ("small-tensors", cpu(operators=3000, elements=100), cpu(operators=3000, elements=10**6)),
    ("small-tensors", cpu(operators=3000, elements=100), cpu(operators=300, elements=100)),
    ("slow-optimizer", gpu(optimizers=[replace(ADAM, timing=Timing(5e-3, 1e-3, 2e-3))]),
     gpu(optimizers=[replace(ADAM, fused=True)])),
    ("slow-optimizer", gpu(optimizers=[ADAM]), gpu(optimizers=[replace(ADAM, seconds=1e-5)])),
    ("slow-optimizer", gpu(optimizers=[replace(ADAM, timing=Timing(5e-3, None, 2e-3))]),
     gpu(optimizers=[replace(ADAM, timing=Timing(5e-3, 4.8e-3, 4.9e-3))])),
    ("data-parallel", gpu(gpus=4, parallel=[Layer("", "Net", LINE, 100 * MB)]), gpu(gpus=4)),
    ("page-faults", cpu(faults=5000, fault=1e-6, large=50 * MB),
     cpu(faults=100, fault=1e-6, large=50 * MB)),
    ("too-many-threads", cpu(threads=64, threads_site=LINE, oversubscribed=2.0),
     cpu(threads=64, threads_site=LINE, oversubscribed=1.01)),
    ("too-many-threads", cpu(threads=8, ranks=4), cpu(threads=2, ranks=4)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "faulty", "healthy"), CASES)
def test_decision(rule: str, faulty: RunFacts, healthy: RunFacts) -> None:
    assert rules(decide(faulty)) == {rule}
    assert rules(decide(healthy)) == set()


def test_a_host_that_waits_in_the_step_has_nothing_to_wait_for_at_its_end() -> None:
    facts = gpu(drain=0.1e-3, syncs=[Event(LINE, ".item()", 2, device="cuda")])
    assert rules(decide(facts)) == {"host-waits"}


def test_costs_are_measured_bounded_or_said_not_to_be() -> None:
    for rule, faulty, _ in CASES:
        (finding,) = decide(faulty).findings
        assert finding.rule == rule
        if finding.cost.kind != "not measured here":
            ratio = rule in ("too-many-threads", "slow-16-bit-convolutions")
            assert finding.cost.seconds or finding.cost.bytes or ratio
        if finding.cost.seconds is not None:
            assert 0 < finding.cost.seconds <= faulty.step


def test_gain_of_workers_is_bounded_by_the_cores() -> None:
    """A step of 10 ms: 4 ms on 2 of 2 cores, and 6 ms of loading; on one core of the loader at
    best (2 x 4 + 6) / 2 = 7 ms."""
    facts = cpu(loaders=[LOADER], wait=6e-3, loading=6e-3, cores=2, threads=2)
    (finding,) = decide(facts).findings
    assert finding.cost.seconds == pytest.approx(3e-3)
    (finding,) = decide(replace(facts, loading=0.0)).findings  # it waits for a disk
    assert finding.cost.seconds == pytest.approx(6e-3)


def test_optimizer_gain_is_a_share_of_the_measured_step() -> None:
    timing = Timing(now=4e-3, torch_fused=1e-3, fusedtrain=2e-3)
    (finding,) = decide(gpu(optimizers=[replace(ADAM, timing=timing)])).findings
    assert finding.cost.seconds == pytest.approx(4e-3 * 0.75)
    assert dict(finding.changes[0].options) == {"fused": "True"}
    timing = Timing(now=4e-3, fusedtrain=1e-3)
    (finding,) = decide(gpu(optimizers=[replace(ADAM, timing=timing)])).findings
    assert finding.changes[0].names == ("AdamW", "fusedtrain.optim.AdamW")


@pytest.mark.parametrize("timing", [None, Timing(now=4e-3, torch_fused=1e-3)])
def test_an_optimizers_time_says_what_it_leaves_out(timing: Timing | None) -> None:
    """The script may unscale, clip and zero around the step, which fusedtrain's class does too."""
    (finding,) = decide(gpu(optimizers=[replace(ADAM, timing=timing)])).findings
    words = "the step alone: unscaling, clipping and zeroing are not timed"
    assert finding.evidence.endswith(words)


def test_an_assumed_gpu_measures_nothing() -> None:
    facts = gpu(assumed=True, syncs=[Event(LINE, ".item()", 2, seconds=1.0)])
    (finding,) = decide(facts).findings
    assert finding.cost.kind == "not measured here"


def test_facts_survive_json() -> None:
    facts = examined("faults", True).facts
    assert facts.loaders
    assert facts.kept
    assert RunFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    full = gpu(optimizers=[replace(ADAM, timing=Timing(1.0, 2.0, 3.0))], threads_site=LINE)
    assert RunFacts.from_json(json.loads(json.dumps(full.to_json()))) == full


def test_a_number_that_is_printed_after_the_first_step_is_no_wait_of_each_step() -> None:
    """`if i % 100 == 0: print(loss.item())` behind optimizer.step() is seen in the second step."""

    def events(*counts: int) -> list[float]:
        steps = [_operators._StepTrace() for _ in counts]
        for step, count in zip(steps, counts, strict=True):
            if count:
                step.events["sync", LINE, "a number is read", "cuda"] = [count, 0.0, 1e-3]
        return [event.count for event in _operators.Account(steps).events("sync")]

    assert events(1, 0) == events(4, 0) == []
    assert events(0, 1) == [0.5]
    assert events(1, 1) == [1.0]
    assert events(1) == [1.0]
