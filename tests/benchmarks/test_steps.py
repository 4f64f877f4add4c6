"""Benchmarks of the AMP step and of Apex's calls: bytes, gates, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import bench_amp_step, bench_apex
from benchmarks.harness import apex
from benchmarks.harness.cases import Work
from benchmarks.harness.rows import Row
from fusedtrain.advisor.bench import amp_step, steps
from fusedtrain.advisor.bench.gate import NotTheJob
from fusedtrain.advisor.bench.steps import JOBS, KINDS, RULES, bytes_per_parameter, rivals
from fusedtrain.apex.amp._functions import switch_autocast
from helpers.benchmarks import forget, measured
from helpers.models import timm

SCRIPTS = (*bench_apex.SCRIPTS, *bench_apex.MORE)


@pytest.fixture(scope="module", autouse=True)
def _timm_optimizers() -> None:
    """Operator names can be declared once per process: let the tests' own helper do it."""
    timm()


@pytest.fixture(autouse=True)
def _no_casts() -> Iterator[None]:
    yield
    switch_autocast(frozenset())


# --- bytes ---


@pytest.mark.parametrize(
    ("op", "kind", "expected"),
    [
        # step, check, clip, ema, zero
        ("adamw", "float32", [28, 32, 32, 40, 44]),
        ("sgd", "float32", [20, 24, 24, 32, 36]),
        ("lars", "float32", [28, 28, 28, 36, 40]),  # its norms find infs, too
        ("lamb", "float32", [40, 44, 44, 52, 56]),
        ("novograd", "float32", [24, 24, 24, 32, 36]),
        ("adamw", "bfloat16", [14, 16, 16, 24, 26]),
        ("adamw", "bfloat16+master", [28, 30, 30, 38, 40]),
        ("adamw", "bfloat16+q8", [12, 14, 14, 22, 24]),
    ],
)
def test_least_bytes(op: str, kind: str, expected: list[int]) -> None:
    assert [bytes_per_parameter(op, job, KINDS[kind]) for job in JOBS] == expected


def test_least_bytes_of_apex() -> None:
    """Gradients twice, weights and states once each way, float16 weights besides."""
    sgd = "FusedSGD"
    assert apex.bytes_moved("O1", "FusedAdam", [(5, 2)]) == 10 * (8 + 8 + 16)
    assert apex.bytes_moved("O2", sgd, [(5, 2)]) == 10 * (4 + 8 + 8 + 2)
    norm = 2 * 5 * (8 + 8 + 8)
    assert apex.bytes_moved("O2", sgd, [(5, 2), (5,), (5,)]) == 10 * 22 + norm


# --- the gate of the AMP step ---


@pytest.mark.parametrize(
    ("op", "kind"),
    [*((op, "float32") for op in RULES), *(("adamw", kind) for kind in KINDS if kind != "float32")],
)
def test_right_steps_pass(op: str, kind: str) -> None:
    names = RULES[op].variants if kind == "float32" else rivals(op, KINDS[kind], "cpu")
    for job in JOBS:
        for who in ("fusedtrain", *names):
            amp_step.check(who, op, job, KINDS[kind], "cpu")


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_right_steps_of_the_command_pass(kind: str) -> None:
    for op in ("adamw", "sgd"):
        for who in ("fusedtrain", "eager", steps.FUSED):
            # In torch 2.13 the fused SGD is wrong in bfloat16 on the CPU.
            if (op, who, kind) != ("sgd", steps.FUSED, "bfloat16"):
                amp_step.check(who, op, "check", KINDS[kind], "cpu")


Spoil = Callable[[Any], None]


def _wrapped(wrap: Callable[[Any, Callable[[], object]], object]) -> Spoil:
    """Spoils an entrant: ``wrap(entrant, right)`` takes the place of its right call."""

    def spoil(entrant: Any) -> None:
        entrant.call = partial(wrap, entrant, entrant.call)

    return spoil


def _keen(entrant: Any) -> None:
    """The third call, whose gradient has an inf, changes a parameter."""
    calls = iter(range(3))

    def wrap(entrant: Any, right: Callable[[], object]) -> None:
        right()
        if next(calls) == 2:
            entrant.params[0].data.mul_(1.001)

    _wrapped(wrap)(entrant)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("job", "done", "factor", "message"),
    [
        pytest.param("step", "step", 0.0, "wrong", id="no-op"),
        pytest.param("step", "step", -1.0, "wrong", id="sign"),
        pytest.param("check", "step", 1.0, "wrong", id="not unscaled"),
        pytest.param("clip", "check", 1.0, "wrong", id="not clipped"),
        pytest.param("ema", "clip", 1.0, "wrong average", id="no average"),
        pytest.param("zero", "ema", 1.0, "not zeroed", id="not zeroed"),
    ],
)
def test_a_step_that_does_less(
    monkeypatch: pytest.MonkeyPatch, job: str, done: str, factor: float, message: str, kind: str
) -> None:
    right = steps.ours

    def less(op: str, _: str, kind: Any, params: list[Any], *, lr: float, scale: float) -> Any:
        contestant = right(op, done, kind, params, lr=abs(factor) * lr, scale=scale)
        for group in contestant.optimizer.param_groups:
            group["maximize"] = factor < 0
        return contestant

    monkeypatch.setattr(steps, "ours", less)
    with pytest.raises(NotTheJob, match=message):
        amp_step.check("fusedtrain", "adamw", job, KINDS[kind], "cpu")


