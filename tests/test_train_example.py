"""examples/train.py: it runs on every kind of data, repeats itself, and sees a wrong gradient."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fusedtrain

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
Image = pytest.importorskip("PIL.Image")

from _models import torchvision as import_torchvision_for_tests  # noqa: E402

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import train  # noqa: E402
from _train import data as train_data  # noqa: E402
from _train import modes as train_modes  # noqa: E402
from _train.checks import compare_gradients, compare_runs  # noqa: E402
from _train.models import MODELS, build_model  # noqa: E402
from _train.optimizers import RECIPES, Settings, Stepper  # noqa: E402

QUICK = ["--width", "8", "--batch-size", "16", "--steps", "4", "--test-images", "64"]
QUICK += ["--device", "cpu", "--no-progress", "--threads", "1"]


@pytest.fixture(autouse=True, scope="module")
def _torchvision() -> None:
    """Operator names can be declared once per process: let the tests' own helper do it."""
    import_torchvision_for_tests()


@pytest.fixture(autouse=True)
def _same_threads_after() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(output: Path, *options: str) -> tuple[int, dict[str, Any]]:
    status = train.main([*QUICK, "--output", str(output), *options])
    return status, json.loads((output / "results.json").read_text())


def losses(results: dict[str, Any]) -> list[list[float]]:
    return [mode["losses"] for mode in results["modes"]]


def failed(results: dict[str, Any]) -> list[str]:
    return [check["name"] for check in results["checks"] if not check["passed"]]


def test_three_modes_are_compared_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, results = run(tmp_path)
    printed = capsys.readouterr().out
    assert status == 0
    assert results["passed"]
    assert not failed(results)
    names = ["fp32 eager", "AMP bf16 eager", "AMP bf16 fusedtrain"]
    assert [mode["name"] for mode in results["modes"]] == names
    assert [mode["compared_with"] for mode in results["modes"]] == [None, *names[:2]]
    assert all(name in printed for name in names)
    assert "images/s" in printed
    assert "9 x torch.nn.ReLU" in printed
    for mode in results["modes"]:
        assert len(mode["losses"]) == 4
        assert mode["images_per_second"] > 0
        assert mode["ms_per_step"] > 0
        assert 0 <= mode["test_accuracy"] <= 1
    fp32, amp, _ = (mode["saved_for_backward_mb"] for mode in results["modes"])
    assert 0.3 * fp32 < amp < 0.7 * fp32
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_fine_tuning_with_frozen_batch_norms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, results = run(tmp_path, "--tune-mode", "--amp", "off")
    assert status == 0
    assert "tuned 20 norms" in capsys.readouterr().out
    trained, _, eager, tuned = results["modes"]
    assert (eager["name"], tuned["compared_with"]) == ("frozen eager", "frozen eager")
    assert eager["losses"][0] < trained["losses"][0]  # it starts from what was trained
    assert tuned["losses"] == pytest.approx(eager["losses"], rel=1e-3)
    assert tuned["saved_for_backward_mb"] < 0.9 * eager["saved_for_backward_mb"]


def test_memory_against_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, results = run(tmp_path, "--memory", "store", "recompute", "--amp", "off")
    printed = capsys.readouterr().out
    assert status == 0
    assert "outputs are computed again in backward" in printed
    names = [f"memory: {kind}" for kind in ("eager", "store", "recompute", "checkpoint")]
    modes = results["modes"][2:]
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
    eager, overwriting, checkpointed = results["modes"][2:]
    assert overwriting["compared_with"] == eager["name"]
    assert overwriting["saved_for_backward_mb"] < 0.6 * eager["saved_for_backward_mb"]
    assert checkpointed["saved_for_backward_mb"] < 0.6 * eager["saved_for_backward_mb"]


def test_derivatives_in_few_bits(tmp_path: Path) -> None:
    status, results = run(
        tmp_path, "--memory", "q8", "--amp", "off", "--model", "convnext", "--optimizer", "adamw"
    )
    assert status == 0
    eager, q8, _ = results["modes"][2:]
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


def test_a_run_repeats_itself_also_with_workers(tmp_path: Path) -> None:
    _, first = run(tmp_path / "first")
    _, again = run(tmp_path / "again", "--workers", "1")
    _, other = run(tmp_path / "other", "--seed", "1")
    assert losses(first) == losses(again)
    assert losses(first) != losses(other)


def test_options_of_the_training_loop(tmp_path: Path) -> None:
    options = ("--amp", "off", "--channels-last", "--accumulate", "2", "--cudnn-benchmark")
    status, results = run(tmp_path, *options)
    assert status == 0
    assert [mode["name"] for mode in results["modes"]] == ["fp32 eager", "fp32 fusedtrain"]
    assert len(losses(results)[0]) == 4


