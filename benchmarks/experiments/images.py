"""Real images, for experiments in which accuracy counts: Debian's Fashion-MNIST, or digits."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
MOST = 10_000  # of 60,000: 123 MB of 32 pixels


class NoImages(RuntimeError):
    """A data set is missing or damaged; the message says what to do."""


@dataclass(frozen=True)
class RealImages:
    """Images for training and for the test.

    Args:
        name: of the data set.
        images: (N, 3, size, size), float32, of mean 0 and deviation 1, contiguous.
        labels: (N,), int64.
        test_images: images that nobody trains with, of the same kind.
        test_labels: (M,), int64.
    """

    name: str
    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def to(self, device: str) -> RealImages:
        """The same on the device."""
        tensors = (self.images, self.labels, self.test_images, self.test_labels)
        return RealImages(self.name, *(t.to(device) for t in tensors))


def real_images(size: int, most: int = MOST, folder: Path = DEBIAN) -> RealImages:
    """Fashion-MNIST where Debian's package is installed, otherwise scikit-learn's digits.

    Args:
        size: pixels of a side; the 28 or 8 pixels of the data sets are interpolated.
        most: at most so many images for training, and at most so many for the test.
        folder: of the four files ``*-ubyte.gz``.

    Raises:
        NoImages: scikit-learn is missing, too; or a file is missing or damaged.
    """
    if not folder.is_dir():
        return digit_images(size, most)
    train, test = _idx_split(folder, "train", most), _idx_split(folder, "t10k", most)
    return _normalised("Fashion-MNIST", size, train, test)


def digit_images(size: int, most: int = MOST) -> RealImages:
    """scikit-learn's digits: 1,500 for training, 297 of other writers for the test.

    Raises:
        NoImages: scikit-learn is missing.
    """
    return _normalised("scikit-learn's digits", size, *_digits(most))


def _normalised(
    name: str, size: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> RealImages:
    pixels, test_pixels = (_resized(part[0], size) for part in (train, test))
    deviation, mean = torch.std_mean(pixels)
    return RealImages(
        name,
        ((pixels - mean) / deviation).repeat(1, 3, 1, 1),
        train[1],
        ((test_pixels - mean) / deviation).repeat(1, 3, 1, 1),
        test[1],
    )


def _resized(pixels: Tensor, size: int) -> Tensor:
    if pixels.shape[-1] == size:
        return pixels
    return F.interpolate(pixels, size=(size, size), mode="bilinear")


def _digits(most: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise NoImages(
            "there are no images: apt install dataset-fashion-mnist, or pip install scikit-learn"
        ) from error
    digits = load_digits()
    pixels = torch.from_numpy(digits.images).float()[:, None]
    labels = torch.from_numpy(digits.target).long()
    # The file is ordered by writer: the last sixth was written by other people than the rest.
    train = pixels[:1500][:most], labels[:1500][:most]
    return train, (pixels[1500:][:most], labels[1500:][:most])


def _idx_split(folder: Path, prefix: str, most: int) -> tuple[Tensor, Tensor]:
    pixels = _read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")[:most]
    labels = _read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")[:most]
    return pixels[:, None].float(), labels.long()


def _read_idx(path: Path) -> Tensor:
    """Format: 0, 0, type of the numbers, number of dimensions; sizes (big endian); bytes."""
    try:
        data = gzip.decompress(path.read_bytes())
        dimensions = data[3]
        sizes = np.frombuffer(data, ">u4", dimensions, offset=4).astype(np.int64)
        values = np.frombuffer(data, np.uint8, math.prod(sizes), offset=4 + 4 * dimensions)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise NoImages(f"{path}: {error}. apt install dataset-fashion-mnist") from error
    return torch.from_numpy(values.reshape(sizes).copy())
