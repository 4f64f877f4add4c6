"""Workers of a DataLoader and pinned memory: images per second of a training loop."""

from __future__ import annotations

import importlib
import importlib.util
import io
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as T
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.experiments.gains import COLUMNS, Gain, gain_of, is_faster, judge, numbers_of
from benchmarks.experiments.measure import Timed, gain_text, timed
from fusedtrain.advisor.bench.clock import Call, Effort

WORKERS = (0, 1, 2, 4, 8)
QUICK_WORKERS = (0, 1)
EFFORT = Effort(min_rounds=8, max_rounds=20, seconds=20.0, sample_ns=0.0)
COPIES = Effort(min_rounds=8, max_rounds=30, seconds=2.0, sample_ns=2e7)
COPIED = 2**24  # float32 elements
SOURCES, CLASSES = 32, 10  # different images, labels
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
READY = "images in memory"
SHARED_MEMORY = Path("/dev/shm")
PAGEABLE, PINNED = "copy to the GPU, pageable", "copy to the GPU, pinned"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """Sizes of an epoch, with the pixels of the stored images and of those that are trained on."""

    batch: int
    batches: int
    stored: int
    pixels: int
    channels: int


SIZES = {"cpu": Size(16, 20, 256, 96, 16), "cuda": Size(32, 12, 256, 128, 64)}
QUICK = Size(4, 2, 48, 24, 4)


def size_of(settings: Settings) -> Size:
    return QUICK if settings.quick else SIZES[settings.device]


def has_pil() -> bool:
    return importlib.util.find_spec("PIL") is not None


