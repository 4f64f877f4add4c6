"""Kinds of modules that matter when models are rewritten: packages, stochastic depth."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn

CONVOLUTIONS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
# Modules that multiply each sample by 0 or 1 / keep_prob -> the attribute with the probability. By
# package and name, since none of them is imported here; others of these names may do otherwise.
STOCHASTIC_DEPTH = {
    ("fusedtrain", "DropPath"): "drop_prob",
    ("timm", "DropPath"): "drop_prob",
    ("torchvision", "StochasticDepth"): "p",
}


FORWARD = "_fusedtrain_forward"  # the key in a module's `__dict__` of a replaced forward


_LIBRARIES = ("torch", "torchvision", "timm", "fusedtrain")  # their classes are known by name


def has_own_forward(module: nn.Module) -> bool:
    """Whether a call runs another forward than that of its class, ours or somebody's."""
    return FORWARD in vars(module) or is_patched(module)


def home_of(cls: type) -> Any:
    """The class that defines the forward of a class."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def is_patched(module: nn.Module) -> bool:
    """Whether somebody has given the module, or the class of a library, another forward."""
    if "forward" in vars(module):
        return True
    cls = type(module)
    if cls.__module__.partition(".")[0] not in _LIBRARIES or is_scripted(module):
        return False
    home = home_of(cls)
    file = sys.modules.get(home.__module__)
    if file is None or "<locals>" in home.__qualname__:  # of a GraphModule the code is generated
        return False
    # Not the `__module__` of the function, which `functools.wraps` copies.
    return getattr(home.forward, "__globals__", None) is not vars(file)


_STANDARD = sysconfig.get_path("stdlib")


@lru_cache(maxsize=4096)
def is_library(module: Any) -> bool:
    """Whether a Python module by this name is torch's, this package's or the standard library's:
    these keep their globals. A file of the user's may have the name of a standard one."""
    top = str(module).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or _STANDARD
    standard = top in sys.stdlib_module_names and file.startswith(_STANDARD)
    return standard or top in ("torch", "fusedtrain") or top.startswith("namedtuple_")


def package_and_name(module: nn.Module) -> tuple[str, str]:
    """The top-level package of its class, and the name of the class."""
    cls = type(module)
    return cls.__module__.partition(".")[0], cls.__name__


def is_scripted(module: object) -> bool:
    return isinstance(module, getattr(torch.jit, "ScriptModule", ()))


def is_quantized(module: nn.Module, computes: bool = False) -> bool:
    """Whether its class is one of torch's quantised ones; `computes`: and its tensors are, too."""
    path = f"{type(module).__module__}.{type(module).__name__}"
    # Packed parameters are children of static and of dynamic layers.
    wide = ".dynamic." in path or ".reference." in path or path.endswith("PackedParams")
    return ".quantized." in path and not (computes and wide)


def is_container(module: nn.Module) -> bool:
    """Whether a module is made of other modules, and has no forward."""
    kinds = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    if is_scripted(module):
        return False
    return isinstance(module, kinds) or type(module).forward is nn.Module.forward


def attribute_of(module: Any, path: str) -> Any:
    """The value at a path such as "layers.0.weight"; None where the path leads nowhere."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def scripted_parts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Name and class of each scripted module that is no part of another."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if is_scripted(module) and id(module) not in inside:
            inside.update(id(m) for m in module.modules())
            yield name, str(getattr(module, "original_name", type(module).__name__))


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """All names that each module goes by, by its id."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names
