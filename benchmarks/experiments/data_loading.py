"""Workers of a DataLoader and pinned memory: how many workers, and does pinned memory help?

Each access decodes a JPEG of smooth noise in memory, or a tensor of bytes where PIL is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import multiprocessing
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as T
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.experiments.experiment import Row, Settings, Timed, timed
from fusedtrain.advisor.bench.clock import Call

SOURCES, CLASSES = 32, 10  # different images, labels
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
READY = "images in memory"
SHARED_MEMORY = Path("/dev/shm")
PAGEABLE, PINNED = "copy to the GPU, pageable", "copy to the GPU, pinned"

Batch = tuple[Tensor, Tensor]


class Size(NamedTuple):
    batch: int
    batches: int
    stored: int  # pixels of a stored image
    pixels: int  # of one that is trained on
    channels: int


QUICK = Size(4, 2, 48, 24, 4)


class Images(Dataset[Batch]):
    """JPEG files in memory where ``jpeg``, otherwise tensors of bytes."""

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
        return ((image.float() / 255 - self._mean) / self._std).contiguous(), self._labels[index]


def encode(image: Tensor) -> bytes:
    """JPEG."""
    file = io.BytesIO()
    pil = importlib.import_module("PIL.Image")
    pil.fromarray(image.permute(1, 2, 0).contiguous().numpy()).save(file, "JPEG", quality=90)
    return file.getvalue()


def decode(file: bytes, box: tuple[int, int, int, int], pixels: int) -> Tensor:
    """A crop of a JPEG, resized."""
    pil = importlib.import_module("PIL.Image")
    image = pil.open(io.BytesIO(file)).resize((pixels, pixels), pil.Resampling.BILINEAR, box=box)
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(pixels, pixels, 3).permute(2, 0, 1)


def _network(channels: int) -> nn.Sequential:
    """A network that trains about as fast as one process loads."""
    parts: list[nn.Module] = []
    for inputs, outputs in ((3, channels), (channels, 2 * channels), (2 * channels, 4 * channels)):
        conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        parts += [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, CLASSES))
    return nn.Sequential(*parts, *head)


def _loader_of(images: Images, size: Size, workers: int, pinned: bool) -> DataLoader[Batch]:
    """Workers live on between epochs."""
    methods = multiprocessing.get_all_start_methods()
    fork = "fork" if "fork" in methods else None  # others import torch in each worker: seconds
    lives: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": fork}
    more = {"num_workers": workers, **lives} if workers else {}
    return DataLoader(images, size.batch, shuffle=True, pin_memory=pinned, **more)


def fits(size: Size, workers: int) -> bool:
    """Whether the batches that a loader has under way fit into shared memory, with half as much
    to spare. A worker that finds shared memory full dies by a bus error."""
    if not workers or not SHARED_MEMORY.is_dir():
        return True
    batch = size.batch * 3 * size.pixels**2 * 4
    return 1.5 * (2 * workers + 2) * batch < shutil.disk_usage(SHARED_MEMORY).free


def _epoch_of(loader: Iterable[Any], model: nn.Module, settings: Settings) -> Callable[[], None]:
    """Forward, backward and SGD for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def epoch() -> None:
        for batch in loader:
            images, labels = (t.to(settings.device, non_blocking=True) for t in batch)
            optimizer.zero_grad()
            T.cross_entropy(model(images), labels).backward()
            optimizer.step()

    return epoch


def _times(
    images: Images, size: Size, choices: dict[str, tuple[int, bool]], settings: Settings
) -> Timed:
    """Times of an epoch, by the label of the run. The workers end with the loaders, on return."""
    model = _network(size.channels).to(settings.device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more than cores
        loaders = {
            label: _loader_of(images, size, *choice)
            for label, choice in choices.items()
            if fits(size, choice[0])
        }
        batches = [tuple(t.to(settings.device) for t in batch) for batch in loaders["0 workers"]]
        calls: dict[str, Call] = {
            label: _epoch_of(loader, model, settings) for label, loader in loaders.items()
        }
        calls[READY] = _epoch_of(batches, model, settings)
        return timed(calls, settings, 20, 20.0)


def rows(settings: Settings) -> Iterator[Row]:
    torch.manual_seed(settings.seed)
    size = settings.pick(QUICK, Size(16, 20, 256, 96, 16), Size(32, 12, 256, 128, 64))
    images = Images(size, settings.seed, importlib.util.find_spec("PIL") is not None)
    choices = {
        f"{workers} worker{'s' * (workers != 1)}{', pinned' * pinned}": (workers, pinned)
        for workers in settings.pick((0, 1), (0, 1, 2, 4, 8), (0, 1, 2, 4, 8))
        for pinned in ((False, True) if settings.device == "cuda" else (False,))
    }  # on the CPU torch pins nothing
    times = _times(images, size, choices, settings)
    for label in (*choices, READY):
        if label not in times.samples:
            yield Row(label, {}, "left out: shared memory is too small for its batches")
            continue
        gain = times.over("0 workers", label)
        yield Row(label, {"images/s": len(images) / times.seconds(label), **gain})
    if settings.device == "cuda":
        yield from _copies(settings)


def _copies(settings: Settings) -> Iterator[Row]:
    """The copy alone: the loop hides it where the GPU waits for images."""
    source = torch.zeros(2**16 if settings.quick else 2**24)
    target = torch.empty_like(source, device=settings.device)
    pinned = source.pin_memory()
    calls: dict[str, Call] = {
        PAGEABLE: lambda: target.copy_(source),
        PINNED: lambda: target.copy_(pinned, non_blocking=True),
    }
    times = timed(calls, settings, 30, 2.0, 2e7)
    for label in calls:
        speed = source.nbytes / times.seconds(label) / 1e9
        yield Row(label, {"GB/s": speed, **times.over(PAGEABLE, label)})
