"""Small models in the shapes in which people write them, for tests/fuzz/edits.py. All tensors have
the shape [N, 4, 5, 6], so that parts can be called, cut out and put elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedtrain

BOOSTED = False  # read by the forward of Asking
FACTOR = 0.5


def boost(x: Tensor) -> Tensor:
    return x * FACTOR


def chain(act: nn.Module, kernel: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(4, 4, kernel, padding=kernel // 2, groups=groups)
    return nn.Sequential(conv, nn.BatchNorm2d(4), act)


class Unit(nn.Module):
    """ultralytics' Conv, whose `fuse` takes the norm out."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.bn(self.conv(x)))
        return y

    def forward_fuse(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.conv(x))
        return y

    def fuse(self) -> None:
        del self.bn
        self.forward = self.forward_fuse


class Basic(nn.Module):
    """torchvision's BasicBlock: one activation at two places."""

    def __init__(self, act: nn.Module, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.act = act
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.act(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x = x + shortcut
        y: Tensor = self.act(x)
        return y


class Nested(nn.Module):
    """The sum and the activation after a norm are in the forward around it."""

    def __init__(self, act: nn.Module, deeper: bool = False) -> None:
        super().__init__()
        end = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.body = nn.Sequential(chain(nn.SiLU()), nn.Sequential(end) if deeper else end)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.body(x) + x)
        return y


class Moved(nn.Module):
    """The part that ends with a norm is called before the other operand of the sum."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.short, self.act = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh()), act

    def forward(self, x: Tensor) -> Tensor:
        branch = self.body(x)
        shortcut = self.short(x)
        y: Tensor = self.act(branch + shortcut)
        return y


class Gate(nn.Module):
    """Squeeze and excitation behind a norm."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x)))
        return x * self.gate(self.fc(self.pool(x)))


class Glu(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


class Dropped(nn.Module):
    """A branch with layer scale and stochastic depth, and one with a norm."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act
        self.drop, self.other = fusedtrain.nn.DropPath(0.3), nn.Conv2d(4, 4, 1)
        self.gamma = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.drop(self.bn(self.conv(x))) + x)
        y: Tensor = x + self.drop(self.gamma * self.other(x))
        return y


class Calls(nn.Module):
    """Functions in the place of modules."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.slope = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), 0.1
        self.norm, self.act = nn.BatchNorm2d(4), act

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.bn(self.conv(x)), self.slope)
        x = F.relu(self.norm(x) + x)
        return torch.tanh(x) * torch.sigmoid(x)


class Options:
    def __init__(self, scale: float = 0.75) -> None:
        self.scale, self.sizes = scale, {"a": 1.0, "b": [0.5]}

    def scaled(self) -> float:
        return self.scale


def scaled(options: Options) -> float:
    return options.scale


class Listed(list[float]):
    gain = 1.0


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Asking(nn.Module):
    """Everything that a forward may ask for before it decides."""

    wide, deep = False, 1.0
    names = ("left", "right")

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act
        self.parts = nn.ModuleList([nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)])
        self.deploy, self.weights, self.options = False, [1.0, 0.5], Options()
        self.plain, self.mode = {"scale": 0.5}, "sum"
        self.long, self.slotted = {str(i): 1.0 for i in range(70)}, Slotted()
        self.bound, self.partial = Options().scaled, functools.partial(scaled, Options())
        self.bare, self.listed = torch.ones(2).double(), Listed([1.0])

    @property
    def half(self) -> float:
        return 0.5 if self.deploy else 1.5

    def mixed(self, x: Tensor) -> Tensor:
        return x * self.weights[0] + self.weights[1]

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if hasattr(self, "bn"):
            x = self.bn(x)
        x = self.act(x)
        if getattr(self, "scale", None) is not None:
            x = x * self.scale
        if isinstance(self.conv, nn.Sequential) or self.deploy:
            x = x * 0.5
        if "extra" in self._modules:
            x = self.extra(x)
        if BOOSTED:
            x = boost(x)
        if self.wide:
            x = x * 2.0
        shortcut = x
        for part in self.parts:
            x = part(x)
        x = self.mixed(x) * self.half
        x = x + shortcut if self.mode == "sum" else x - shortcut
        x = F.silu(x) * len(self.names)
        if self.plain.get("bias"):
            x = x + self.plain["bias"]
        x = x * (self.options.scale + self.options.sizes["b"][0])
        x = x * (self.long["69"] * self.slotted.gain * self.bound() * self.partial())
        if "more" in self._buffers:
            x = x * 0.5
        return x * (self.bare.shape[0] * self.listed.gain * type(self).deep)


class Defaults:
    scale = 1.5

    @classmethod
    def moved(cls, x: Tensor) -> Tensor:
        return x + cls.scale


SETTINGS, OPTIONS, SIZES = {"gain": 1.5}, Options(), [1.5, 0.5]
silu, sigmoid = F.silu, torch.sigmoid


class Reading(nn.Module):
    """Globals of all kinds."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.conv(x))) * SETTINGS["gain"]
        x = self.tripled(Defaults.moved(silu(boost(x)) * OPTIONS.scale))
        return x * sigmoid(x) * SIZES[0] + Defaults.scale

    @classmethod
    def tripled(cls, x: Tensor) -> Tensor:
        return x * 3


class Deployed(nn.Module):
    """RepVGG: three branches become one convolution."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.dense, self.one, self.identity = chain(nn.Identity(), 3), chain(nn.Identity()), None
        self.norm, self.act = nn.BatchNorm2d(4), act

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "reparam"):
            y: Tensor = self.act(self.reparam(x))
            return y
        y = self.act(self.dense(x) + self.one(x) + self.norm(x))
        return y

    def switch_to_deploy(self) -> None:
        self.reparam = nn.Conv2d(4, 4, 3, padding=1).double()
        del self.dense, self.one, self.norm


class Switching(nn.Module):
    """Another way in training."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), act
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.bn(self.conv(x)))
        return y * self.rate if self.training else y


class Other(nn.Module):
    """Put into the place of anything."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.bn, self.act = nn.BatchNorm2d(4), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.bn(x))
        return y


class OtherSiLU(nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


class OtherNorm(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5
