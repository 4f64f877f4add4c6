"""The examples in Apex's calls and today's: they train alike, and go on from their checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")

from helpers import ROOT
from helpers.models import but_long

sys.path.insert(0, str(ROOT / "examples"))

import _epochs
import compare_apex
from helpers.processes import run_python

QUICK = ["--width", "8", "--image-size", "8", "--batch-size", "8", "--train-images", "24"]
QUICK += ["--test-images", "40", "--device", "cpu", "--threads", "1", "--epochs", "1"]
# Where 24 images are enough to learn something, and rounding is not amplified much.
IMAGENET, CIFAR = ["--lr", "0.3"], ["--lr", "0.01", "--loss-scale", "128"]
RUNS = {
    "apex-O0": ("imagenet_apex", [*IMAGENET, "--opt-level", "O0"]),
    "apex-O1": ("imagenet_apex", [*IMAGENET, "--opt-level", "O1"]),
    "apex-O2": ("imagenet_apex", [*IMAGENET, "--opt-level", "O2", "--loss-scale", "512"]),
    "apex-O3": ("imagenet_apex", [*IMAGENET, "--opt-level", "O3", "--loss-scale", "512"]),
    "today-fp32": ("imagenet_amp", [*IMAGENET, "--amp", "off"]),
    "today-fp16": ("imagenet_amp", [*IMAGENET, "--amp", "fp16"]),
    "today-bf16": ("imagenet_amp", [*IMAGENET, "--amp", "bf16"]),
    "by-hand": ("cifar_fp16_apex", CIFAR),
    "masters": ("cifar_fp16", CIFAR),
}


def run(folder: Path, name: str, *options: str) -> dict[str, Any]:
    script, arguments = RUNS[name]
    path = folder / f"{name}.json"
    status = importlib.import_module(script).main(
        [*QUICK, *arguments, "--json", str(path), *options]
    )
    assert status == 0
    torch.set_autocast_enabled("cpu", False)  # O1 leaves autocast on
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Report of each run, the folder of its checkpoint, and its printed output."""
    reports = {}
    for name in RUNS:
        kept = tmp_path_factory.mktemp("runs")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            reports[name] = run(kept, name, "--output", str(kept))
        reports[name] |= {"kept": kept, "printed": printed.getvalue()}
    return reports


def test_every_run_reports_itself(trained: dict[str, dict[str, Any]]) -> None:
    for name, report in trained.items():
        assert len(report["losses"]) == len(report["seconds"]) == 3, name
        assert all(0 < loss < 10 for loss in report["losses"]), name
        assert all(seconds > 0 for seconds in report["seconds"]), name
        assert 0 <= report["accuracy"] <= 1
        assert (report["test_images"], report["processes"]) == (40, 1)
    memory = {name: report["memory_mb"] for name, report in trained.items()}
    assert memory["apex-O2"] < 0.6 * memory["apex-O0"]
    assert memory["masters"] == memory["by-hand"] == pytest.approx(memory["apex-O2"], rel=0.05)
    assert memory["today-fp16"] == pytest.approx(memory["apex-O1"], rel=0.05)


@pytest.mark.parametrize(
    ("before", "today", "tolerance"),
    [
        ("apex-O0", "today-fp32", 1e-6),
        ("apex-O1", "today-fp16", 1e-6),
        ("by-hand", "masters", 2e-3),
    ],
)
def test_today_trains_as_before(
    trained: dict[str, dict[str, Any]], before: str, today: str, tolerance: float
) -> None:
    old, new = trained[before], trained[today]
    assert new["losses"] == pytest.approx(old["losses"], rel=tolerance)
    assert new["accuracy"] == pytest.approx(old["accuracy"], abs=0.06)


def test_levels_differ_by_rounding(trained: dict[str, dict[str, Any]]) -> None:
    exact = trained["apex-O0"]["losses"]
    for name in ("apex-O1", "apex-O2", "apex-O3", "today-bf16"):
        assert trained[name]["losses"] != exact
        assert trained[name]["losses"] == pytest.approx(exact, rel=0.2), name
    assert trained["apex-O1"]["losses"] != trained["apex-O2"]["losses"]


def test_the_learning_rate_matters(tmp_path: Path, trained: dict[str, dict[str, Any]]) -> None:
    """The comparisons above would see another learning rate."""
    for name in ("today-fp32", "masters"):
        other = run(tmp_path, name, "--lr", "0.06")
        assert other["losses"] != pytest.approx(trained[name]["losses"], rel=2e-3)
        assert other["losses"][0] == trained[name]["losses"][0]


