"""examples/train.py on every kind of data."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.train_runs import QUICK, failed, run, train, train_data

Image = pytest.importorskip("PIL.Image")


@pytest.mark.slow
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
    status, results = run(tmp_path / "out", "--data", data, "--amp", "off", "--steps", "2")
    assert status == 0, failed(results)
    loaded = train_data.load_data(data, tmp_path, seed=0)
    assert (len(loaded.train), len(loaded.test)) == ((40, 40) if layout == "split" else (32, 8))
    images, labels = loaded.train.__getitems__([0, 31])
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [0, 1]
    assert images[0].mean() < 0 < images[1].mean()


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
    options = ("--data", "fashion-mnist", "--data-root", root, "--amp", "off", "--steps", "2")
    status, results = run(tmp_path, *options)
    assert status == 0, failed(results)


@pytest.mark.skipif(
    not train_data.DEBIAN_FASHION_MNIST.is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_fashion_mnist_of_debian(tmp_path: Path) -> None:
    options = ("--data", "fashion-mnist", "--data-root", str(tmp_path), "--steps", "60")
    options += ("--amp", "off")
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
    one_by_one = torch.stack([images[index][0] for index in (5, 6, 7, 8)])
    assert torch.equal(together, one_by_one)
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
