"""Benchmarks of the AMP step and of Apex's calls: bytes, gates, rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from benchmarks import bench_amp_step, bench_apex, report
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


def _times(factor: float) -> Spoil:
    """Gradients that are off."""
    return _wrapped(lambda entrant, right: ([g.mul_(factor) for g in entrant.grads], right()))


def _no_rounded_copy(entrant: Any, right: Callable[[], object]) -> None:
    kept = entrant.params[0].detach().clone()
    right()
    entrant.params[0].data.copy_(kept)


def _never_skips(entrant: Any, right: Callable[[], object]) -> None:
    for g in entrant.grads:
        g.nan_to_num_(posinf=1.0)
    right()


def _scale_that_stays(entrant: Any) -> None:
    entrant.scale = lambda: 1.0


def _nothing(entrant: Any) -> None:
    """The options of the rule are wrong, not the call."""


WRONG_SCRIPTS: dict[str, tuple[Spoil, dict[str, float], str]] = {
    "no-op": (_nothing, {"lr": 0.0}, "wrong weight"),
    "two percent of a step": (_nothing, {"lr": 0.102}, "wrong weight"),
    "no decay": (_nothing, {"weight_decay": 0.0}, "wrong weight"),
    "momentum": (_nothing, {"momentum": 0.88}, "wrong weight"),
    "not scaled": (_times(1 / apex.GATE_SCALE), {}, "wrong"),
    "sign": (_times(-1.0), {}, "wrong"),
    "two percent": (_times(1.02), {}, "wrong"),
    "no copy": (
        _wrapped(_no_rounded_copy), {}, "are not the float32 weights, rounded|wrong weight",
    ),
    "no skip": (_wrapped(_never_skips), {}, "not skipped"),
    "scale": (_scale_that_stays, {}, "did not halve"),
}  # fmt: skip


@pytest.mark.parametrize("who", ["fusedtrain", "own", "masters"])
@pytest.mark.parametrize("mistake", WRONG_SCRIPTS)
def test_wrong_scripts_do_not(who: str, mistake: str) -> None:
    spoil, options, message = WRONG_SCRIPTS[mistake]
    for job in apex.JOBS if options else ("step",):
        entrant, data = small(who, "O2", "FusedSGD", job, **options)
        spoil(entrant)
        with pytest.raises(NotTheJob, match=message):
            apex.check(entrant, "FusedSGD", job, data)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_script_that_does_not_clip(level: str) -> None:
    for who in apex.contestants(level, "step"):
        entrant, data = small(who, level, "FusedSGD", "step")
        with pytest.raises(NotTheJob, match="wrong weight"):
            apex.check(entrant, "FusedSGD", "clip", data)


def test_a_timed_call_can_be_repeated() -> None:
    """Gradients are the same before each, and stay far from denormal numbers."""
    data = bench_apex._tensors("efficientnet_b0", "cpu", tiny=True)
    for who in apex.contestants("O2", "clip"):
        entrant = apex.contestant(who, "O2", "FusedSGD", "clip", data, lr=bench_apex.LR)
        before = [w.detach().clone() for w in data.values]
        for _ in range(2):
            entrant.ready()
            gradients = [g.clone() for g in entrant.grads]
            entrant.call()
            assert entrant.scale() == apex.SCALE
        entrant.ready()
        assert all(map(torch.equal, gradients, entrant.grads))
        assert min(float(g.abs().min()) for g in gradients) / apex.SCALE > 2**-14
        weights = entrant.weights()
        assert not any(map(torch.equal, weights, before))
        assert max(float((a.detach() - b).abs().max()) for a, b in zip(weights, before)) < 1e-3


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


@pytest.mark.parametrize("job", apex.JOBS)
def test_row_of_apex(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = row(bench_apex, monkeypatch, "O2", "FusedSGD", job)
    assert made.ns.keys() == {*apex.contestants("O2", job), "copy"}
    assert (made.op, made["bytes"]) == ("O2+FusedSGD", 20 * (128 * 22 + 32 * 24))
    assert made["counts"]["fusedtrain"] > made["counts"]["own"] > 0


def test_a_rival_that_is_compiled_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile raises below a dispatch mode, by which operators are counted."""

    class Compiled(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            assert _get_current_dispatch_mode() is None
            return super().step(closure)

    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace(AdamW8bit=Compiled))
    monkeypatch.setattr(steps, "rivals", lambda *_: ["fused", steps.TORCHAO])
    made = row(bench_amp_step, monkeypatch, "adamw", "bfloat16+q8", "clip")
    assert made["host_ns"].keys() == {"fusedtrain", "fused", steps.TORCHAO}
    assert made["counts"].keys() == {"fusedtrain", "fused"}
    ours, fused = made["counts"].values()
    made.ratio[steps.TORCHAO] = 2 * made.ratio["fused"]
    assert report.cells(made)["launches"] == f"{ours} (fused {fused})"


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