def test_fp16_scales_its_loss(tmp_path: Path) -> None:
    status, results = run(tmp_path, "--amp", "fp16", "--steps", "2")
    assert status == 0, failed(results)
    assert results["modes"][2]["name"] == "AMP fp16 fusedtrain"


@pytest.mark.parametrize("layout", ["split", "flat"])
def test_folder_of_pictures(tmp_path: Path, layout: str) -> None:
    generator = np.random.default_rng(0)
    for part in ("train", "test") if layout == "split" else ("",):
        for label, shade in (("dark", 40), ("light", 200)):
            folder = tmp_path / "pictures" / part / label
            folder.mkdir(parents=True)
            for number in range(20):
                pixels = generator.integers(shade - 30, shade + 30, (20, 24), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    data = f"folder:{tmp_path / 'pictures'}"
    status, results = run(tmp_path / "out", "--data", data, "--steps", "2")
    assert status == 0, failed(results)
    loaded = train_data.load_data(data, tmp_path, seed=0)
    assert (len(loaded.train), len(loaded.test)) == ((40, 40) if layout == "split" else (32, 8))
    images, labels = loaded.train.__getitems__([0, 31])
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [0, 1]
    assert images[0].mean() < 0 < images[1].mean()


# --- optimizers ---


def test_optimizer_clip_and_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--amp", "off", "--optimizer", "adamw", "--clip", "0.5", "--ema", "0.9")
    status, results = run(tmp_path, *options)
    assert status == 0, failed(results)
    printed = capsys.readouterr().out
    assert "adamw, batch 16, clip 0.5, EMA 0.9" in printed
    assert "share" in printed
    names = [check["name"] for check in results["checks"]]
    assert [name for name in names if name.startswith("3 equal steps")] == [
        "3 equal steps, change of weights: worst relative error",
        "3 equal steps, change of averages: worst relative error",
    ]
    for mode in results["modes"]:
        assert 0 < mode["optimizer_share"] < 1
        assert 0 < mode["optimizer_ms"] < mode["ms_per_step"]
    stock, fused = losses(results)
    assert fused == pytest.approx(stock, rel=1e-4)
    _, plain = run(tmp_path / "plain", *options[:4])
    assert losses(plain)[0] != pytest.approx(stock, rel=1e-4)


def _small_run(
    settings: Settings, dtype: torch.dtype | None = None, steps: int = 5
) -> list[train_modes.Mode]:
    """A little net trained in all modes; it is smooth, so that rounding is not amplified."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    images, labels = torch.randn(12, 3, 8, 8), torch.randint(0, 5, (12,))
    modes = train_modes.build_modes(
        base, dtype, CPU, compiled=False, channels_last=False, settings=settings
    )
    for _ in range(steps):
        for mode in modes:
            mode.losses.append(
                train_modes.step(mode, [(images, labels)], RECIPES[settings.name].lr)
            )
    return modes


CPU = train_modes.World(torch.device("cpu"))


@pytest.mark.parametrize("settings", [(None, None), (0.1, 0.9)], ids=["plain", "clip-ema"])
@pytest.mark.parametrize("name", RECIPES)
def test_fused_optimizer_reaches_the_loss_of_the_stock_one(
    name: str, settings: tuple[float | None, float | None]
) -> None:
    stock, fused = _small_run(Settings(name, *settings))
    assert fused.losses == pytest.approx(stock.losses, rel=1e-4)
    assert stock.losses[-1] < stock.losses[0]
    assert type(fused.stepper.optimizer).__module__.startswith("fusedtrain")
    averages = stock.stepper.averages()
    assert len(averages) == (4 if settings[1] else 0)
    for ours, theirs in zip(fused.stepper.averages(), averages, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_skipped_steps_harm_neither(name: str) -> None:
    """Under fp16 the first step often overflows: torch's fused SGD would not survive it."""
    torch.manual_seed(0)
    weights = [torch.randn(5, 3), torch.randn(3)]
    ends = []
    for fused in (False, True):
        params: list[torch.Tensor] = [nn.Parameter(w.clone()) for w in weights]
        stepper = Stepper(params, Settings(name), fused=fused, device=CPU.device, scaled=True)
        stepper.set_lr(0.1)
        for factor in (float("inf"), 1.0, 0.5):
            for p, w in zip(params, weights, strict=True):
                p.grad = stepper.scaler.scale(w * factor)
            stepper.step()
        ends.append([p.detach() for p in params])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torch_fused_kernels_are_used_where_they_are_right() -> None:
    def stock(name: str, params: list[torch.Tensor], scaled: bool) -> Any:
        stepper = Stepper(params, Settings(name), fused=False, device=CPU.device, scaled=scaled)
        return stepper.optimizer.defaults["fused"]

    plain = [nn.Parameter(torch.ones(2, 3, 4, 4))]
    strided = [nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))]
    assert stock("sgd", plain, False)
    assert stock("adamw", plain, True)
    assert not stock("sgd", plain, True)
    assert not stock("adamw", strided, False)