@pytest.mark.parametrize(
    "name", but_long(["apex-O1", "apex-O2", "today-fp16", "by-hand", "masters"], "apex-O1")
)
def test_resuming_is_as_if_never_interrupted(
    tmp_path: Path, name: str, trained: dict[str, dict[str, Any]]
) -> None:
    whole = run(tmp_path, name, "--epochs", "2")
    first = trained[name]
    kept = first["kept"]
    assert (kept / "best.pt").is_file() == (first["accuracy"] > 0)
    resumed = run(tmp_path, name, "--epochs", "2", "--resume", str(kept / "checkpoint.pt"))
    assert first["losses"] + resumed["losses"] == whole["losses"]
    assert resumed["accuracy"] == whole["accuracy"]
    assert len(whole["losses"]) == 6


@pytest.mark.parametrize("name", ["apex-O2", "today-bf16", "by-hand"])
def test_evaluation_of_a_checkpoint(
    name: str, trained: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    *_, last = trained[name]["printed"].splitlines()
    script, arguments = RUNS[name]
    options = [*QUICK, *arguments, "--resume", str(trained[name]["kept"] / "checkpoint.pt")]
    options.append("--evaluate")
    assert importlib.import_module(script).main(options) == 0
    printed = capsys.readouterr().out
    assert last.startswith(" * Loss")
    assert last in printed
    assert "Epoch" not in printed


def test_torchvision_networks_and_channels_last(tmp_path: Path) -> None:
    options = ("--arch", "resnet18", "--image-size", "32", "--channels-last", "--batch-size", "4")
    report = run(tmp_path, "apex-O0", *options, "--train-images", "8")
    assert len(report["losses"]) == 2


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With batch norms over both, half the batch in each."""
    options = ["--opt-level", "O0", "--sync_bn", "--print-freq", "1", *IMAGENET]
    options += ["--arch", "cifar_resnet18"]
    run(tmp_path, "apex-O0", *options[2:5])
    alone = capsys.readouterr().out
    command = ["-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / "imagenet_apex.py"), *QUICK]
    command += [*options, "--batch-size", "4", "--json", str(tmp_path / "two.json")]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = run_python(*command, env=environment, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "two.json").read_text())["processes"] == 2
    assert printed_losses(done.stdout) == pytest.approx(printed_losses(alone), rel=1e-3)


def printed_losses(text: str) -> list[float]:
    losses = [float(loss) for loss in re.findall(r"Loss ([0-9.]+)", text)]
    assert len(losses) == 4  # of three steps, and of the test
    return losses


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("imagenet_apex", ["--opt-level", "O4"], "--opt-level: invalid choice: 'O4'"),
        ("imagenet_apex", ["--keep-batchnorm-fp32", "yes"], "--keep-batchnorm-fp32: invalid"),
        ("imagenet_apex", ["--keep-batchnorm-fp32", "True"], "keep_batchnorm_fp32 should be None"),
        ("imagenet_apex", ["--loss-scale", "much"], "loss_scale must be a number"),
        ("imagenet_apex", ["--arch", "resnet19"], "--arch resnet19: neither"),
        ("imagenet_apex", ["--resume", "no/such.pt"], "--resume no/such.pt: there is no such file"),
        ("imagenet_amp", ["--amp", "fp8"], "--amp: invalid choice: 'fp8'"),
        ("imagenet_amp", ["--batch-size", "64"], "needs 64 training images, there are 24"),
        ("cifar_fp16_apex", ["--loss-scale", "-1"], "--loss-scale: must be a positive number"),
        ("cifar_fp16", ["--width", "12"], "--width: must be a multiple of 8"),
        ("compare_apex", ["--rows", "none"], "--rows: invalid choice: 'none'"),
        ("compare_apex", ["--evaluate"], "--evaluate is for the scripts"),
    ],
)
def test_unusable_options(
    script: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = importlib.import_module(script).main([*QUICK, *options])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_network(
    trained: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained["today-fp32"]["kept"] / "checkpoint.pt"
    options = [*QUICK, "--arch", "resnet18", "--resume", str(checkpoint)]
    assert importlib.import_module("imagenet_amp").main(options) == 2
    assert "it is of --arch cifar_resnet18" in capsys.readouterr().err


def test_learning_rate_schedule() -> None:
    args = argparse.Namespace(lr=0.8, warmup_epochs=2, decay_epochs=[3, 5])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
    rates = []
    for epoch in range(6):
        for step in (0, 1):
            _epochs.adjust_learning_rate(optimizer, epoch, step, 2, args)
            rates.append(optimizer.param_groups[0]["lr"])
    expected = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.08, 0.08, 0.08, 0.08, 0.008, 0.008]
    assert rates == pytest.approx(expected)


def test_top_k_accuracy() -> None:
    output = torch.tensor([[0.1, 0.5, 0.4], [0.9, 0.0, 0.1], [0.2, 0.3, 0.5], [0.0, 0.1, 0.9]])
    target = torch.tensor([2, 0, 0, 2])
    assert _epochs.accuracy(output, target, (1, 2, 5)) == [50.0, 75.0, 100.0]


# --- compare_apex.py


def _in_this_process(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """A process of its own would import torch again; test_a_script_that_fails starts one."""
    status = importlib.import_module(Path(command[1]).stem).main(command[2:])
    return subprocess.CompletedProcess(command, status, "", "")


def test_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_apex.subprocess, "run", _in_this_process)
    options = ["--rows", "cifar", "--repeats", "1", "--output", str(tmp_path)]
    status = compare_apex.main([*QUICK, *options, "--lr", "0.001"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["passed"]
    before, today = results["rows"]
    assert today["compared_with"] == before["name"] == "cifar fp16, by hand"
    assert before["losses"][0] == today["losses"][0]
    for row in (before, today):
        assert len(row["losses"]) == 3
        assert row["ms_per_step"] > 0
        assert row["name"] in printed
    assert "farthest from before" in printed


def _reports(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """Every run reports a falling loss; one row's is changed."""

    def reported(args: argparse.Namespace, row: compare_apex.Row, repeat: int) -> None:
        row.losses = [2.3 * math.exp(-0.05 * step) for step in range(60)]
        row.seconds += [0.01 + 0.01 * repeat] * 57
        row.memory, row.accuracy, row.test_images = 1.0, 0.9, 300
        if row.name == change.get("name"):
            row.losses = [loss + change.get("loss", 0.0) for loss in row.losses]
            row.losses[5:] = [loss + change.get("late", 0.0) for loss in row.losses[5:]]
            row.accuracy += change.get("accuracy", 0.0)

    monkeypatch.setattr(compare_apex, "run", reported)


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"name": "imagenet, apex O0", "loss": 1.0}, []),  # nothing is held to it
        ({"name": "imagenet, apex O1", "loss": 1.0}, ["imagenet, today: loss"]),
        ({"name": "cifar fp16, today", "loss": 0.3}, ["cifar fp16, today: loss"]),
        ({"name": "cifar fp16, today", "loss": 0.003}, ["cifar fp16, today: loss, first 3"]),
        ({"name": "imagenet, today", "late": 0.3}, ["imagenet, today: loss, mean of the first"]),
        ({"name": "cifar fp16, today", "loss": math.nan}, ["cifar fp16, today: losses that are"]),
        ({"name": "imagenet, today", "accuracy": -0.2}, ["imagenet, today: final accuracy"]),
    ],
    ids=["equal", "no-pair", "before", "today", "little", "late", "nan", "accuracy"],
)
def test_exit_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    failed: list[str],
) -> None:
    _reports(monkeypatch, change)
    status = compare_apex.main(["--device", "cpu", "--output", str(tmp_path / "new")])
    assert status == (1 if failed else 0)
    assert ("FAILED" in capsys.readouterr().out) == bool(failed)
    results = json.loads((tmp_path / "new" / "results.json").read_text())
    checks = (check for check in results["checks"] if not check["passed"])
    wrong = [f"{check['mode']}: {check['name']}" for check in checks]
    assert bool(wrong) == bool(failed)
    assert all(any(name.startswith(part) for name in wrong) for part in failed)
    assert not any("first 3" in name for name in wrong) or "late" not in change
    assert [row["ms_per_step"] for row in results["rows"]] == pytest.approx([15.0] * 6)


@pytest.mark.slow
def test_a_script_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rows", "cifar", "--output", str(tmp_path), "--arch", "nonsense"]
    assert compare_apex.main([*QUICK, *options]) == 2
    assert "--arch nonsense: neither" in capsys.readouterr().err
