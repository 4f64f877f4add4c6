"""Models as `convert`, `fold_conv_bn`, `fold_frozen_norms` and `drop_redundant_bias` leave them,
pickled.

    python tests/data/pickled_models.py

writes `pickled_models.xz` anew: needed only where a change of the format is intended, and then the
change belongs into the CHANGELOG. test_pickles.py loads the file of an earlier version.
"""

from __future__ import annotations

import copy
import lzma
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedtrain

FILE = Path(__file__).with_suffix(".xz")


class Block(nn.Module):
    """A gate, a residual sum, layer scale and stochastic depth."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1), nn.Sigmoid()
        )
        self.gamma = nn.Parameter(torch.full((channels, 1, 1), 0.5))
        self.conv3 = nn.Conv2d(channels, channels, 1)
        self.drop = fusedtrain.nn.DropPath(0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        y = self.act(self.bn2(self.conv2(y)) + x)
        z = self.conv3(y)
        y = y * self.gate(y)
        return y + self.drop(z * self.gamma)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        Block(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.LeakyReLU(0.1), nn.MaxPool2d(2)
    )
    for buffer in model.buffers():
        if buffer.is_floating_point():
            nn.init.uniform_(buffer, 0.5, 1.5)
    return model


def changed(kind: str) -> Any:
    """The network, and what `kind` makes of it."""
    model = network()
    if kind.startswith("convert"):
        fusedtrain.convert(model, memory=kind.partition(" ")[2])
    elif kind == "fold":
        model = fusedtrain.fold_conv_bn(model.eval())[0]
    elif kind == "fold converted":
        fusedtrain.convert(model)
        model = fusedtrain.fold_conv_bn(model.eval())[0]
    elif kind == "tune":
        fusedtrain.fold_frozen_norms(model.eval())
    elif kind == "bias":
        fusedtrain.drop_redundant_bias(model)
    else:
        raise ValueError(kind)
    return model


KINDS = (
    "convert store", "convert recompute", "convert inplace", "convert q8", "fold", "fold converted",
    "tune", "bias",
)  # fmt: skip


OPTIMIZERS = ("AdamW", "SGD", "LAMB")


def stepped(name: str) -> Any:
    """An optimizer of two parameters after one step."""
    parameters = [torch.linspace(-1, 1, n).requires_grad_() for n in (3, 5)]
    optimizer = getattr(fusedtrain.optim, name)(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


def inputs() -> Tensor:
    return torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(1))


def results(model: Any) -> list[Tensor]:
    """Output and gradients, if it trains, with the same random numbers at each call."""
    torch.manual_seed(2)
    x = inputs().requires_grad_()
    y = copy.deepcopy(model)(x)
    if not y.requires_grad:
        return [y]
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape))
    assert x.grad is not None
    return [y.detach(), x.grad]


def write() -> None:
    # As others import this file: pickles name its class by that.
    sys.path.insert(0, str(FILE.parent))
    module: Any = __import__("pickled_models")
    models = {}
    for kind in KINDS:
        model = module.changed(kind)
        models[kind] = pickle.dumps(model), module.results(model)
    optimizers = {}
    for name in OPTIMIZERS:
        optimizer = module.stepped(name)
        optimizers[name] = pickle.dumps(optimizer), optimizer.state_dict()
    FILE.write_bytes(lzma.compress(pickle.dumps((models, optimizers))))
    print(f"{FILE}: {FILE.stat().st_size} bytes, torch {torch.__version__}")


if __name__ == "__main__":
    write()
