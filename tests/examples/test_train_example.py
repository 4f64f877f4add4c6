"""examples/train.py: it runs in every mode, and repeats itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import ROOT
from helpers.processes import run_python
from helpers.train_runs import MODELS, QUICK, build_model, failed, losses, run, train, train_modes


def test_three_modes_are_compared_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, results = run(tmp_path)
    printed = capsys.readouterr().out
    assert status == 0
    assert results["passed"]
    assert not failed(results)
    names = [
        "fp32 eager",
        "AMP bf16 eager",
        "AMP bf16 fusedtrain",
        "AMP bf16 fusedtrain + recompute",
    ]
    assert [mode["name"] for mode in results["modes"]] == names
    assert [mode["compared_with"] for mode in results["modes"]] == [None, *names[:2], names[1]]
    assert all(name in printed for name in names)
    assert "images/s" in printed
    assert "9 x torch.nn.ReLU" in printed
    for mode in results["modes"]:
        assert len(mode["losses"]) == 4
        assert mode["images_per_second"] > 0
        assert mode["ms_per_step"] > 0
        assert 0 <= mode["test_accuracy"] <= 1
    fp32, amp, _, again = (mode["saved_for_backward_mb"] for mode in results["modes"])
    assert 0.3 * fp32 < amp < 0.7 * fp32
    assert again < 0.8 * amp
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def words_of(printed: str, mode: str) -> str:
    text = " ".join(printed.split())
    return text[text.index(f"{mode} beside ") :]


def test_the_last_lines_say_what_was_won(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The default network and step, made small; the numbers are those of the results. Batches of
    8: a processor with AVX2 alone takes 50 s for 16 images in bfloat16."""
    options = ("--model", "efficientnet_b0", "--optimizer", "adamw", "--clip", "1", "--ema", "0.9")
    status, results = run(
        tmp_path, *options, "--steps", "2", "--batch-size", "8", "--test-images", "8"
    )
    assert status == 0, failed(results)
    printed = capsys.readouterr().out
    words = words_of(printed, "AMP bf16 fusedtrain + recompute")
    _, eager, _, again = results["modes"]
    kept = again["saved_for_backward_mb"] / eager["saved_for_backward_mb"]
    assert kept < 0.45
    assert words.startswith("AMP bf16 fusedtrain + recompute beside AMP bf16 eager: same losses ")
    of_eager = f"AMP bf16 eager from fp32 eager {eager['max_loss_difference']:.2g}"
    largest = f"largest difference at any step {again['max_loss_difference']:.2g}"
    assert f"({largest}, {of_eager})" in words
    assert f"memory kept for backward {kept:.2f}x, step" in words
    batch = re.search(r"this memory ([\d.]+)x \((\d+) images instead of 8\)", words)
    assert batch is not None
    assert float(batch[1]) == pytest.approx(int(batch[2]) / 8, abs=0.06)
    assert int(batch[2]) == pytest.approx(8 / kept, rel=0.1)
    first = printed.splitlines()[0]
    assert first.startswith("Training efficientnet_b0 on digits: 2 steps in each of 4 modes")
    assert "A step of all modes took " in printed
    times = [mode["ms_per_step"] for mode in results["modes"]]
    assert printed.splitlines()[-2:] == [
        f"Memory: with recompute backward keeps {kept:.2f}x of eager's bytes; {batch[2]} images "
        "fit where 8 did.",
        f"Time: a step takes {times[2] / times[1]:.2f}x of eager's time, with recompute "
        f"{times[3] / times[1]:.2f}x.",
    ]
    apart = max(mode["max_loss_difference"] for mode in results["modes"][2:])
    assert printed.splitlines()[-3] == (
        f"Losses: checks passed; single steps are up to {apart:.2g} from eager's, as rounding "
        "grows in training."
    )
    assert "Little changes" not in words


@pytest.mark.slow
def test_of_relus_the_words_say_why_little_changes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(tmp_path, "--steps", "1")
    words = words_of(capsys.readouterr().out, "AMP bf16 fusedtrain")
    assert "Little changes while outputs are stored: torch keeps one tensor for a ReLU" in words


