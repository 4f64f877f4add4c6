"""Import of timm and torchvision, also where torchvision's C++ part does not fit torch."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

_declared: list[torch.library.Library] = []


@cache
def import_module(name: str) -> ModuleType:
    """The module; timm's and torchvision's also where torchvision's C++ part does not fit torch.

    Imported (by timm, too), torchvision registers fake kernels for operators of its C++ part.
    """
    try:
        return importlib.import_module(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    _declared.append(library)  # the names vanish with the object
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(name)