class Images(Dataset[Batch]):
    """Images of smooth noise, which each access decodes, crops, resizes, flips and normalises.

    JPEG files in memory where PIL is installed, otherwise tensors of bytes.
    """

    def __init__(self, size: Size, seed: int, jpeg: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.rand(SOURCES, 3, size.stored // 16, size.stored // 16, generator=generator)
        smooth = T.interpolate(coarse, size=size.stored, mode="bicubic").clamp(0, 1)
        self._tensors = (smooth * 255).to(torch.uint8)
        self._files = [encode(image) for image in self._tensors] if jpeg else []
        self._labels = torch.randint(CLASSES, (SOURCES,), generator=generator).tolist()
        self._size = size
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return self._size.batch * self._size.batches

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        index %= SOURCES
        stored, pixels = self._size.stored, self._size.pixels
        side = int(torch.randint(stored // 2, stored + 1, ()))
        top, left = (int(torch.randint(stored - side + 1, ())) for _ in range(2))
        if self._files:
            image = decode(self._files[index], (left, top, left + side, top + side), pixels)
        else:
            crop = self._tensors[index, :, top : top + side, left : left + side]
            image = T.interpolate(crop[None], size=pixels, mode="bilinear", antialias=True)[0]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        normal = (image.float() / 255 - self._mean) / self._std
        return normal.contiguous(), self._labels[index]


def encode(image: Tensor) -> bytes:
    """JPEG. No numpy, which torch does not need."""
    pil = importlib.import_module("PIL.Image")
    _, height, width = image.shape
    pixels = bytes(image.permute(1, 2, 0).flatten().tolist())
    file = io.BytesIO()
    pil.frombytes("RGB", (width, height), pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def decode(file: bytes, box: tuple[int, int, int, int], pixels: int) -> Tensor:
    """A crop of a JPEG, resized."""
    pil = importlib.import_module("PIL.Image")
    image = pil.open(io.BytesIO(file)).convert("RGB")
    resized = image.resize((pixels, pixels), pil.Resampling.BILINEAR, box=box)
    flat = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
    return flat.view(pixels, pixels, 3).permute(2, 0, 1)


def network(channels: int) -> nn.Sequential:
    """A network that trains about as fast as one process loads."""
    parts: list[nn.Module] = []
    for inputs, outputs in ((3, channels), (channels, 2 * channels), (2 * channels, 4 * channels)):
        conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        parts += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, CLASSES))
    return nn.Sequential(*parts, *head)


def loader_of(images: Images, size: Size, workers: int, pinned: bool) -> DataLoader[Batch]:
    """Workers live on between epochs."""
    methods = multiprocessing.get_all_start_methods()
    fork = "fork" if "fork" in methods else None  # others import torch in each worker: seconds
    return DataLoader(
        images,
        size.batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=pinned,
        persistent_workers=workers > 0,
        multiprocessing_context=fork if workers else None,
    )


def fits(size: Size, workers: int) -> bool:
    """Whether the batches that a loader has under way fit into shared memory, with half as much
    to spare. A worker that finds shared memory full dies by a bus error.
    """
    if not workers or not SHARED_MEMORY.is_dir():
        return True
    batch = size.batch * 3 * size.pixels**2 * 4
    return 1.5 * (2 * workers + 2) * batch < shutil.disk_usage(SHARED_MEMORY).free


def epoch_of(loader: Iterable[Any], model: nn.Module, settings: Settings) -> Callable[[], None]:
    """Forward, backward and SGD for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    device = settings.device

    def epoch() -> None:
        for images, labels in loader:
            images, labels = (t.to(device, non_blocking=True) for t in (images, labels))
            optimizer.zero_grad()
            T.cross_entropy(model(images), labels).backward()
            optimizer.step()

    return epoch


def label_of(workers: int, pinned: bool) -> str:
    plural = "" if workers == 1 else "s"
    return f"{workers} worker{plural}{', pinned' if pinned else ''}"


def _choices(settings: Settings) -> list[tuple[int, bool]]:
    """Numbers of workers, and whether memory is pinned: on the CPU torch pins nothing."""
    pins = (False, True) if settings.device == "cuda" else (False,)
    workers = QUICK_WORKERS if settings.quick else WORKERS
    return [(number, pinned) for number in workers for pinned in pins]


def _times(images: Images, settings: Settings) -> Timed:
    """Times of an epoch, by the label of the run. The workers end with the loaders, on return."""
    size = size_of(settings)
    model = network(size.channels).to(settings.device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores
        loaders = {
            label_of(*choice): loader_of(images, size, *choice)
            for choice in _choices(settings)
            if fits(size, choice[0])
        }
        batches = [
            tuple(t.to(settings.device) for t in batch) for batch in loaders[label_of(0, False)]
        ]
        calls: dict[str, Call] = {who: epoch_of(of, model, settings) for who, of in loaders.items()}
        return timed({**calls, READY: epoch_of(batches, model, settings)}, settings, EFFORT)


def _runs(settings: Settings) -> Iterator[Run]:
    torch.manual_seed(settings.seed)
    images = Images(size_of(settings), settings.seed, has_pil())
    times = _times(images, settings)
    base = label_of(0, False)
    for who in [*(label_of(*choice) for choice in _choices(settings)), READY]:
        if who not in times.samples:
            yield Run(who, {}, "left out: shared memory is too small for its batches")
            continue
        gain = {} if who == base else numbers_of(times.gain(base, who))
        yield Run(who, {"speed": len(images) / times.seconds(who), **gain})
    if settings.device == "cuda":
        yield from _copies(settings)


def _copies(settings: Settings) -> Iterator[Run]:
    """The copy alone: the loop hides it where the GPU waits for images."""
    source = torch.zeros(COPIED if not settings.quick else 2**16)
    target = torch.empty_like(source, device=settings.device)
    pinned = source.pin_memory()
    calls: dict[str, Call] = {
        PAGEABLE: lambda: target.copy_(source),
        PINNED: lambda: target.copy_(pinned, non_blocking=True),
    }
    times = timed(calls, settings, COPIES)
    for who in calls:
        gain = {} if who == PAGEABLE else numbers_of(times.gain(PAGEABLE, who))
        yield Run(who, {"copy": source.nbytes / times.seconds(who) / 1e9, **gain})


def _judge(runs: Mapping[str, Run], settings: Settings) -> Sequence[Verdict]:
    return [_workers(runs, settings), _pinning(runs, settings)]


def _workers(runs: Mapping[str, Run], settings: Settings) -> Verdict:
    choices = [label_of(workers, False) for workers in WORKERS if workers]
    gains = {who: gain for who in choices if (gain := gain_of(runs, who)) is not None}
    if not gains:
        return Verdict(None, "No loader with workers was measured.")
    words = "; ".join(f"{who}: {gain_text(gain)}" for who, gain in gains.items())
    ready = gain_of(runs, READY)
    if ready is not None:
        words += f"; without any loading it would be {ready[0]:.2f}x"
    answers = {is_faster(gain) for gain in gains.values()}
    slower = [who for who, gain in gains.items() if gain[2] < 1]
    if slower:
        words += f"; slower than none: {', '.join(slower)}"
    if True in answers:
        return Verdict(True, f"{words}.{_competition(gains, settings)}")
    if answers == {False}:
        return Verdict(
            False, f"{words}. Workers and training compete for {os.cpu_count()} cores, and each "
            "batch is copied between processes."
        )  # fmt: skip
    return Verdict(None, f"{words}. No interval is above 1, and not all are below.")


def _competition(gains: Mapping[str, Gain], settings: Settings) -> str:
    best = max(gains, key=lambda who: gains[who][0])
    if settings.device == "cuda":
        return f" {best} do best."
    return (
        f" {best} do best: training and workers share {os.cpu_count()} cores, so what is gained is "
        "what training alone leaves idle."
    )


def _pinning(runs: Mapping[str, Run], settings: Settings) -> Verdict:
    if settings.device == "cpu":
        return Verdict(None, "There is no copy to a GPU, and without a GPU torch pins nothing.")
    gain = gain_of(runs, PINNED)
    words = []
    for workers in WORKERS:
        pair = [
            runs[who].numbers for pin in (False, True) if (who := label_of(workers, pin)) in runs
        ]
        if len(pair) == 2 and all("speed" in numbers for numbers in pair):
            words.append(f"{workers}: {pair[0]['speed']:.0f} and {pair[1]['speed']:.0f}")
    verdict = judge({"the copy alone": gain}, "the driver copies pageable memory as fast")
    loop = f" Images/s of the loop by workers, pageable and pinned: {'; '.join(words)}."
    return Verdict(verdict.holds, verdict.words + loop)


def _setup(settings: Settings) -> str:
    size = size_of(settings)
    what = "JPEG files, decoded by PIL," if has_pil() else "bytes (PIL, which decodes, is missing)"
    return (
        f"{size.batch * size.batches} images of {size.stored} x {size.stored} as {what} cropped, "
        f"resized to {size.pixels} x {size.pixels}, flipped and normalised one by one. Batch "
        f"{size.batch}. A network of 3 convolutions (from {size.channels} channels) trains on them "
        f"in float32. {os.cpu_count()} cores, {torch.get_num_threads()} threads in training. Gains "
        "are over no workers."
    )


GUIDE = "PyTorch performance tuning guide; a GPU, no number"
EXPERIMENT = Experiment(
    name="data_loading",
    title="Workers of the DataLoader, and pinned memory",
    question="How many workers does a loader need, and does pinned memory help?",
    setup=_setup,
    columns={
        "speed": Column("images/s", 0),
        **COLUMNS,
        "copy": Column("GB/s", 1),
    },
    claims=(
        Claim("num_workers > 0 overlaps loading with training.", GUIDE),
        Claim("pin_memory=True makes copies to a GPU faster.", GUIDE),
    ),
    runs=_runs,
    judge=_judge,
)
