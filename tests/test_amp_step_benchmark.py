"""The benchmark of the AMP step: its networks, its gate, its rows and its report."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _models import timm, torchvision

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks._contestants import JOBS, KINDS, RULES, bytes_per_parameter, rivals  # noqa: E402
from benchmarks._parameter_lists import MODELS, count, shapes  # noqa: E402

MILLIONS = {"efficientnet_b0": 5.29, "resnet50": 25.56, "convnext_tiny": 28.59, "vit_l_16": 304.33}


@pytest.fixture(scope="module", autouse=True)
def _timm_optimizers() -> None:
    """Operator names can be declared once per process: let the tests' own helper do it."""
    timm()


@pytest.fixture
def gate() -> ModuleType:
    return importlib.import_module("benchmarks._step_gate")


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("benchmarks.bench_amp_step")


# --- parameter lists ---


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_of_torchvision(model: str) -> None:
    models = importlib.import_module(torchvision().__name__ + ".models")
    with torch.device("meta"):
        network = getattr(models, model)()
    assert shapes(model) == [tuple(p.shape) for p in network.parameters()]
    assert count(shapes(model)) / 1e6 == pytest.approx(MILLIONS[model], abs=0.005)


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_as_large_as_those_of_timm(model: str) -> None:
    name = {"vit_l_16": "vit_large_patch16_224"}.get(model, model)
    with torch.device("meta"):
        network = timm().create_model(name)
    sizes = Counter(p.numel() for p in network.parameters())
    assert sizes == Counter(count([shape]) for shape in shapes(model))


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
    ],
)
def test_least_bytes(op: str, kind: str, expected: list[int]) -> None:
    assert [bytes_per_parameter(op, job, KINDS[kind]) for job in JOBS] == expected


# --- the gate ---


@pytest.mark.parametrize("op", RULES)
def test_gate_accepts_right_contestants(gate: ModuleType, op: str) -> None:
    for job in JOBS:
        for who in ("fusedtrain", *RULES[op].variants):
            gate.check(who, op, job, "float32", "cpu")


@pytest.mark.parametrize("kind", ["bfloat16", "bfloat16+master"])
def test_gate_accepts_bfloat16(gate: ModuleType, kind: str) -> None:
    for job in JOBS:
        for who in ("fusedtrain", *rivals("adamw", KINDS[kind], "cpu")):
            gate.check(who, "adamw", job, kind, "cpu")


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
def test_gate_refuses_who_does_less(
    gate: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    done: str,
    factor: float,
    message: str,
    kind: str,
) -> None:
    right = gate.ours

    def less(op: str, _: str, kind: Any, params: list[Any], *, lr: float, scale: float) -> Any:
        contestant = right(op, done, kind, params, lr=abs(factor) * lr, scale=scale)
        for group in contestant.optimizer.param_groups:
            group["maximize"] = factor < 0
        return contestant

    monkeypatch.setattr(gate, "ours", less)
    with pytest.raises(gate.NotTheJob, match=message):
        gate.check("fusedtrain", "adamw", job, kind, "cpu")