@pytest.mark.slow
def test_a_table_fits_100_columns_and_the_profiler_is_silent(tmp_path: Path) -> None:
    done = run_python(
        "examples/train.py", *QUICK, "--steps", "1", "--output", tmp_path, cwd=ROOT, trains=True
    )
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "profiler" not in done.stderr
    assert "STAGE" not in done.stderr


def test_fine_tuning_with_frozen_batch_norms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, results = run(tmp_path, "--frozen-norms", "--amp", "off")
    assert status == 0
    assert "folds while frozen: 20 norms" in capsys.readouterr().out
    trained, _, _, eager, tuned = results["modes"]
    assert (eager["name"], tuned["compared_with"]) == ("frozen eager", "frozen eager")
    assert eager["losses"][0] < trained["losses"][0]  # it starts from what was trained
    assert tuned["losses"] == pytest.approx(eager["losses"], rel=1e-3)
    assert tuned["saved_for_backward_mb"] < 0.9 * eager["saved_for_backward_mb"]


@pytest.mark.slow
def test_memory_against_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = run(tmp_path, "--memory", "store", "recompute", "--amp", "off")
    printed = capsys.readouterr().out
    assert status == 0
    assert "outputs are computed again in backward" in printed
    names = [f"memory: {kind}" for kind in ("eager", "store", "recompute", "checkpoint")]
    modes = results["modes"][3:]
    assert [mode["name"] for mode in modes] == names
    assert [mode["compared_with"] for mode in modes] == [None, *[names[0]] * 2, None]
    eager, stored, again, checkpointed = modes
    assert again["losses"] == stored["losses"]
    assert checkpointed["losses"][0] == eager["losses"][0]
    kept = [mode["saved_for_backward_mb"] for mode in modes]
    assert kept[2] < 0.75 * kept[1] <= 0.76 * kept[0]
    assert kept[3] < 0.75 * kept[0]
    bits = [c for c in results["checks"] if c["name"].startswith("losses of recompute")]
    assert [c["passed"] for c in bits] == [True]
    assert (tmp_path / "train.png").stat().st_size > 10_000


def test_norms_in_the_place_of_their_input(tmp_path: Path) -> None:
    status, results = run(tmp_path, "--memory", "inplace", "--amp", "off", "--model", "darknet19")
    assert status == 0
    eager, overwriting, checkpointed = results["modes"][3:]
    assert overwriting["compared_with"] == eager["name"]
    assert overwriting["saved_for_backward_mb"] < 0.6 * eager["saved_for_backward_mb"]
    assert checkpointed["saved_for_backward_mb"] < 0.6 * eager["saved_for_backward_mb"]


@pytest.mark.slow
def test_derivatives_in_few_bits(tmp_path: Path) -> None:
    status, results = run(
        tmp_path, "--memory", "q8", "--amp", "off", "--model", "convnext", "--optimizer", "adamw"
    )
    assert status == 0
    eager, q8, _ = results["modes"][3:]
    assert q8["compared_with"] is None
    assert q8["saved_for_backward_mb"] < 0.9 * eager["saved_for_backward_mb"]
    assert q8["losses"][0] == pytest.approx(eager["losses"][0], rel=1e-5)
    assert q8["losses"] != eager["losses"]


