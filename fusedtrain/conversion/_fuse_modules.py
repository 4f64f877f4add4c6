"""torch.ao.quantization.fuse_modules on a converted model: torch looks for a function by classes,
and finds one here that gives the modules their own classes back first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import nn as fused_nn
from .._graph.forward import restore
from .._torch_private import FUSERS
from ..nn.depthwise import DEPTHWISE

_FUSED: dict[type, type] = {
    nn.ReLU: fused_nn.ReLU,
    **DEPTHWISE,
    nn.BatchNorm1d: fused_nn.BatchNormAct1d,
    nn.BatchNorm2d: fused_nn.BatchNormAct2d,
    nn.BatchNorm3d: fused_nn.BatchNormAct3d,
}


def _fuser(stock: tuple[type, ...]) -> Callable[..., nn.Module]:
    def fuse(is_qat: bool, *modules: nn.Module) -> nn.Module:
        for module in modules:
            restore(module)
        if any(type(module) in _FUSED.values() for module in modules):  # `convert` has not made it
            raise AssertionError(f"did not find fuser method for: {tuple(map(type, modules))}")
        fused: nn.Module = FUSERS[stock](is_qat, *modules)
        return fused

    return fuse


def _register() -> None:
    for stock in [*FUSERS]:
        choices: list[tuple[Any, ...]] = [(c, _FUSED[c]) if c in _FUSED else (c,) for c in stock]
        for classes in itertools.product(*choices):
            FUSERS.setdefault(classes, _fuser(stock))


_register()
