"""Data and small networks of the scripts in Apex's calls and today's, and of rounding.py."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

Batch = tuple[Tensor, Tensor]
# Names that torchvision registers fake kernels for while it is imported.
_TORCHVISION_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []


class DataError(Exception):
    """A data set is missing or unusable; the message names the remedy."""


class Data(NamedTuple):
    train: Dataset[Batch]
    test: Dataset[Batch]
    classes: int


def import_torchvision() -> ModuleType:
    """Import torchvision, also beside a torch that cannot load its C++ operators.

    The PyPI wheel's operators need a CUDA torch. Models and data sets do without, but importing
    them fails while the names of two operators are unknown.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    _declared.append(library)  # the names vanish with the object
    for schema in _TORCHVISION_OPS:
        library.define(schema)
    return importlib.import_module("torchvision")


def load_data(name: str, root: Path, image_size: int = 32) -> Data:
    """``digits``, ``cifar10`` or ``folder:PATH``; raises DataError.

    ``image_size`` is of digits, which are of 8 pixels, and of folders.
    """
    if name == "digits":
        return digits(image_size)
    if name == "cifar10":
        return _cifar10(root)
    return _folder(Path(name.removeprefix("folder:")), image_size)


def digits(size: int = 32) -> Data:
    """Images of scikit-learn, enlarged and normalised; those for tests are by other writers."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("--data digits needs scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    small = torch.from_numpy(bunch.images).float()[:, None] * (255 / 16)
    pixels = F.interpolate(small, size=(size, size), mode="bilinear").round() / 255
    pixels = pixels.expand(-1, 3, -1, -1)
    mean = pixels[:1500].mean((0, 2, 3)).view(3, 1, 1)
    images = (pixels - mean) / pixels[:1500].std((0, 2, 3)).view(3, 1, 1)
    labels = torch.from_numpy(bunch.target).long()
    train, test = (
        TensorDataset(images[part], labels[part]) for part in (slice(1500), slice(1500, None))
    )
    return Data(train, test, 10)  # type: ignore[arg-type]


def _cifar10(root: Path) -> Data:
    torchvision = import_torchvision()
    make = torchvision.transforms
    plain = [make.ToTensor(), make.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))]
    crops = make.Compose([make.RandomCrop(32, 4), make.RandomHorizontalFlip(), *plain])
    try:
        sets = [
            torchvision.datasets.CIFAR10(str(root), train, transform, download=True)
            for train, transform in ((True, crops), (False, make.Compose(plain)))
        ]
    except Exception as error:  # any of urllib's, ssl's or torchvision's own
        raise DataError(
            f"cifar10 is not under {root} and its download failed ({error}). Remedy: fetch "
            "cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html into a "
            "folder and name it with --data-root"
        ) from error
    return Data(sets[0], sets[1], 10)


def _folder(root: Path, size: int) -> Data:
    """``root/train/CLASS/*`` and ``root/test/CLASS/*`` (or val)."""
    torchvision = import_torchvision()
    make = torchvision.transforms
    normalise = make.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    transform = make.Compose([make.Resize((size, size)), make.ToTensor(), normalise])
    held_out = root / "test" if (root / "test").is_dir() else root / "val"
    try:
        sets = [
            torchvision.datasets.ImageFolder(str(f), transform) for f in (root / "train", held_out)
        ]
    except FileNotFoundError as error:
        raise DataError(
            f"--data folder:{root}: expected pictures in {root}/train/CLASS and {root}/test/CLASS "
            f"({error})"
        ) from error
    return Data(sets[0], sets[1], len(sets[0].classes))


def first(images: Dataset[Batch], count: int | None) -> Dataset[Batch]:
    """The first ``count`` images, or all."""
    return images if count is None else Subset(images, range(min(count, len(images))))  # type: ignore[arg-type]


def gather(images: Dataset[Batch], indices: range | list[int]) -> Batch:
    """A batch of these images."""
    pairs = [images[index] for index in indices]
    return torch.stack([image for image, _ in pairs]), torch.tensor([int(y) for _, y in pairs])


def small_resnet(name: str, classes: int, width: int) -> nn.Module:
    """``resnet18`` or ``resnet50`` for images of 32 pixels; ``width`` 64 is the published size."""
    resnet = import_torchvision().models.resnet

    class CifarResNet(resnet.ResNet):  # type: ignore[name-defined]
        def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Module:
            if planes == 64:
                self.inplanes = width  # the first layer follows the stem
            return super()._make_layer(block, planes * width // 64, *args, **kwargs)

    block, depths = {
        "resnet18": (resnet.BasicBlock, [2, 2, 2, 2]),
        "resnet50": (resnet.Bottleneck, [3, 4, 6, 3]),
    }[name]
    model: Any = CifarResNet(block, depths, num_classes=classes)
    model.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.bn1 = nn.BatchNorm2d(width)
    model.maxpool = nn.Identity()
    model.fc = nn.Linear(model.inplanes, classes)
    return model
