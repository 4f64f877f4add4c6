"""The benchmark of Apex's calls: who is wrong is not timed; its rows reach the report."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _models import torchvision
from torch import nn

from fusedtrain.amp._functions import switch_autocast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import _apex_contestants as of  # noqa: E402
from benchmarks import _apex_gate as gate  # noqa: E402
from benchmarks import report  # noqa: E402
from benchmarks._apex_rows import FAMILY, load  # noqa: E402
from benchmarks._guards import NotTheJob  # noqa: E402
from benchmarks._parameter_lists import shapes  # noqa: E402
from benchmarks._step_rows import step_row  # noqa: E402

bench: Any = importlib.import_module("benchmarks.bench_apex")

CASES = [(level, rule, job) for level, rule in (*bench.SCRIPTS, *bench.MORE) for job in of.JOBS]


@pytest.fixture(autouse=True)
def _no_casts() -> Iterator[None]:
    yield
    switch_autocast(frozenset())


def small(who: str, level: str, rule: str, job: str, **options: Any) -> tuple[Any, Any]:
    rules, data = of.RULES[rule], gate.tensors("cpu")
    options = {"lr": rules.gate_lr, "weight_decay": gate.DECAY, **options}
    return of.contestant(who, level, rules, job, data, **options), data


@pytest.mark.parametrize("model", bench.NETWORKS)
def test_batch_norms_are_found(model: str) -> None:
    models = importlib.import_module(torchvision().__name__ + ".models")
    with torch.device("meta"):
        network = getattr(models, model)()
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    ids = {id(p) for norm in norms for p in norm.parameters()}
    assert of.norm_places(shapes(model)) == [id(p) in ids for p in network.parameters()]


def test_bytes_that_must_be_moved() -> None:
    """Gradients twice, weights and states once each way, float16 weights besides."""
    sgd, adam = of.RULES["FusedSGD"], of.RULES["FusedAdam"]
    assert of.bytes_moved("O1", adam, [(5, 2)]) == 10 * (8 + 8 + 16)
    assert of.bytes_moved("O2", sgd, [(5, 2)]) == 10 * (4 + 8 + 8 + 2)
    norm = 2 * 5 * (8 + 8 + 8)
    assert of.bytes_moved("O2", sgd, [(5, 2), (5,), (5,)]) == 10 * 22 + norm


@pytest.mark.parametrize(("level", "rule", "job"), CASES, ids="-".join)
def test_the_gate_lets_all_pass(level: str, rule: str, job: str) -> None:
    for who in of.contestants(level, job):
        entrant, data = small(who, level, rule, job)
        gate.check(entrant, of.RULES[rule], job, data)


@pytest.mark.parametrize("who", ["fusedtrain", "own", "masters"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": 0.0}, "wrong weight"),
        ({"lr": 0.102}, "wrong weight"),
        ({"weight_decay": 0.0}, "wrong weight"),
        ({"momentum": 0.88}, "wrong weight"),
    ],
    ids=str,
)
def test_the_gate_stops_who_is_wrong(who: str, changed: dict[str, float], message: str) -> None:
    for job in of.JOBS:
        entrant, data = small(who, "O2", "FusedSGD", job, **changed)
        with pytest.raises(NotTheJob, match=message):
            gate.check(entrant, of.RULES["FusedSGD"], job, data)


def _times(factor: float) -> Callable[[Any], None]:
    """Gradients that are off."""

    def spoil(entrant: Any) -> None:
        right = entrant.call

        def call() -> None:
            for g in entrant.grads:
                g.mul_(factor)
            right()

        entrant.call = call

    return spoil


def _no_rounded_copy(entrant: Any) -> None:
    right = entrant.call

    def call() -> None:
        kept = entrant.params[0].detach().clone()
        right()
        entrant.params[0].data.copy_(kept)

    entrant.call = call


def _never_skips(entrant: Any) -> None:
    right = entrant.call

    def call() -> None:
        for g in entrant.grads:
            g.nan_to_num_(posinf=1.0)
        right()

    entrant.call = call


def _scale_that_stays(entrant: Any) -> None:
    entrant.scale = lambda: 1.0


@pytest.mark.parametrize("who", ["fusedtrain", "own", "masters"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_times(1 / gate.SCALE), "wrong"),
        (_times(-1.0), "wrong"),
        (_times(1.02), "wrong"),
        (_no_rounded_copy, "are not the float32 weights, rounded|wrong weight"),
        (_never_skips, "not skipped"),
        (_scale_that_stays, "did not halve"),
    ],
    ids=["not scaled", "sign", "two percent", "no copy", "no skip", "scale"],
)
def test_the_gate_stops_who_does_less(who: str, spoil: Any, message: str) -> None:
    entrant, data = small(who, "O2", "FusedSGD", "step")
    spoil(entrant)
    with pytest.raises(NotTheJob, match=message):
        gate.check(entrant, of.RULES["FusedSGD"], "step", data)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gate_stops_who_does_not_clip(level: str) -> None:
    for who in of.contestants(level, "step"):
        entrant, data = small(who, level, "FusedSGD", "step")
        with pytest.raises(NotTheJob, match="wrong weight"):
            gate.check(entrant, of.RULES["FusedSGD"], "clip", data)


def test_a_timed_call_can_be_repeated() -> None:
    """Gradients are the same before each, and stay far from denormal numbers."""
    data = bench._tensors("efficientnet_b0", "cpu", tiny=True)
    for who in of.contestants("O2", "clip"):
        entrant = of.contestant(who, "O2", of.RULES["FusedSGD"], "clip", data, lr=bench.LR)
        before = [w.detach().clone() for w in data.values]
        for _ in range(2):
            entrant.ready()
            given = [g.clone() for g in entrant.grads]
            entrant.call()
            assert entrant.scale() == of.SCALE
        entrant.ready()
        assert all(map(torch.equal, given, entrant.grads))
        assert min(float(g.abs().min()) for g in given) / of.SCALE > 2**-14
        weights = entrant.weights()
        assert not any(map(torch.equal, weights, before))
        assert max(float((a.detach() - b).abs().max()) for a, b in zip(weights, before)) < 1e-3


def test_cases() -> None:
    cases = bench.select()
    assert len(set(map(str, cases))) == len(cases) == 8
    assert len(bench.select(full=True)) == 16
    assert {case.model for case in bench.select(quick=True)} == {"efficientnet_b0"}
    assert {case.op for case in bench.select(ops=("O1+FusedSGD",))} == {"O1+FusedSGD"}
    assert bench.select(models=("vit_l_16",)) == []


# --- rows and report ---


def results(path: Path, **factors: float) -> Path:
    """A file with one row, from times over those of fusedtrain."""
    samples = {who: [factor * 1e6] * 9 for who, factor in {"fusedtrain": 1.0, **factors}.items()}
    info = step_row(
        family=FAMILY, model="resnet50", op="O2+FusedSGD", job="clip", kind="float16+float32",
        numel=1_000_000, tensors=161, device="cpu", moved=22_000_000, copied=8_000_000,
        samples={**samples, "copy": [1e6] * 9},
        host={who: [5e4] for who in samples}, counts=dict.fromkeys(samples, 7),
    )  # fmt: skip
    path.write_text(json.dumps({"benchmarks": [{"extra_info": info}]}))
    return path


def test_table_and_chart(tmp_path: Path, capsys: Any) -> None:
    path = results(
        tmp_path / "r.json", own=0.98, max_grad_norm=0.6, fused=1.5, foreach=3, masters=4
    )
    assert report.main([str(path), "--fail-slower", "--png", str(tmp_path / "bars.png")]) == 0
    text = capsys.readouterr().out
    (line,) = (x for x in text.splitlines() if "│ O2+FusedSGD" in x)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[:2] == ["O2+FusedSGD", "clip"]
    assert cells[2] == "1 / 0.98 / 1.5 / 3 / 4"
    assert cells[3:5] == ["22.0", "275"]
    assert cells[7:12] == ["0.98x", "0.98-0.98", "1.50x", "1.50-1.50", "0.60x"]
    assert "1.020 (geometric mean of 1), at most 1.020" in text
    assert (tmp_path / "bars-apex.png").read_bytes().startswith(b"\x89PNG")
    assert report.main([str(path), "--markdown"]) == 0
    header, _, row = (x for x in capsys.readouterr().out.splitlines() if x.startswith("|"))
    assert header.count("|") == row.count("|") == 13


@pytest.mark.parametrize(("own", "fused"), [(0.9, 1.5), (1.0, 0.9)])
def test_slower_than_promised(tmp_path: Path, capsys: Any, own: float, fused: float) -> None:
    path = results(tmp_path / "r.json", own=own, max_grad_norm=0.6, fused=fused, foreach=3)
    assert report.main([str(path), "--fail-slower"]) == 1
    text = capsys.readouterr().out
    assert "SLOWER" in text
    assert ("clip: 0.90x own" in text) == (own == 0.9)
    assert ("clip: 0.90x fused" in text) == (fused == 0.9)


def test_strongest_is_one_of_torchs(tmp_path: Path) -> None:
    (row,) = load([results(tmp_path / "r.json", own=0.98, max_grad_norm=0.5, fused=2, foreach=1.8)])
    assert row.strongest == "foreach"
    assert row.who == ["fusedtrain", "own", "max_grad_norm", "fused", "foreach"]
    assert dataclasses.replace(row, ratio={"own": 0.9}).strongest is None


# --- a run ---


def test_a_quick_run_reaches_the_report(tmp_path: Path) -> None:
    environment = os.environ | {"RESULTS_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    command = ["benchmarks.run", "--quick", "--family", "apex", "--op", "O2+FusedSGD"]
    run = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert list(tmp_path.glob("*-apex.png"))
    (path,) = tmp_path.glob("*.json")
    rows = load([path])
    assert [(row.op, row.job) for row in rows] == [("O2+FusedSGD", job) for job in of.JOBS]
    for row in rows:
        who = set(of.contestants("O2", row.job))
        assert row.ns.keys() == who | {"copy"}
        assert row.host_ns.keys() == row.counts.keys() == who
        assert row.ratio.keys() == who - {"fusedtrain"}
        assert (row.numel, row.tensors) == (5288548, 213)
        assert 22 < row.bytes / row.numel < 24
        assert row.counts["fusedtrain"] > row.counts["own"] > 0
    assert "Apex's calls / own step" in run.stdout
