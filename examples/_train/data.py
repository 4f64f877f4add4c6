"""Real images as uint8 tensors, with augmentation that depends on (seed, epoch, image) only."""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from _train.models import import_torchvision

# Where Debian's package dataset-fashion-mnist installs.
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


class DataError(Exception):
    """A data set is missing or unusable; the message names the remedy."""


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images (N, C, H, W), uint8, handed out in normalised float batches of 3 channels."""

    def __init__(self, pixels: Tensor, labels: Tensor):
        self.pixels = pixels
        self.labels = labels
        self.seed: int | None = None  # of augmentation
        self.mean = torch.zeros(3, 1, 1)
        self.std = torch.ones(3, 1, 1)

    def __len__(self) -> int:
        return len(self.labels)

    def keep(self, count: int) -> None:
        """Use only the first ``count`` images."""
        self.pixels, self.labels = self.pixels[:count], self.labels[:count]

    def augment_from(self, seed: int) -> None:
        """Crop and flip from now on."""
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the crops and flips of all images: batch size and workers cannot change them."""
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            self.shift = torch.rand(len(self), 2, generator=generator)
            self.flip = torch.rand(len(self), generator=generator) < 0.5

    def load(self, indices: Tensor) -> Tensor:
        return self.pixels[indices]

    def normalise(self, like: Images | None = None) -> None:
        """Take mean and deviation from up to 2,000 of these images, or from another set."""
        if like is not None:
            self.mean, self.std = like.mean, like.std
            return
        sample = self.load(torch.arange(0, len(self), max(1, len(self) // 2000)))
        sample = sample.float().div_(255).expand(-1, 3, -1, -1)
        self.mean = sample.mean((0, 2, 3)).view(3, 1, 1)
        self.std = sample.std((0, 2, 3)).view(3, 1, 1).clamp_min(1e-3)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        images = self.load(chosen)
        if self.seed is not None:
            images = _crop_and_flip(images, self.shift[chosen], self.flip[chosen])
        images = images.float().div_(255).expand(-1, 3, -1, -1)
        return (images - self.mean) / self.std, self.labels[chosen]


class ImageFiles(Images):
    """Image files, decoded when a batch asks for them."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], size: int):
        self.files = list(files)
        self.size = size
        super().__init__(torch.empty(0), torch.tensor(labels))

    def load(self, indices: Tensor) -> Tensor:
        from PIL import Image

        batch = []
        for index in indices.tolist():
            try:
                with Image.open(self.files[index]) as image:
                    resized = image.convert("RGB").resize((self.size, self.size))
            except OSError as error:
                raise DataError(
                    f"{self.files[index]} cannot be read as an image: {error}"
                ) from error
            batch.append(torch.from_numpy(np.array(resized)))
        return torch.stack(batch).permute(0, 3, 1, 2)


def _crop_and_flip(images: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Pad by an eighth, cut out the original size at a random place, mirror half of them."""
    count, channels, height, width = images.shape
    pad = height // 8
    padded = F.pad(images, [pad] * 4)
    start = (shift * (2 * pad + 1)).long()
    rows = start[:, 0, None] + torch.arange(height)
    columns = start[:, 1, None] + torch.arange(width)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    image = torch.arange(count).view(-1, 1, 1, 1)
    channel = torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass
class Data:
    name: str
    train: Images
    test: Images
    classes: int


def load_data(name: str, root: Path, seed: int, image_size: int = 32) -> Data:
    """``digits``, ``fashion-mnist``, ``cifar10`` or ``folder:PATH``; raises DataError.

    ``image_size`` is of digits, which are of 8 pixels, and of folders.
    """
    if name == "digits":
        train, test = _digits(image_size)
    elif name == "fashion-mnist":
        train, test = _fashion_mnist(root)
    elif name == "cifar10":
        train, test = _cifar10(root)
    elif name.startswith("folder:"):
        train, test = _folder(Path(name.removeprefix("folder:")), image_size)
    else:
        raise DataError(f"unknown data set {name!r}")
    if name in ("fashion-mnist", "cifar10"):
        train.augment_from(seed)
    train.normalise()
    test.normalise(like=train)
    return Data(name, train, test, int(train.labels.max()) + 1)


def _digits(size: int) -> tuple[Images, Images]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("--data digits needs scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    small = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    pixels = F.interpolate(small, size=(size, size), mode="bilinear").round().byte()
    labels = torch.from_numpy(digits.target).long()
    # The file is ordered by writer: its last sixth comes from other people than the rest.
    return Images(pixels[:1500], labels[:1500]), Images(pixels[1500:], labels[1500:])


def _fashion_mnist(root: Path) -> tuple[Images, Images]:
    places = (root, root / "FashionMNIST" / "raw", DEBIAN_FASHION_MNIST)
    for place in places:
        if _idx_file(place, "train-images-idx3-ubyte"):
            return _idx_split(place, "train"), _idx_split(place, "t10k")
    try:
        import_torchvision().datasets.FashionMNIST(str(root), download=True)
    except Exception as error:  # any of urllib's, ssl's or torchvision's own
        raise DataError(
            "fashion-mnist was found nowhere and its download failed "
            f"({error}). Remedy: `apt install dataset-fashion-mnist`, or put the four "
            "*-ubyte.gz files into a folder and name it with --data-root"
        ) from error
    raw = root / "FashionMNIST" / "raw"
    return _idx_split(raw, "train"), _idx_split(raw, "t10k")


def _idx_file(folder: Path, stem: str) -> Path | None:
    return next((f for f in (folder / f"{stem}.gz", folder / stem) if f.is_file()), None)


def _idx_split(folder: Path, prefix: str) -> Images:
    pixels = _read_idx(folder, f"{prefix}-images-idx3-ubyte")
    labels = _read_idx(folder, f"{prefix}-labels-idx1-ubyte")
    return Images(pixels[:, None], labels.long())


def _read_idx(folder: Path, stem: str) -> Tensor:
    path = _idx_file(folder, stem)
    if path is None:
        raise DataError(f"{folder} lacks {stem}.gz: the data set has four files, all are needed")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        dimensions = raw[3]
        shape = np.frombuffer(raw, ">u4", dimensions, offset=4).astype(np.int64)
        values = np.frombuffer(raw, np.uint8, math.prod(shape), offset=4 + 4 * dimensions)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{path} is damaged ({error}): fetch it again") from error
    return torch.from_numpy(values.reshape(shape).copy())


def _cifar10(root: Path) -> tuple[Images, Images]:
    try:
        datasets = import_torchvision().datasets
        splits = [datasets.CIFAR10(str(root), train=t, download=True) for t in (True, False)]
    except Exception as error:  # any of urllib's, ssl's or torchvision's own
        raise DataError(
            f"cifar10 is not under {root} and its download failed ({error}). Remedy: fetch "
            "cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html into a "
            "folder and name it with --data-root"
        ) from error
    pairs = [
        (torch.from_numpy(s.data).permute(0, 3, 1, 2), torch.tensor(s.targets)) for s in splits
    ]
    return Images(*pairs[0]), Images(*pairs[1])


def _folder(root: Path, size: int) -> tuple[Images, Images]:
    """``root/train/CLASS/*`` and ``root/test/CLASS/*`` (or val), or ``root/CLASS/*``."""
    if not root.is_dir():
        raise DataError(f"--data folder:{root}: there is no such folder")
    train = root / "train"
    test = next((root / n for n in ("test", "val") if (root / n).is_dir()), None)
    if train.is_dir() and test is not None:
        classes = _subfolders(train)
        return _image_files(train, classes, size), _image_files(test, classes, size)
    everything = _image_files(root, _subfolders(root), size)
    held_out = torch.arange(len(everything)) % 5 == 4  # every fifth file is for the test
    parts = []
    for mask in (~held_out, held_out):
        chosen = mask.nonzero().flatten().tolist()
        files = [everything.files[i] for i in chosen]
        parts.append(ImageFiles(files, everything.labels[chosen].tolist(), size))
    if len(parts[1]) == 0:
        raise DataError(f"{root} holds {len(everything)} images; at least 5 are needed")
    return parts[0], parts[1]


def _subfolders(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _image_files(root: Path, classes: list[str], size: int) -> ImageFiles:
    labelled = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).rglob("*"))
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]
    if not labelled:
        raise DataError(f"{root} holds no images: expected one subfolder of pictures per class")
    return ImageFiles([path for path, _ in labelled], [label for _, label in labelled], size)
