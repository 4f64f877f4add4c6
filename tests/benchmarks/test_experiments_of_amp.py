"""Experiments on half precision: verdicts on made-up runs, and the parts that measure."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.experiments import amp_autotune, amp_kernels, fp16_resnet
from benchmarks.experiments.experiment import Run, Settings
from benchmarks.experiments.images import NoImages, real_images
from benchmarks.experiments.training import Job, autocast, full, fused_masters, masters
from benchmarks.experiments.workers import Handlers, Worker, WorkerFailed
from helpers.experiments import CPU, CUDA, QUICK

FASTER, EQUAL, SLOWER = (1.5, 1.4, 1.6), (1.0, 0.9, 1.1), (0.5, 0.4, 0.6)


def run(label: str, gain: tuple[float, float, float] = EQUAL, **numbers: float) -> Run:
    least = dict(zip(("gain", "least", "most"), gain, strict=True))
    return Run(label, {"total": 10.0, "ms": 1.0, **least, **numbers})


def table(*runs: Run) -> Mapping[str, Run]:
    return {each.label: each for each in runs}


# --- AMP and the autotuner ---


def autotune(
    settings: Settings, amp: Run | None = None, tuned: Run | None = None
) -> list[bool | None]:
    runs = table(
        run("float32", mb=100),
        tuned or run("float32 + autotune", FASTER, mb=120),
        amp or run("AMP", mb=60),
        run("AMP + autotune", FASTER, mb=80),
    )
    verdicts = amp_autotune.judge(runs, settings)
    assert all(verdict.words.endswith(".") for verdict in verdicts)
    return [verdict.holds for verdict in verdicts]


def test_verdicts_on_the_autotuner() -> None:
    assert autotune(CUDA) == [True, True, True]
    assert autotune(CPU) == [True, None, True]
    assert autotune(CUDA, amp=run("AMP", FASTER, mb=110)) == [False, True, False]
    assert autotune(CUDA, amp=run("AMP", SLOWER, mb=60)) == [True, True, True]
    name = "float32 + autotune"
    assert autotune(CUDA, tuned=run(name, FASTER, mb=100))[1] is False
    assert autotune(CUDA, tuned=run(name, EQUAL, mb=120))[1] is False
    assert autotune(CUDA, tuned=run(name, SLOWER, mb=100))[1] is False
    assert autotune(CUDA, tuned=run(name, EQUAL, mb=100))[1] is None


# --- half precision with masters ---


@pytest.mark.parametrize(
    ("gain", "mb", "holds"),
    [(FASTER, 50, True), (SLOWER, 50, False), (FASTER, 150, False), (EQUAL, 50, None)],
)
def test_verdicts_on_half_precision(
    gain: tuple[float, float, float], mb: float, holds: bool | None
) -> None:
    for number, network in enumerate(fp16_resnet.NETWORKS.values()):
        runs = table(run(f"{network}, float32", mb=100), run(f"{network}, half", gain, mb=mb))
        verdicts = fp16_resnet.judge(runs, CUDA)
        assert verdicts[number].holds is holds
        assert verdicts[1 - number].holds is None
        if holds is not None:
            assert f"{gain[0]:.2f}x" in verdicts[number].words
            assert f"{mb / 100:.2f}x the memory" in verdicts[number].words


# --- kernels under autocast ---


def kernels(half: float = 100, moves: float = 20, lost: float = 0.0) -> list[bool | None]:
    runs = [run("float32", half=0, moves=10)]
    for label in [*amp_kernels.MAKERS][1:]:
        runs.append(run(label, half=half, moves=moves, lost=lost))
    runs.append(run(amp_kernels.UNSCALED, lost=5.0))
    return [verdict.holds for verdict in amp_kernels.judge(table(*runs), CPU)]


def test_verdicts_on_kernels() -> None:
    assert kernels() == [True, True, True]
    assert kernels(half=90) == [False, True, True]
    assert kernels(moves=10.5) == [True, False, True]
    assert kernels(lost=1.0) == [True, True, False]
    assert kernels(lost=float("nan")) == [True, True, False]


def test_products_are_counted_by_their_dtype() -> None:
    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    matrix = torch.randn(4, 4, requires_grad=True)
    images = torch.randn(2, 3, 8, 8)

    def step() -> None:
        means = torch.nn.functional.conv2d(images, weight).relu().mean((2, 3))
        (means.float() @ matrix).sum().backward()

    with amp_kernels.Products() as products:
        step()
    assert products.half == 0
    assert products.dtypes == {torch.float32: 5}  # forward 2, backward 1 + 2
    with amp_kernels.Products() as products, torch.autocast("cpu", torch.bfloat16):
        step()
    assert products.half == 100
    assert products.dtypes == {torch.bfloat16: 5}


def test_a_gradient_that_is_lost() -> None:
    exact = torch.tensor([1.0, 2.0, 0.0, -1.0])
    assert amp_kernels._lost(exact, exact) == 0
    assert amp_kernels._lost(torch.tensor([1.0, 0.0, 0.0, 0.0]), exact) == pytest.approx(200 / 3)
    assert amp_kernels._lost(torch.tensor([1.0, torch.inf, 0.0, 0.0]), exact) != 0


# --- what is trained ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [masters, fused_masters, autocast(torch.bfloat16, scaled=False),
     autocast(torch.bfloat16, scaled=True, fused=True)],
)  # fmt: skip
def test_all_train_the_same_network(make: object) -> None:
    """The losses of three steps are those of float32 to within 16 bits."""
    job = Job("resnet18", 8, 4)  # oneDNN 3 of torch 2.13 corrupts memory below 8
    images, labels = job.data(QUICK)

    def losses(maker: object) -> Tensor:
        step = maker(job.model(QUICK), QUICK)  # type: ignore[operator]
        return torch.stack([step(images, labels) for _ in range(3)]).float()

    expected = losses(full)
    assert expected[2] < expected[0]
    assert (losses(make) - expected).abs().max() < 0.1
    assert (losses(make)[2] - losses(make)[0]) < 0


def build(number: int) -> Handlers:
    def fail() -> None:
        raise ValueError(f"not {number}")

    return {"pid": os.getpid, "number": lambda: number, "fail": fail}


def test_a_worker_answers_and_fails() -> None:
    with Worker(build, 7) as worker:
        assert worker.ask("number") == 7
        assert worker.ask("pid") != os.getpid()
        with pytest.raises(WorkerFailed, match="ValueError: not 7"):
            worker.ask("fail")
        with pytest.raises(WorkerFailed, match="a worker ended"):
            worker.ask("number")
    with Worker(build, 7) as worker, pytest.raises(WorkerFailed, match="silent for 0 s"):
        worker.ask("number", patience=0.0)


def test_a_worker_that_dies() -> None:
    with Worker(os._exit, 3) as worker, pytest.raises(WorkerFailed, match="exit 3"):
        worker.ask("number")


# --- images ---


def idx(path: Path, values: np.ndarray) -> None:
    sizes = np.array(values.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()))


def test_images_of_debians_package(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for prefix, count in (("train", 12), ("t10k", 5)):
        pixels = generator.integers(0, 256, (count, 28, 28), np.uint8)
        idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", pixels)
        idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8) % 3)
    images = real_images(28, most=10, folder=tmp_path)
    assert (images.name, images.classes) == ("Fashion-MNIST", 3)
    assert images.images.shape == (10, 3, 28, 28)
    assert images.test_images.shape == (5, 3, 28, 28)
    assert images.labels.tolist() == [0, 1, 2] * 3 + [0]
    assert images.images.is_contiguous()
    assert torch.std_mean(images.images[:, :1])[0] == pytest.approx(1, abs=1e-5)
    scale = 1 / np.asarray(pixels[:5], np.float64).std()  # the test has the scale of training
    step = images.test_images[0, 0, 0, 0] - images.test_images[0, 0, 0, 1]
    difference = float(pixels[0, 0, 0]) - float(pixels[0, 0, 1])
    assert float(step) == pytest.approx(difference * scale, rel=0.1)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"broken")
    with pytest.raises(NoImages, match="t10k-labels"):
        real_images(28, folder=tmp_path)


def test_digits_where_the_package_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    images = real_images(16, folder=tmp_path / "none")
    assert images.name == "scikit-learn's digits"
    assert images.images.shape == (1500, 3, 16, 16)
    assert images.test_images.shape == (297, 3, 16, 16)
    assert (images.labels.dtype, images.classes) == (torch.int64, 10)
    assert float(images.images.mean()) == pytest.approx(0, abs=1e-4)
    # The nearest mean image tells most digits: the labels belong to the images.
    pixels, test = (part[:, 0].flatten(1) for part in (images.images, images.test_images))
    means = torch.stack([pixels[images.labels == digit].mean(0) for digit in range(10)])
    nearest = torch.cdist(test, means).argmin(1)
    assert float((nearest == images.test_labels).float().mean()) > 0.8