def test_frozen_batch_norms_stay_frozen() -> None:
    net = build_model("resnet18", 10, 8)
    modes = train_modes.build_tuning_modes(
        net, train_modes.World(torch.device("cpu")), compiled=False
    )
    before = [b.clone() for b in net.buffers()]
    batch = torch.randn(4, 3, 32, 32), torch.tensor([1, 2, 3, 4])
    for mode in modes:
        train_modes.step(mode, [batch], 0.1)
        assert all(torch.equal(a, b) for a, b in zip(mode.net.buffers(), before, strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(mode.net.parameters(), net.parameters()))


@pytest.mark.slow
def test_a_run_repeats_itself_also_with_workers(tmp_path: Path) -> None:
    fp32 = ("--amp", "off")
    _, first = run(tmp_path / "first", *fp32)
    _, again = run(tmp_path / "again", *fp32, "--workers", "1")
    _, other = run(tmp_path / "other", *fp32, "--seed", "1")
    assert losses(first) == losses(again)
    assert losses(first) != losses(other)


def test_options_of_the_training_loop(tmp_path: Path) -> None:
    options = ("--amp", "off", "--channels-last", "--accumulate", "2", "--cudnn-benchmark")
    status, results = run(tmp_path, *options)
    assert status == 0
    assert [mode["name"] for mode in results["modes"]] == [
        "fp32 eager", "fp32 fusedtrain", "fp32 fusedtrain + recompute",
    ]  # fmt: skip
    assert len(losses(results)[0]) == 4


@pytest.mark.slow
def test_fp16_scales_its_loss(tmp_path: Path) -> None:
    status, results = run(tmp_path, "--amp", "fp16", "--steps", "2")
    assert status == 0, failed(results)
    assert results["modes"][2]["name"] == "AMP fp16 fusedtrain"


@pytest.mark.parametrize("size", [28, 32])
@pytest.mark.parametrize("name", MODELS)
def test_models_take_small_images(name: str, size: int) -> None:
    model = build_model(name, classes=7, width=8)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 7)
    strides = [m.stride for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert strides[0] == ((2, 2) if name == "convnext" else (1, 1))


def test_accumulated_gradients_equal_those_of_a_bigger_batch() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    images, labels = torch.randn(12, 3, 8, 8), torch.randint(0, 5, (12,))
    world = train_modes.World(torch.device("cpu"))
    results = []
    for parts in (1, 3):
        mode = train_modes.build_modes(base, None, world, compiled=False, channels_last=False)[1]
        batches = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        loss = train_modes.backward(mode, batches)
        results.append([loss, *(p.grad for p in mode.net.parameters())])
    for whole, accumulated in zip(*results, strict=True):
        torch.testing.assert_close(accumulated, whole, rtol=1e-5, atol=1e-6)


def test_probes_leave_the_model_as_it_was() -> None:
    base = build_model("resnet18", 10, width=8)
    world = train_modes.World(torch.device("cpu"))
    mode = train_modes.build_modes(base, None, world, compiled=False, channels_last=False)[1]
    before = {name: value.clone() for name, value in mode.net.state_dict().items()}
    batch = (torch.randn(4, 3, 32, 32), torch.arange(4))
    train_modes.measure_saved_bytes(mode, batch)
    assert mode.saved_bytes > 0
    assert train_modes.gradients(mode, batch, torch.bfloat16)
    for name, value in mode.net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in mode.net.parameters())


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / "train.py"), *QUICK]
    command += ["--steps", "3", "--accumulate", "2", "--amp", "off", "--output", str(tmp_path)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("images/s") == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["processes"] == 2
    assert results["passed"]
    assert [len(curve) for curve in losses(results)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "--batch-size: must be a positive whole number, not '0'"),
        (["--epochs", "two"], "--epochs: must be a positive whole number, not 'two'"),
        (["--lr", "-1"], "--lr: must be a positive number"),
        (["--lr", "nan"], "--lr: must be a positive number"),
        (["--clip", "0"], "--clip: must be a positive number"),
        (["--ema", "1"], "--ema: must be between 0 and 1"),
        (["--optimizer", "sgdd"], "--optimizer: invalid choice: 'sgdd'"),
        (["--width", "12"], "--width: must be a multiple of 8"),
        (["--data", "mnist"], "--data: must be digits, fashion-mnist, cifar10 or folder:PATH"),
        (["--data", "folder:"], "--data: must be"),
        (["--amp", "fp8"], "--amp: invalid choice: 'fp8'"),
        (["--model", "vgg"], "--model: invalid choice: 'vgg'"),
    ],
)
def test_wrong_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train.main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize(
    ("machine", "capability", "amp"),
    [
        ("x86_64", "AVX512", "bf16"), ("x86_64", "AVX2", "off"), ("x86_64", "DEFAULT", "off"),
        ("aarch64", "DEFAULT", "bf16"),
    ],
)  # fmt: skip
def test_amp_is_what_the_processor_is_good_at(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: str,
    capability: str,
    amp: str,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert train.parse(["--device", "cpu"]).amp == amp
    assert ("AMP is off: " in capsys.readouterr().out) == (amp == "off")
    assert train.parse(["--device", "cpu", "--amp", "bf16"]).amp == "bf16"
    assert not capsys.readouterr().out


def test_cuda_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--device", "cuda"])
    assert "--device cpu" in capsys.readouterr().err