@pytest.mark.parametrize(
    ("ours", "name"),
    [
        pytest.param({"lr": 1.02}, "change of weights", id="2-percent"),
        pytest.param({"lr": 0.0}, "change of weights", id="no-op"),
        pytest.param({"ema_decay": 0.89}, "change of averages", id="average"),
        pytest.param({"max_grad_norm": 0.6}, "change of weights", id="clip"),
    ],
)
def test_a_wrong_optimizer_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: dict[str, float], name: str
) -> None:
    step = fusedtrain.optim.SGD._step

    def wrong(self: Any) -> None:
        for group in self.param_groups:
            group["lr"] *= ours.get("lr", 1.0)
        self.ema_decay = ours.get("ema_decay", 0.9)
        self.max_grad_norm = ours.get("max_grad_norm", 0.5)
        step(self)

    monkeypatch.setattr(fusedtrain.optim.SGD, "_step", wrong)
    options = ("--amp", "off", "--steps", "2", "--clip", "0.5", "--ema", "0.9")
    status, results = run(tmp_path, *options)
    assert status == 1
    assert f"3 equal steps, {name}: worst relative error" in failed(results)


def _write_idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def _fashion_folder(folder: Path) -> Path:
    for part, count in (("train", 100), ("t10k", 20)):
        pixels = np.arange(count * 28 * 28).reshape(count, 28, 28) % 251
        _write_idx(folder / f"{part}-images-idx3-ubyte.gz", pixels)
        _write_idx(folder / f"{part}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    return folder


def test_fashion_mnist_from_a_local_folder(tmp_path: Path) -> None:
    root = str(_fashion_folder(tmp_path))
    status, results = run(tmp_path, "--data", "fashion-mnist", "--data-root", root, "--steps", "2")
    assert status == 0, failed(results)


@pytest.mark.skipif(
    not train_data.DEBIAN_FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_fashion_mnist_of_debian(tmp_path: Path) -> None:
    options = ("--data", "fashion-mnist", "--data-root", str(tmp_path), "--steps", "60")
    status, results = run(tmp_path / "out", *options, "--test-images", "500", "--lr", "0.05")
    assert status == 0, failed(results)
    loaded = train_data.load_data("fashion-mnist", tmp_path, seed=0)
    assert (len(loaded.train), len(loaded.test), loaded.classes) == (60_000, 10_000, 10)
    for mode in results["modes"]:
        assert np.mean(mode["losses"][-10:]) < 0.8 * np.mean(mode["losses"][:3])
        assert mode["test_accuracy"] > 0.3


def test_augmentation_depends_on_seed_epoch_and_image_only(tmp_path: Path) -> None:
    root = _fashion_folder(tmp_path)
    images = train_data.load_data("fashion-mnist", root, seed=3).train
    images.set_epoch(1)
    together, _ = images.__getitems__([5, 6, 7, 8])
    apart = torch.stack([images[index][0] for index in (5, 6, 7, 8)])
    assert torch.equal(together, apart)
    again = train_data.load_data("fashion-mnist", root, seed=3).train
    assert not torch.equal(together, again.__getitems__([5, 6, 7, 8])[0])
    again.set_epoch(1)
    assert torch.equal(together, again.__getitems__([5, 6, 7, 8])[0])


def test_crop_and_flip_keep_the_picture() -> None:
    image = torch.arange(8 * 8, dtype=torch.uint8).view(1, 1, 8, 8)
    centre, corner = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.0, 0.99]])
    stay, mirror = torch.tensor([False]), torch.tensor([True])
    assert torch.equal(train_data._crop_and_flip(image, centre, stay), image)
    assert torch.equal(train_data._crop_and_flip(image, centre, mirror), image.flip(3))
    shifted = train_data._crop_and_flip(image, corner, stay)
    assert torch.equal(shifted[..., 1:, :-1], image[..., :-1, 1:])


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
    found = []
    for parts in (1, 3):
        mode = train_modes.build_modes(base, None, world, compiled=False, channels_last=False)[1]
        batches = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        loss = train_modes.backward(mode, batches)
        found.append([loss, *(p.grad for p in mode.net.parameters())])
    for whole, accumulated in zip(*found, strict=True):
        torch.testing.assert_close(accumulated, whole, rtol=1e-5, atol=1e-6)


def test_probes_leave_the_model_as_it_was() -> None:
    base = build_model("resnet18", 10, width=8)
    world = train_modes.World(torch.device("cpu"))
    mode = train_modes.build_modes(base, None, world, compiled=False, channels_last=False)[1]
    before = {name: value.clone() for name, value in mode.net.state_dict().items()}
    batch = (torch.randn(4, 3, 32, 32), torch.arange(4))
    assert train_modes.measure_saved_bytes(mode, batch) > 0
    assert train_modes.gradients(mode, batch, torch.bfloat16)
    for name, value in mode.net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in mode.net.parameters())


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


