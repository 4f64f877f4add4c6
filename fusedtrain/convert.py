"""Swap the activations of a model for the fused ones, in place, and swap them back.

A module is converted by giving the very same object another class. So its hooks, parameters, flags
and names, and whoever else refers to it, need no copying: they are never touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils import parametrize

from . import nn as fused_nn
from ._conversion_report import ConversionReport, Converted, Left, shown
from ._fold_bias import restore_bias
from ._fold_tune import TunedConv, TunedNorm, restore

__all__ = ["ConversionReport", "convert", "revert"]

_TORCH_ACTIVATIONS = "torch.nn.modules.activation"
_TIMM_ACTIVATIONS = "timm.layers.activations"
_RECORD = "_fusedtrain_convert"  # key in the __dict__ of a converted module
_SCRIPTED: Any = getattr(torch.jit, "ScriptModule", ())

# In torch.nn.modules.activation, but no pointwise functions: not worth a line in the report.
_NOT_POINTWISE = {"GLU", "LogSoftmax", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin"}

# timm class -> fused class and the attributes to set: by name, since timm need not be installed.
# Many of timm's classes accept inplace and ignore it; the fused ones would heed it.
_OUT_OF_PLACE: Mapping[str, Any] = {"inplace": False}
_TIMM: dict[str, tuple[str, Mapping[str, Any]]] = {
    f"{_TIMM_ACTIVATIONS}:Swish": ("SiLU", {}),
    f"{_TIMM_ACTIVATIONS}:Mish": ("Mish", _OUT_OF_PLACE),
    f"{_TIMM_ACTIVATIONS}:Sigmoid": ("Sigmoid", {}),
    f"{_TIMM_ACTIVATIONS}:Tanh": ("Tanh", {}),
    f"{_TIMM_ACTIVATIONS}:HardSwish": ("Hardswish", {}),
    f"{_TIMM_ACTIVATIONS}:HardSigmoid": ("Hardsigmoid", {}),
    f"{_TIMM_ACTIVATIONS}:HardMish": ("HardMish", {}),
    f"{_TIMM_ACTIVATIONS}:PReLU": ("PReLU", {}),
    f"{_TIMM_ACTIVATIONS}:GELU": ("GELU", {"approximate": "none"}),
    f"{_TIMM_ACTIVATIONS}:GELUTanh": ("GELU", {"approximate": "tanh"}),
    f"{_TIMM_ACTIVATIONS}:QuickGELU": ("QuickGELU", _OUT_OF_PLACE),
    "timm.models.metaformer:StarReLU": ("StarReLU", {}),
    "timm.models.metaformer:SquaredReLU": ("ReLUSquared", _OUT_OF_PLACE),
}
for _name in ("Swish", "Mish", "HardSigmoid", "HardSwish", "HardMish"):
    _target = _TIMM[f"{_TIMM_ACTIVATIONS}:{_name}"][0]
    _TIMM[f"{_TIMM_ACTIVATIONS}_me:{_name}Me"] = (_target, _OUT_OF_PLACE)
    _TIMM[f"{_TIMM_ACTIVATIONS}_jit:{_name}Jit"] = (_target, _OUT_OF_PLACE)  # older timm

# torch.nn class -> fused class, read off the subclass relation: a new one needs no line here.
_TORCH: dict[type, type] = {
    base: fused
    for fused in vars(fused_nn).values()
    if isinstance(fused, type) and issubclass(fused, torch.nn.Module)
    for base in fused.__mro__[1:]
    if base.__module__ == _TORCH_ACTIVATIONS and base.__name__ == fused.__name__
}
_FUSED = (*_TORCH.values(), *(getattr(fused_nn, target) for target, _ in _TIMM.values()))


class _Record(NamedTuple):
    """What revert needs, kept on the module, so that it outlives deepcopy and pickle."""

    original: type
    fused: type
    added: tuple[str, ...]  # __dict__ keys which the original did not have
    replaced: dict[str, Any]  # and those which had another value


@dataclass
class _Found:
    """One activation module, with every name it goes by and what to do with it."""

    module: torch.nn.Module
    fused: type | None = None  # None: it is fused already, or left for a reason
    attributes: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    names: list[str] = field(default_factory=list)


def convert(model: torch.nn.Module, *, exclude: Iterable[type | str] = ()) -> ConversionReport:
    """Turn the activations of `model` into their fused classes, in place, and report what changed.

    A module is converted if its type is exactly an activation class of torch.nn or timm. Left, with
    a reason in the report, are subclasses, parametrized modules, modules with a patched forward,
    scripted modules, and activations that have no fused version. Calls such as `F.relu(x)` are not
    modules and stay. In a module from `torch.compile` the wrapped model is converted, and compiles
    anew at its next call. Converting again changes nothing; :func:`revert` undoes it.

    One thing a converted model may not do: modify the output of an activation in place,
    `y = act(x); y += z`, where backward needs that output (see fusedtrain.functional): torch raises
    RuntimeError then, naming the function. Exclude that module, or write `y = y + z`.

    `exclude` lists module names (as in `named_modules`) and module types (matched by isinstance):
    these stay as they are, with all that is in them.

    Returns a :class:`ConversionReport`. Raises TypeError if `model` is not a module or `exclude`
    lists something else than names and types, ValueError if no module has such a name; nothing is
    changed then.

    >>> import fusedtrain, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    >>> print(fusedtrain.convert(model))
    converted 1 module
      1 x torch.nn.SiLU -> fusedtrain.nn.SiLU
    """
    _check_module(model)
    report = ConversionReport()
    for found in _find(model, *_split(exclude)):
        name, source = found.names[0], _title(type(found.module))
        if found.reason:
            report.left.append(Left(name, source, found.reason))
        elif found.fused is None:
            report.already += 1
        else:
            _assign(found.module, found.fused, found.attributes)
            report.converted.append(Converted(name, source, _title(found.fused)))
            if len(found.names) > 1:
                report.shared[name] = found.names
    return report


def revert(model: torch.nn.Module) -> int:
    """Undo :func:`convert` in place: every converted module gets its class and attributes back.

    Also undoes :func:`fusedtrain.tune_mode` and :func:`fusedtrain.drop_redundant_bias`; each pair
    of a convolution and a norm counts as one module.

    Modules that were built as `fusedtrain.nn` classes stay, and so does a model that was never
    converted.

    Returns how many modules changed. Raises TypeError if `model` is not a module, RuntimeError if a
    converted module was given yet another class since, as parametrizations do; nothing is changed
    then.

    >>> import fusedtrain, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())
    >>> report = fusedtrain.convert(model)
    >>> fusedtrain.revert(model), type(model[1]) is torch.nn.SiLU
    (1, True)
    """
    _check_module(model)
    todo: list[tuple[torch.nn.Module, _Record]] = []
    for name, module in model.named_modules():
        record = vars(module).get(_RECORD)
        if record is None:
            continue
        if type(module) is not record.fused:
            raise RuntimeError(
                f"{shown(name)}: cannot be reverted, since its class has become "
                f"{type(module).__name__} after convert; undo that first"
            )
        todo.append((module, record))
    for module, record in todo:
        attributes = vars(module)
        del attributes[_RECORD]
        for key in record.added:
            attributes.pop(key, None)
        attributes.update(record.replaced)
        module.__class__ = record.original
    return len(todo) + len(restore_bias(model)) + len(restore(model, TunedConv, TunedNorm))


def _assign(module: torch.nn.Module, fused: type, wanted: Mapping[str, Any]) -> None:
    attributes = vars(module)
    added = tuple(key for key in wanted if key not in attributes)
    replaced = {key: attributes[key] for key in wanted if key in attributes}
    record = _Record(type(module), fused, added, replaced)
    module.__class__ = fused
    attributes.update(wanted)
    attributes[_RECORD] = record


def _find(model: torch.nn.Module, names: set[str], types: tuple[type, ...]) -> list[_Found]:
    """Every activation of the model once, in the order of named_modules; changes nothing."""
    found: dict[int, _Found] = {}
    unmatched = set(names)

    def visit(module: torch.nn.Module, name: str, excluded: bool) -> None:
        unmatched.discard(name)
        excluded = excluded or name in names or isinstance(module, types)
        entry = found.get(id(module)) or _decide(module)
        if entry is not None:
            found[id(module)] = entry
            entry.names.append(name)
            if excluded and entry.fused is not None:
                entry.reason = "excluded"
            # Once fused, an activation does not call its children (the relu of timm's StarReLU).
            if not entry.reason or isinstance(module, _SCRIPTED):
                return
        for child_name, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{child_name}" if name else child_name, excluded)

    visit(model, "", False)
    if unmatched:
        raise ValueError(f"exclude: the model has no module named {min(unmatched)!r}")
    return list(found.values())


def _decide(module: torch.nn.Module) -> _Found | None:
    """What to do with one module; None if it is no activation."""
    cls = type(module)
    if isinstance(module, _SCRIPTED):
        known = {base.__name__ for base in _TORCH}
        if any(getattr(part, "original_name", None) in known for part in module.modules()):
            return _Found(module, reason="scripted; convert before scripting")
        return None
    if isinstance(module, _FUSED):
        return _Found(module)
    base = next((base for base in cls.__mro__ if base in _TORCH or _key(base) in _TIMM), None)
    if base is None:
        return _Found(module, reason="no fused version") if _looks_pointwise(cls) else None
    if base is not cls:
        changed = parametrize.is_parametrized(module)
        return _Found(module, reason="parametrized" if changed else f"subclass of {_title(base)}")
    if "forward" in vars(module):
        return _Found(module, reason="its forward is patched")
    if cls in _TORCH:
        return _Found(module, _TORCH[cls])
    target, attributes = _TIMM[_key(cls)]
    fused = getattr(fused_nn, target)
    return _Found(module, fused, attributes, _timm_obstacle(module, fused, attributes))


def _timm_obstacle(module: torch.nn.Module, fused: type, attributes: Mapping[str, Any]) -> str:
    """Why fusing a timm module would change more than rounding; mostly ''."""
    inplace_matters = "inplace" not in attributes and getattr(module, "inplace", False)
    if inplace_matters and "inplace" not in inspect.signature(fused).parameters:
        return "inplace=True, which the fused one lacks"
    relu = module._modules.get("relu")
    if relu is None:
        return ""
    if getattr(relu, "inplace", False):
        return "inplace=True, which leaves relu(input) in the input"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    is_plain = type(relu) in (torch.nn.ReLU, fused_nn.ReLU) and "forward" not in vars(relu)
    if not is_plain or any(getattr(relu, name) for name in hooks):
        return "its relu is replaced, patched or hooked"
    return ""


def _looks_pointwise(cls: type) -> bool:
    """Whether a class is an activation which the tables lack, such as torch.nn.RReLU."""
    for base in cls.__mro__:
        if base.__module__ == _TORCH_ACTIVATIONS or _key(base).startswith(_TIMM_ACTIVATIONS):
            return base.__name__ not in _NOT_POINTWISE
    return False


def _split(exclude: Iterable[type | str]) -> tuple[set[str], tuple[type, ...]]:
    if isinstance(exclude, str | type) or not isinstance(exclude, Iterable):
        raise TypeError(f"exclude: expected a list of module names and types, got {exclude!r}")
    items = list(exclude)
    for item in items:
        if not isinstance(item, str | type):
            raise TypeError(f"exclude: expected module names and types, got {item!r} among them")
    names = {item.rstrip(".") for item in items if isinstance(item, str)}
    return names, tuple(item for item in items if isinstance(item, type))


def _check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def _key(cls: type) -> str:
    module = cls.__module__.replace("timm.models.layers.", "timm.layers.")  # older timm
    return f"{module}:{cls.__qualname__}"


def _title(cls: type) -> str:
    for public in (torch.nn, fused_nn):
        if getattr(public, cls.__name__, None) is cls:
            return f"{public.__name__}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
