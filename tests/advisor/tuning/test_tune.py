"""`tune` through its entry points: the command, and the function."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tuned_models as models

import fusedtrain as package
from helpers.commands import Page, assert_png, environment, fusedtrain, heed_ctrl_c, parsed

HERE = Path(models.__file__)
WORDS = ("--input", "3x8x8", "--batch", "4", "--lr", "0.01", "--device", "cpu")


@pytest.mark.slow
def test_the_command_shows_trials_chart_page_and_a_recipe_that_runs(tmp_path, monkeypatch):
    place = f"{HERE}:build_model"
    only = ("--switch", "batch", "--budget", "150s")
    files = ("--json", "--plot", "out.png", "--html", "out.html")
    run = fusedtrain("tune", place, *WORDS, *only, *files, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    seen = parsed(run)
    assert seen["partial"] is None
    names = [trial["name"] for trial in seen["trials"]]
    assert names == ["plain fp32", "batch 64"]  # 16 times the first; it fits in any memory
    for trial in seen["trials"]:
        assert trial["images_per_second"] is not None, trial["reason"]
        assert trial["images_per_second"] > 0
        assert trial["memory"] > 0
        assert trial["first_step"] > 0
    plain, batch = seen["trials"]
    low, high = batch["interval"]
    assert low <= batch["gain"] <= high
    assert batch["accepted"] == (low > 1)
    assert batch["rounds"] >= 3
    assert batch["memory"] > 10 * plain["memory"]  # 16 times as many samples, the same parameters
    assert ("# The learning rate was 0.01 for 4 samples." in seen["recipe"]) == batch["accepted"]
    stages = [line for line in run.stderr.splitlines() if line.startswith("tune: ")]
    assert [stage[6:] for stage in stages][1:2] == names[1:]
    assert_png(tmp_path / "out.png")
    page = Page((tmp_path / "out.html").read_text())
    assert [row[0] for row in page.rows[1:]] == names
    assert page.images[0].startswith("data:image/png;base64,")
    (tmp_path / "recipe.py").write_text(seen["recipe"])
    monkeypatch.syspath_prepend(str(HERE.parent))
    loss = runpy.run_path(str(tmp_path / "recipe.py"))["loss"]
    assert 0 < float(loss) < 10


@pytest.mark.slow
def test_trials_that_are_wrong_or_raise_are_refused_and_the_others_go_on():
    stages = []
    report = package.tune(
        models.Moody, (3, 8, 8), batch=4, lr=0.01, budget=150, device="cpu",
        switches=("precision", "channels_last"), begin=stages.append,
    )  # fmt: skip
    assert [trial.name for trial in report.trials] == [
        "plain fp32", "precision bf16", "channels_last on",
    ]  # fmt: skip
    plain, bf16, layout = report.trials
    assert "\n" not in bf16.reason
    assert bf16.reason == "RuntimeError: no autocast for this model"
    number = r"[\d.e+-]+"
    wrong = rf"wrong: loss of step 1 {number}, fp32 {number}, allowed ±{number}"
    assert re.fullmatch(wrong, layout.reason)
    assert not bf16.accepted
    assert not layout.accepted
    assert report.best == plain.config
    assert report.partial == ""
    assert report.summary[0].startswith("Nothing was won")
    assert stages[1:] == ["precision bf16", "channels_last on"]
    assert "refused: wrong: loss of step 1" in str(report)
    assert report.recipe in str(report)


@pytest.mark.slow
def test_a_model_that_raises_shows_its_own_traceback(tmp_path):
    run = fusedtrain("tune", f"{HERE}:Raising", *WORDS, folder=tmp_path)
    assert run.returncode == 3
    assert run.stdout == ""
    assert "RuntimeError: the layer is broken" in run.stderr
    assert f'File "{HERE}", line' in run.stderr
    assert "tuning/_worker.py" not in run.stderr


def test_the_budget_ends_a_model_that_never_returns():
    report = package.tune(models.sleep, (3, 8, 8), budget=1.5, device="cpu")
    assert report.partial.startswith("the budget of 1.5 s ended during")
    assert report.partial.endswith("; no switch was tried")
    assert report.trials == []
    assert report.seconds < 10


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGINT for one process (not Windows)")
def test_after_ctrl_c_the_trials_until_then_are_shown(tmp_path):
    command = [sys.executable, "-m", "fusedtrain", "tune", f"{HERE}:build_model", *WORDS]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            if line == "tune: precision bf16\n":
                break
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == 4
    assert "PARTIAL: stopped; 1 trial until then; not tried: precision bf16, " in output
    assert "plain fp32" in output
    assert "def step(inputs, targets):" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 1}, "batch: expected 2 or more"),
        ({"optimizer": "adam"}, "optimizer: expected sgd or adamw"),
        ({"device": "tpu"}, "device: expected cpu or cuda"),
        ({"budget": "x"}, "budget: expected a time"),
        ({"switches": ["x"]}, "switches: no x"),
        ({"example": ()}, "example: expected the shape of one sample"),
    ],
)
def test_arguments_are_checked_before_any_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        package.tune("m.py:f", **{"example": (3, 8, 8), **arguments})
