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


class NoImages(RuntimeError):
    """A data set is missing or damaged; the message says what to do."""


@dataclass(frozen=True)
class RealImages:
    """Images (N, 3, size, size), float32, of mean 0 and deviation 1; labels (N,), int64; images and
    labels of the same kind that nobody trains with."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def to(self, device: str) -> RealImages:
        """The same on the device."""
        return RealImages(*(tensor.to(device) for tensor in vars(self).values()))


def real_images(size: int, most: int) -> RealImages:
    """Fashion-MNIST where Debian's package is installed, otherwise scikit-learn's digits.

    Args:
        size: pixels of a side; the 28 or 8 pixels of the data sets are interpolated.
        most: at most so many images for training, and at most so many for the test.

    Raises:
        NoImages: scikit-learn is missing, too; or a file is missing or damaged.
    """
    if not DEBIAN.is_dir():
        return digit_images(size, most)
    train, train_labels, test, test_labels = (
        _read_idx(DEBIAN / f"{part}-{kind}-ubyte.gz")[:most]
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )
    return _normalised(size, train, train_labels, test, test_labels)


def digit_images(size: int, most: int) -> RealImages:
    """scikit-learn's digits: 1,500 for training, 297 of other writers for the test.

    Raises:
        NoImages: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise NoImages(
            "there are no images: apt install dataset-fashion-mnist, or pip install scikit-learn"
        ) from error
    digits = load_digits()
    pixels, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.target)
    # The file is ordered by writer: the last sixth was written by other people than the rest.
    train, test = slice(0, min(most, 1500)), slice(1500, 1500 + most)
    return _normalised(size, pixels[train], labels[train], pixels[test], labels[test])


def _normalised(
    size: int, train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor
) -> RealImages:
    images, test_images = (_resized(part.float()[:, None], size) for part in (train, test))
    deviation, mean = torch.std_mean(images)
    images, test_images = (
        ((part - mean) / deviation).repeat(1, 3, 1, 1) for part in (images, test_images)
    )
    return RealImages(images, labels.long(), test_images, test_labels.long())


def _resized(pixels: Tensor, size: int) -> Tensor:
    if pixels.shape[-1] == size:
        return pixels
    return F.interpolate(pixels, size=(size, size), mode="bilinear")


def _read_idx(path: Path) -> Tensor:
    """Format: 0, 0, type of the numbers, number of dimensions; sizes (big endian); bytes."""
    try:
        data = gzip.decompress(path.read_bytes())
        sizes = np.frombuffer(data, ">u4", data[3], offset=4).astype(np.int64)
        values = np.frombuffer(data, np.uint8, math.prod(sizes), offset=4 + 4 * data[3])
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise NoImages(f"{path}: {error}. apt install dataset-fashion-mnist") from error
    return torch.from_numpy(values.reshape(sizes).copy())
