"""Real images, for experiments in which accuracy counts: Debian's Fashion-MNIST, or digits."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist


class RealImages(NamedTuple):
    """Images (N, 3, size, size), float32, of mean 0 and deviation 1; labels (N,), int64; images and
    labels of the same kind that nobody trains with."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


def real_images(size: int, most: int, device: str, *, digits: bool = False) -> RealImages:
    """Fashion-MNIST where Debian's package is installed, otherwise scikit-learn's digits.

    Args:
        size: pixels of a side; the 28 or 8 pixels of the data sets are interpolated.
        most: at most so many images for training, and at most so many for the test.
        device: where the tensors are.
        digits: digits in any case.
    """
    if DEBIAN.is_dir() and not digits:
        train, test = (
            _read(f"{part}-images-idx3", 16).view(-1, 28, 28) for part in ("train", "t10k")
        )
        labels, test_labels = (_read(f"{part}-labels-idx1", 8) for part in ("train", "t10k"))
    else:
        from sklearn.datasets import load_digits

        data = load_digits()
        # The file is ordered by writer: the last sixth was written by other people than the rest.
        train, test = torch.from_numpy(data.images).split([1500, len(data.images) - 1500])
        labels, test_labels = torch.from_numpy(data.target).split([len(train), len(test)])
    images, test_images = (
        F.interpolate(part[:most, None].float(), size=(size, size), mode="bilinear")
        for part in (train, test)
    )
    deviation, mean = torch.std_mean(images)
    images, test_images = (
        ((part - mean) / deviation).repeat(1, 3, 1, 1) for part in (images, test_images)
    )
    parts = (images, labels[:most].long(), test_images, test_labels[:most].long())
    return RealImages(*(part.to(device) for part in parts))


def _read(name: str, header: int) -> Tensor:
    """The bytes of a file behind its header."""
    data = gzip.decompress((DEBIAN / f"{name}-ubyte.gz").read_bytes())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header)
