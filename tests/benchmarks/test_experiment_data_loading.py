"""The experiment of the DataLoader: its images, which loaders are timed, and its judges."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.experiments import data_loading, gains
from benchmarks.experiments.experiment import Run, Settings
from helpers.experiments import CUDA, FAST, NOISE, QUICK, SLOW, runs_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("jpeg", [True, False], ids=["jpeg", "bytes"])
def test_images(jpeg: bool) -> None:
    if jpeg:
        pytest.importorskip("PIL")
    images = data_loading.Images(data_loading.QUICK, seed=0, jpeg=jpeg)
    assert len(images) == 8
    seen = [images[0] for _ in range(4)]
    assert {(tuple(image.shape), image.dtype) for image, _ in seen} == {
        ((3, 24, 24), torch.float32)
    }
    assert len({label for _, label in seen}) == 1
    assert not torch.equal(seen[0][0], seen[1][0])  # another crop
    (stored,) = {float(images._tensors[0].float().mean()) for _ in range(1)}
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (data_loading.MEAN, data_loading.STD))
    pixels = torch.stack([(image * std + mean) * 255 for image, _ in seen])
    assert abs(float(pixels.mean()) - stored) < 25  # of crops
    assert float(pixels.min()) > -1
    assert float(pixels.max()) < 256


def test_a_decoded_crop() -> None:
    """JPEG and the crop's place: the left half is dark, the right one bright."""
    pytest.importorskip("PIL")
    image = torch.full((3, 32, 32), 40, dtype=torch.uint8)
    image[:, :, 16:] = 200
    file = data_loading.encode(image)
    for left, value in ((0, 40), (16, 200)):
        crop = data_loading.decode(file, (left, 0, left + 16, 16), 8)
        assert crop.shape == (3, 8, 8)
        torch.testing.assert_close(
            crop.float()[:, :, 2:6], torch.full((3, 8, 4), float(value)), rtol=0, atol=6
        )


def test_loaders_where_shared_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose batches would not fit is left out, and says so."""
    monkeypatch.setattr(data_loading, "SHARED_MEMORY", Path(__file__).parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=64_000_000))
    size = data_loading.SIZES["cuda"]
    assert data_loading.fits(size, 0)
    assert not data_loading.fits(size, 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    runs = {run.label: run for run in data_loading.EXPERIMENT.runs(QUICK)}
    assert "shared memory" in runs["1 worker"].note
    assert "speed" in runs["0 workers"].numbers
    assert data_loading.EXPERIMENT.judge(runs, QUICK)[0].holds is None


def test_an_epoch_trains_on_all_batches() -> None:
    seen: list[int] = []
    model = data_loading.network(2)
    model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    images = data_loading.Images(data_loading.QUICK, 0, jpeg=False)
    before = model[0].weight.detach().clone()  # type: ignore[union-attr, operator]
    data_loading.epoch_of(
        data_loading.loader_of(images, data_loading.QUICK, 0, False), model, QUICK
    )()
    assert seen == [4, 4]
    assert not torch.equal(before, model[0].weight)  # type: ignore[arg-type]


def test_judge_of_workers() -> None:
    def holds(one: gains.Gain, two: gains.Gain, settings: Settings) -> bool | None:
        runs = runs_of({"1 worker": one, "2 workers": two, data_loading.READY: FAST})
        return data_loading.EXPERIMENT.judge(runs, settings)[0].holds

    assert holds(SLOW, FAST, QUICK) is True
    assert holds(SLOW, SLOW, QUICK) is False
    assert holds(SLOW, NOISE, QUICK) is None


def test_judge_of_pinned_memory() -> None:
    for gain, holds in ((FAST, True), (SLOW, False), (NOISE, None)):
        runs = runs_of({data_loading.PINNED: gain})
        speeds = {data_loading.label_of(8, pinned): 100.0 + pinned for pinned in (False, True)}
        runs |= {label: Run(label, {"speed": speed}) for label, speed in speeds.items()}
        verdict = data_loading.EXPERIMENT.judge(runs, CUDA)[1]
        assert verdict.holds is holds
        assert "8: 100 and 101" in verdict.words
        assert data_loading.EXPERIMENT.judge(runs, QUICK)[1].holds is None