Damage = Callable[[torch.Tensor], torch.Tensor]


def _damaged_convert(damage: Damage, only: int | None) -> Callable[[nn.Module], Any]:
    """fusedtrain.convert, with the outputs of the activations sent through ``damage``."""
    convert = fusedtrain.convert

    def damaged(model: nn.Module) -> Any:
        report = convert(model)
        # Not the batch norms that compute them: each output once.
        fused = [m for m in model.modules() if type(m).__module__ == "fusedtrain.nn.activation"]
        assert fused
        for module in fused if only is None else [fused[only]]:
            module.register_forward_hook(lambda _m, _i, output: damage(output))
        return report

    return damaged


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize(
    ("damage", "only"),
    [
        pytest.param(lambda x: _ScaledGradient.apply(x, -1.0), None, id="sign"),
        pytest.param(lambda x: _ScaledGradient.apply(x, 1.05), None, id="5-percent"),
        pytest.param(lambda x: _ScaledGradient.apply(x, 1.05), 4, id="5-percent-in-one-block"),
        pytest.param(lambda x: x.detach(), 4, id="no-gradient"),
        pytest.param(lambda x: x + 0.1, 4, id="forward"),
    ],
)
def test_a_wrong_activation_fails_the_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: Damage,
    only: int | None,
    amp: str,
) -> None:
    monkeypatch.setattr(fusedtrain, "convert", _damaged_convert(damage, only))
    status, results = run(tmp_path, "--amp", amp, "--steps", "2")
    assert status == 1
    assert not results["passed"]
    assert any("gradient" in name for name in failed(results))
    assert "does not follow the eager run" in " ".join(capsys.readouterr().out.split())


def test_a_curve_that_leaves_the_eager_one_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first gradient cannot show: an activation that goes wrong later."""
    calls = 0

    def damage(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return _ScaledGradient.apply(x, -1.0 if calls > 9 * 8 else 1.0)

    monkeypatch.setattr(fusedtrain, "convert", _damaged_convert(damage, None))
    status, results = run(tmp_path, "--steps", "40", "--lr", "0.1")
    assert status == 1
    assert failed(results)
    assert not any("gradient" in name for name in failed(results))


def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusedtrain, "convert", _damaged_convert(lambda x: x * float("nan"), 0))
    status, results = run(tmp_path)
    assert status == 1
    assert len(losses(results)[0]) == 1
    assert "losses that are not finite" in failed(results)


def test_tolerance_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(0)

    def damage(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-4 * torch.rand(x.shape, generator=noise))

    monkeypatch.setattr(fusedtrain, "convert", _damaged_convert(damage, None))
    status, results = run(tmp_path, "--amp", "off", "--tolerance", "1e-9")
    assert status == 1
    assert any(name.startswith("loss, first") for name in failed(results))


def test_renamed_parameters_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"parameters differ.*weight"):
        compare_gradients({}, {"weight": torch.ones(2, 2)})


def test_nothing_to_compare_is_not_a_pass() -> None:
    zero = {"weight": torch.zeros(2, 2)}
    assert not compare_gradients(zero, zero).passed
    assert [check.name for check in compare_runs([], 1, None)] == ["losses that are not finite"]


def test_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / "train.py"), *QUICK]
    command += ["--steps", "3", "--accumulate", "2", "--output", str(tmp_path)]
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
def test_cuda_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--device", "cuda"])
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fashion-mnist", "apt install dataset-fashion-mnist"),
        ("cifar10", "--data-root"),
        ("folder:no/such/place", "there is no such folder"),
        ("folder:.", "one subfolder of pictures per class"),
    ],
)
def test_missing_data_names_the_remedy(
    name: str,
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline() -> Any:
        raise OSError("no route to host")

    monkeypatch.setattr(train_data, "DEBIAN_FASHION_MNIST", tmp_path / "absent")
    monkeypatch.setattr(train_data, "import_torchvision", offline)
    monkeypatch.chdir(tmp_path)
    assert train.main([*QUICK, "--data", name, "--data-root", str(tmp_path)]) == 2
    assert remedy in capsys.readouterr().err


def test_damaged_data_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _fashion_folder(tmp_path) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    options = ["--data", "fashion-mnist", "--data-root", str(tmp_path)]
    assert train.main([*QUICK, *options]) == 2
    assert f"{path} is damaged" in capsys.readouterr().err


def test_too_few_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([*QUICK, "--batch-size", "512", "--accumulate", "4"]) == 2
    assert "needs 2048 training images, digits has 1500" in capsys.readouterr().err