@pytest.mark.parametrize("who", ["fusedtrain", "eager"])
@pytest.mark.parametrize("job", ["check", "step"], ids=["changed by an inf", "without a scaler"])
def test_a_step_that_does_not_skip(monkeypatch: pytest.MonkeyPatch, who: str, job: str) -> None:
    right = steps.contestant

    def wrong(who: str, op: str, _: str, *arguments: Any, **options: Any) -> Any:
        contestant = right(who, op, job, *arguments, **options)
        if job == "check":
            _keen(contestant)
        return contestant

    monkeypatch.setattr(amp_step, "GATE_SCALE", 1.0)
    monkeypatch.setattr(steps, "contestant", wrong)
    with pytest.raises(NotTheJob, match="infinite gradient was not skipped"):
        amp_step.check(who, "sgd", "check", KINDS["float32"], "cpu")


def test_the_command_steps_float32_parameters_under_float16() -> None:
    (entry,) = amp_step.entries(Work(dtype=torch.float16, quick=True))
    assert entry.op == "adamw float32"
    match = entry.make()
    assert match.bytes == 32 * 2**16
    for who in match.calls:
        match.gate(who)


# --- the gate of Apex's calls ---


def small(who: str, level: str, rule: str, job: str, **options: Any) -> tuple[Any, Any]:
    data = apex.gate_data("cpu")
    options = {"lr": apex.rule_of(rule).gate_lr, "weight_decay": apex.DECAY, **options}
    return apex.contestant(who, level, rule, job, data, **options), data


@pytest.mark.parametrize("job", apex.JOBS)
@pytest.mark.parametrize(("level", "rule"), SCRIPTS, ids="-".join)
def test_right_scripts_pass(level: str, rule: str, job: str) -> None:
    for who in apex.contestants(level, job):
        entrant, data = small(who, level, rule, job)
        apex.check(entrant, rule, job, data)


# --- rows ---


def row(bench: Any, monkeypatch: pytest.MonkeyPatch, *case: str) -> Row:
    """The row of a small network, as a file of results has it."""
    monkeypatch.setattr(bench, "shapes", lambda model: [(16, 8), (16,), (16,)] * 20)
    made = measured(bench, bench.Case("small", *case))
    assert (made.model, made.numel, made["tensors"]) == ("small", 20 * 160, 60)
    assert made["host_ns"].keys() == made.ns.keys() - {"copy"}
    assert all(value > 0 for name in ("host_ns", "counts") for value in made[name].values())
    return made


def test_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made = row(bench_amp_step, monkeypatch, "sgd", "float32", "zero")
    assert (made.op, made["job"], made["bytes"]) == ("sgd", "zero", 36 * 3200)
    assert made.ns.keys() == {"fusedtrain", "single", "foreach", "fused", "copy"}
    assert made["counts"].keys() == made["host_ns"].keys()
    assert made["gb_per_s"]["fused"] == pytest.approx(made["bytes"] / made.ns["fused"])
    assert made["counts"]["single"] > 60 > made["counts"]["fusedtrain"]


@pytest.mark.parametrize(
    "ours", [("amp_step", "fusedtrain"), ("apex", "fusedtrain"), ("apex", "own")]
)
def test_who_is_wrong_is_not_timed(ours: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rivals are left out, ours fails the row."""
    family, wrong = ours
    bench, of, options = {
        "amp_step": (bench_amp_step, steps, ("sgd", "float32", "step", "cpu")),
        "apex": (bench_apex, apex, ("O2", "FusedSGD", "step", "cpu")),
    }[family]
    right, spoiled = of.contestant, {"fused"}

    def contestant(who: str, *arguments: Any, lr: float, **more: Any) -> Any:
        return right(who, *arguments, lr=1.02 * lr if who in spoiled else lr, **more)

    monkeypatch.setattr(of, "contestant", contestant)
    forget(bench)
    with pytest.warns(UserWarning, match="fused left out: wrong"):
        assert bench._entrants(*options)[1:] == {
            "amp_step": ["single", "foreach"], "apex": ["own", "foreach", "masters"],
        }[family]  # fmt: skip
    spoiled.add(wrong)
    forget(bench)
    with pytest.raises(pytest.fail.Exception, match=r"(?s)wrong (parameter|weight).*\. Not timed"):
        bench._entrants(*options)
