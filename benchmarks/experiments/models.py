"""Networks of the experiments, their images, random or real, and the groups of their parameters."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.experiments.experiment import Settings
from benchmarks.harness.networks import import_module


def random_batch(
    settings: Settings, batch: int, pixels: int, more_seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Images and labels of 10 classes: time and memory do not depend on what the images show."""
    generator = torch.Generator().manual_seed(settings.seed + more_seed)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    return images.to(settings.device), labels.to(settings.device)


def decayed_groups(params: Iterable[Tensor], decay: float) -> list[dict[str, Any]]:
    """Norms and biases without weight decay, as in the papers on LARS and LAMB."""
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    for param in params:
        parts[param.ndim <= 1].append(param)
    return [{"params": part, "weight_decay": d} for part, d in zip(parts, (decay, 0.0))]


def cifar_resnet(name: str, classes: int = 10, width: int = 64) -> nn.Module:
    """A ResNet whose first convolution is 3 x 3 without stride, and without the first pooling.
    Published is a first stage of 64 channels."""
    resnet = import_module("torchvision.models.resnet")
    blocks: dict[str, tuple[Any, list[int]]] = {
        "resnet18": (resnet.BasicBlock, [2, 2, 2, 2]),
        "resnet50": (resnet.Bottleneck, [3, 4, 6, 3]),
    }
    block, depths = blocks[name]

    class CifarResNet(resnet.ResNet):  # type: ignore[name-defined]
        def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Module:
            if planes == 64:
                self.inplanes = width  # the first stage follows the stem
            return super()._make_layer(block, planes * width // 64, *args, **kwargs)

    model: Any = CifarResNet(block, depths, num_classes=classes)
    model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.bn1 = nn.BatchNorm2d(width)
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(model.inplanes, classes)
    network: nn.Module = model
    return network


class Block(nn.Module):
    """Two convolutions with batch norm, and the sum with the input."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


def small_resnet(settings: Settings, width: int, depth: int = 1, classes: int = 10) -> nn.Module:
    """A ResNet of ``6 depth + 2`` layers for 16 to 32 pixels (He et al. 2015, arXiv:1512.03385,
    section 4.2), the first of ``width`` channels, on the device of the settings."""
    torch.manual_seed(settings.seed)
    stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(3):
        for number in range(depth):
            outputs = width << stage
            layers.append(Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    model: nn.Module = nn.Sequential(*layers, *head).to(settings.device)
    return model


class SmallViT(nn.Module):
    """A small vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) for images of ``size``
    pixels: blocks with the norm first, the mean of the tokens in the place of a class token."""

    def __init__(self, size: int, patch: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        sizes: tuple[Any, ...] = (width, 4, 2 * width, 0.0, "gelu", 1e-5, True, True)
        blocks = [nn.TransformerEncoderLayer(*sizes) for _ in range(depth)]
        self.rest = nn.Sequential(*blocks, nn.LayerNorm(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        y: Tensor = self.head(self.rest(tokens).mean(1))
        return y


def gradient_of(model: nn.Module) -> Tensor:
    """All gradients in one row."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# --- real images, for experiments in which accuracy counts ---

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
