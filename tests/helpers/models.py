"""Models of torchvision and timm for the tests, small enough in time for two cores."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

# Schemas of the operators for which torchvision registers a fake kernel while it is imported.
_TORCHVISION_OPERATORS = ("nms", "qnms")
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class Parts(nn.Module):
    """A model of parts, by name; a subclass has the forward."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def model_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """A model of parts, by name, with that method as its forward."""
    return type("Model", (Parts,), {"forward": forward})(**parts)


@cache
def torchvision() -> ModuleType:
    """torchvision, also where its C++ part does not fit torch: its pure-Python models still work.

    Skips the test if it is not installed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        pytest.skip("torchvision is not installed")
    if hasattr(sys.modules.get("torchvision"), "models"):  # the benchmarks declare the names, too
        return sys.modules["torchvision"]
    library = Path(spec.origin).with_name("_C.so")
    try:
        torch.ops.load_library(str(library))
    except OSError:
        # A wheel for CUDA beside a torch without: the import would fail for want of these names.
        declared = torch.library.Library("torchvision", "DEF")
        for name in _TORCHVISION_OPERATORS:
            declared.define(name + _BOXES)
        _alive.append(declared)  # the names live as long as the object
    return importlib.import_module("torchvision")


_alive: list[Any] = []


def but_long(names: Iterable[Any], *long: Any) -> list[Any]:
    """Parameters of a test; `-m long` alone runs models that repeat another one of their kind."""
    marks = pytest.mark.long
    return [pytest.param(name, marks=marks) if name in long else name for name in names]


@cache
def timm() -> ModuleType:
    """timm; it imports torchvision. Skips the test if either is not installed."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    torchvision()
    return importlib.import_module("timm")


@cache
def transformers() -> ModuleType:
    """transformers, whose image models import torchvision. Skips the test if it is missing."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    torchvision()
    return importlib.import_module("transformers")


@cache
def lightning(package: str = "lightning") -> ModuleType:
    """`lightning.pytorch` or `pytorch_lightning`; both import torchvision where there is one. Skips
    the test if it is missing."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if importlib.util.find_spec("torchvision") is not None:
        torchvision()
    return importlib.import_module("lightning.pytorch" if package == "lightning" else package)


@cache
def accelerate() -> ModuleType:
    """accelerate. Skips the test if it is missing."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    return importlib.import_module("accelerate")


@cache
def onnxruntime() -> ModuleType:
    """onnxruntime. Skips the test if it is missing, or what torch.onnx exports with."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return importlib.import_module("onnxruntime")


def build(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A seeded model in train mode without dropout, by a name such as `torchvision:resnet50`."""
    library, _, model_name = name.partition(":")
    torch.manual_seed(0)
    if library == "torchvision":
        model = importlib.import_module(torchvision().__name__ + ".models").get_model(model_name)
    else:
        model = timm().create_model(model_name)
    for module in model.modules():
        if type(module).__name__ in ("StochasticDepth", "Dropout", "DropPath"):
            for rate in {"p", "drop_prob"} & vars(module).keys():
                setattr(module, rate, 0.0)
        if type(module).__name__.startswith(("CNBlock", "ConvNeXtBlock")):
            _waken(module)
    return model.to(dtype).train()


def _waken(block: torch.nn.Module) -> None:
    """Raise ConvNeXt's layer scale, 1e-6 at the start, which would hide the activations."""
    for name, parameter in block.named_parameters(recurse=False):
        if name in ("layer_scale", "gamma"):
            torch.nn.init.constant_(parameter, 0.5)