def test_gate_refuses_who_does_not_skip(gate: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gate.ours

    def keen(*arguments: Any, **options: Any) -> Any:
        contestant = right(*arguments, **options)
        call, calls = contestant.call, iter(range(3))

        def step() -> None:
            call()
            if next(calls) == 2:
                contestant.params[0].data.mul_(1.001)

        contestant.call = step
        return contestant

    monkeypatch.setattr(gate, "ours", keen)
    with pytest.raises(gate.NotTheJob, match="not skipped"):
        gate.check("fusedtrain", "sgd", "check", "float32", "cpu")


# --- what is run ---


def test_selection(bench: ModuleType) -> None:
    cases = bench.select("cpu")
    assert len(set(cases)) == len(cases)
    assert {case.op for case in cases} == set(RULES)
    assert {case.kind for case in cases} == set(KINDS)
    assert {case.model for case in cases} == set(MODELS) - {"vit_l_16"}
    assert {case.model for case in bench.select("cuda")} == set(MODELS)
    large = bench.select("cpu", ops=("adamw",), models=("vit_l_16",))
    assert {case.job for case in large} == set(JOBS)
    assert bench.select("cpu", ops=("mish",)) == []
    assert [str(case) for case in bench.select(quick=True, ops=("sgd",))] == [
        "sgd-zero-float32-efficientnet_b0"
    ]


def test_ops_are_counted(bench: ModuleType) -> None:
    x, y = torch.ones(3), torch.ones(3)
    assert bench.count_ops(lambda: (x.add_(y), y.mul_(2))) == 2


def test_kernels_are_told_from_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = importlib.import_module("benchmarks._guards")
    monkeypatch.setattr(guards, "has_kernel", lambda op, device: False)
    monkeypatch.setenv("FUSEDTRAIN_REQUIRE", "cpu")
    with pytest.raises(pytest.skip.Exception, match="no cpu kernel of optimizer_step"):
        guards.refuse_the_reference("optimizer_step", "cpu")
    monkeypatch.setenv("FUSEDTRAIN_REQUIRE", "")
    guards.refuse_the_reference("optimizer_step", "cpu")


def test_preparation_is_not_timed() -> None:
    measure = importlib.import_module("benchmarks._measure")
    log: list[str] = []

    def clock(call: Callable[[], object], calls: int) -> float:
        call()
        log.append("timed")
        return 1.0

    effort = measure.Effort(min_rounds=2, max_rounds=2, seconds=0.0, sample_ns=1.0)
    measure.interleave(
        {"a": lambda: log.append("a")}, clock, effort, lambda who: log.append(f"{who} is next")
    )
    assert log == ["a is next", "a", "timed"] * 5


# --- rows and report ---


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Writes a results file from (op, job, ns of fusedtrain, ns of the rivals)."""
    step_rows = importlib.import_module("benchmarks._step_rows")

    def write(*rows: tuple[str, str, list[float], dict[str, list[float]]]) -> Path:
        entries = []
        for op, job, ours, theirs in rows:
            samples = {"fusedtrain": ours, **theirs, "copy": STEADY}
            who = ["fusedtrain", *theirs]
            info = step_rows.step_row(
                model="resnet50",
                op=op,
                job=job,
                kind="float32",
                numel=1_000_000,
                tensors=161,
                device="cpu",
                moved=32_000_000,
                copied=8_000_000,
                samples=samples,
                host={name: [5e4] for name in who},
                counts=dict.fromkeys(who, 7),
            )
            entries.append({"extra_info": info})
        path = tmp_path / "results.json"
        path.write_text(json.dumps({"benchmarks": entries}))
        return path

    return write


@pytest.fixture
def report() -> ModuleType:
    return importlib.import_module("benchmarks.report")


STEADY = [1e6] * 9


def times(factor: float) -> list[float]:
    return [factor * ns for ns in STEADY]


def test_table(results: Callable[..., Path], report: Any, capsys: Any) -> None:
    path = results(
        ("adamw", "ema", times(4), {"foreach": times(12), "fused": times(6)}),
        ("adamw", "check", times(4), {"fused": times(4)}),
    )
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "resnet50, float32: 1.0 M parameters in 161 tensors" in text
    (line,) = (x for x in text.splitlines() if "│ ema" in x)
    # 32 bytes of a million parameters in 4 ms; the copy moved 8 MB in 1 ms.
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        *("adamw", "ema", "4", "32", "8.0", "100", "50 / 50", "7 / 7 ops", "1.50x fused"),
        *("1.50-1.50", "fused 1.50x, foreach 3.00x", ""),
    ]
    assert text.index("│ check") < text.index("│ ema")
    assert "1.22x (geometric mean of 2), from 1.00x to 1.50x" in text


def test_markdown(results: Callable[..., Path], report: Any, capsys: Any) -> None:
    path = results(("adamw", "ema", times(4), {"fused": times(6)}), ("lars", "check", STEADY, {}))
    assert report.main([str(path), "--markdown"]) == 0
    table = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    assert len(table) == 4
    assert {line.count("|") for line in table} == {12}
    assert table[2].startswith("| adamw | ema | 4 | 32 | 8.0 | 100 |")


def test_slower_than_the_strongest_rival(
    results: Callable[..., Path], report: Any, capsys: Any
) -> None:
    path = results(("adamw", "ema", times(4), {"fused": times(3), "foreach": times(9)}))
    assert report.main([str(path), "--fail-slower"]) == 1
    text = capsys.readouterr().out
    assert "SLOWER" in text
    assert "adamw ema float32 resnet50: 0.75x fused" in text
    path = results(("adamw", "ema", times(4), {"fused": times(3.9)}))
    assert report.main([str(path), "--fail-slower"]) == 0


def test_chart(results: Callable[..., Path], report: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = results(("adamw", "ema", times(4), {"fused": times(6)}), ("lars", "check", STEADY, {}))
    assert report.main([str(path), "--png", str(tmp_path / "bars.png")]) == 0
    assert (tmp_path / "bars-amp-step.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "bars.png").exists()


# --- a run ---


def _run(tmp_path: Path, *options: str, **environment: str) -> tuple[int, str, dict[str, Any]]:
    path = tmp_path / "quick.json"
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "-o", "addopts=", "--threads=1"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--quick", f"--benchmark-json={path}"]
    # Here the machinery is tested, which the plain-torch reference serves as well as a binary.
    environment = {**os.environ, "FUSEDTRAIN_REQUIRE": "", "OMP_NUM_THREADS": "1", **environment}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT, env=environment, text=True, capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    found: dict[str, Any] = {"benchmarks": []}
    if path.exists():
        found = json.loads(path.read_text())
    return done.returncode, done.stdout + done.stderr, found


def test_smoke_run(tmp_path: Path, report: Any, capsys: Any) -> None:
    pytest.importorskip("pytest_benchmark")
    code, output, found = _run(tmp_path, "--op", "sgd")
    assert code == 0, output
    (entry,) = found["benchmarks"]
    row = entry["extra_info"]
    assert (row["op"], row["job"], row["model"]) == ("sgd", "zero", "efficientnet_b0")
    assert (row["numel"], row["tensors"], row["bytes"]) == (5288548, 213, 36 * 5288548)
    who = {"fusedtrain", "single", "foreach", "fused"}
    assert row["ns"].keys() == who | {"copy"}
    assert row["host_ns"].keys() == row["counts"].keys() == who
    assert all(value > 0 for name in ("ns", "host_ns", "counts") for value in row[name].values())
    assert row["gb_per_s"]["fused"] == pytest.approx(row["bytes"] / row["ns"]["fused"])
    assert row["counts"]["single"] > 213 > row["counts"]["fusedtrain"]
    assert entry["stats"]["median"] == pytest.approx(row["ns"]["fusedtrain"] * 1e-9)
    assert report.main([str(tmp_path / "quick.json")]) == 0
    assert "AMP step" in capsys.readouterr().out


def test_unknown_names(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    code, output, _ = _run(tmp_path, "--op", "sgd", "--op", "mush", "--collect-only")
    assert code != 0
    assert "--op: no benchmark of mush" in output


WRONG = """
from benchmarks import _contestants, _step_gate

right = _contestants.ours
_step_gate.ours = lambda *a, lr, **k: right(*a, lr=1.02 * lr, **k)
"""


def test_a_wrong_optimizer_is_not_reported(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    (tmp_path / "wrong_step.py").write_text(WRONG)
    path = os.pathsep.join(filter(None, (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH"))))
    code, output, found = _run(tmp_path, "-p", "wrong_step", "--op", "sgd", PYTHONPATH=path)
    assert code == 1, output
    assert "wrong parameter" in output
    assert "Not timed" in output
    assert found["benchmarks"] == []
