"""Modules that change class (activations of torch and timm, RMS norm, max pooling, dropout and
depthwise convolutions), and the reasons for which such a module stays."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .. import nn as fused_nn
from .._graph.forward import Rewritten, assign, install, rewritten_of
from .._graph.hooks import is_hooked
from .._graph.modules import has_own_forward, is_quantized, is_scripted
from ..nn.depthwise import DEPTHWISE
from ..ops.depthwise import is_measured
from ._rules import unlike

_TORCH_ACTIVATIONS = "torch.nn.modules.activation"
_TORCH_FILES = (_TORCH_ACTIVATIONS, "torch.nn.modules.pooling")
_TIMM_ACTIVATIONS = "timm.layers.activations"

# In torch.nn.modules.activation, but no pointwise functions: not worth a line in the report.
_NOT_POINTWISE = {"LogSoftmax", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin"}

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
    if isinstance(fused, type) and issubclass(fused, nn.Module)
    for base in fused.__mro__[1:]
    if base.__module__ in _TORCH_FILES and base.__name__ == fused.__name__
}
_TORCH[nn.RMSNorm] = fused_nn.RMSNorm
_CONVOLVE = "def forward(self, input):\n    return convolve(self, input)\n"
_CONVOLUTION = "fusedtrain.nn.depthwise:convolve"
_QUANTIZED = "quantised: the model runs on integers, in torch's kernels"
_FUSED = (
    *_TORCH.values(), *DEPTHWISE.values(), fused_nn.Dropout,
    *(getattr(fused_nn, target) for target, _ in _TIMM.values()),
)  # fmt: skip


@dataclass
class Decision:
    """One module that may get another class, with every name it goes by and what to do with it."""

    module: nn.Module
    fused: type | None = None  # None: it is fused already, or left for a reason
    attributes: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    names: list[str] = field(default_factory=list)
    forward: tuple[str, dict[str, str]] | None = None  # its source and imports; the class stays
    target: str = ""  # in the report; the new class if ""

    def twin(self) -> nn.Module:
        """The module as it will be, for questions about it; the module itself stays."""
        assert self.fused is not None
        twin: nn.Module = object.__new__(self.fused)
        vars(twin).update({**vars(self.module), **self.attributes})
        return twin

    def swap(self) -> None:
        """Sets the class of the module, or its forward."""
        assert self.fused is not None
        if self.forward is not None:
            install(Rewritten(self.module, *self.forward))
        else:
            assign(self.module, self.fused, self.attributes)


def find_classes(
    model: nn.Module, exclude: Iterable[type | str], dropout: bool, layer_norms: bool
) -> tuple[list[Decision], set[int]]:
    """Every activation, max pooling and depthwise convolution of the model once, in the order of
    named_modules, and the ids of excluded modules; changes nothing. `dropout`: every dropout, too,
    that drops something. `layer_norms`: every one of them, too."""
    names, types = _split(exclude)
    entries: dict[int, Decision] = {}
    kept: set[int] = set()
    unmatched = set(names)

    def visit(module: nn.Module, name: str, excluded: bool) -> None:
        unmatched.discard(name)
        excluded = excluded or name in names or isinstance(module, types)
        if excluded:
            kept.add(id(module))
        entry = entries.get(id(module)) or _decide(module)
        if entry is None and dropout and isinstance(module, nn.Dropout) and _may_drop(module):
            entry = _decide_dropout(module)
        if entry is None and layer_norms and isinstance(module, nn.LayerNorm):
            entry = _decide_layer_norm(module)
        if entry is not None:
            entries[id(module)] = entry
            entry.names.append(name)
            # Once fused, an activation does not call its children (the relu of timm's StarReLU).
            stays = entry.reason or (excluded and entry.fused is not None)
            if not stays or is_scripted(module):
                return
        for child_name, child in module._modules.items():
            if child is not None:
                visit(child, f"{name}.{child_name}" if name else child_name, excluded)

    visit(model, "", False)
    if any(is_quantized(module, computes=True) for module in model.modules()):
        for entry in entries.values():
            entry.reason = entry.reason or (_QUANTIZED if entry.fused is not None else "")
    if unmatched:
        raise ValueError(f"exclude: the model has no module named {min(unmatched)!r}")
    return list(entries.values()), kept


def _split(exclude: Iterable[type | str]) -> tuple[set[str], tuple[type, ...]]:
    if isinstance(exclude, str | type) or not isinstance(exclude, Iterable):
        raise TypeError(f"exclude: expected a list of module names and types, got {exclude!r}")
    items = list(exclude)
    for item in items:
        if not isinstance(item, str | type):
            raise TypeError(f"exclude: expected module names and types, got {item!r} among them")
    names = {item.rstrip(".") for item in items if isinstance(item, str)}
    return names, tuple(item for item in items if isinstance(item, type))


def _decide(module: nn.Module) -> Decision | None:
    """The decision on one module; None if it is none of the kinds that get another class."""
    cls = type(module)
    if is_scripted(module):
        known = {base.__name__ for base in _TORCH}
        if any(getattr(part, "original_name", None) in known for part in module.modules()):
            return Decision(module, reason="scripted; convert before scripting")
        return None
    if isinstance(module, _FUSED):
        return Decision(module)
    kind = next((base for base in DEPTHWISE if isinstance(module, base)), None)
    if kind is not None:
        return _decide_convolution(module, kind)
    base = next((base for base in cls.__mro__ if base in _TORCH or _key(base) in _TIMM), None)
    if base is None and not _looks_pointwise(cls):
        return None
    if reason := unlike(module, base):
        return Decision(module, reason=reason)
    if cls in _TORCH:
        return Decision(module, _TORCH[cls])
    target, attributes = _TIMM[_key(cls)]
    fused = getattr(fused_nn, target)
    return Decision(module, fused, attributes, _timm_obstacle(module, fused, attributes))


def _may_drop(module: nn.Dropout) -> bool:
    """Whether a dropout drops something. The `p` of a subclass may be anything, or missing."""
    p = getattr(module, "p", None)
    return not isinstance(p, (int, float)) or p > 0


def _decide_dropout(module: nn.Dropout) -> Decision:
    in_place = "works in place, with torch's numbers" if module.inplace else ""
    return Decision(module, fused_nn.Dropout, reason=unlike(module, nn.Dropout) or in_place)


def _decide_layer_norm(module: nn.LayerNorm) -> Decision | None:
    if isinstance(module, fused_nn.LayerNorm):
        return Decision(module)
    if type(module).forward is not nn.LayerNorm.forward:  # what it calls may be found
        return None
    return Decision(module, fused_nn.LayerNorm, reason=unlike(module, nn.LayerNorm))


def _decide_convolution(module: Any, kind: type) -> Decision | None:
    if not module.groups == module.in_channels > 1:
        return None
    if is_swapped(module):
        return Decision(module)
    reason = unlike(module, kind)
    if not reason:  # to read a parametrized weight may change buffers, as of spectral_norm
        device = module.weight.device.type
        reason = "" if is_measured(device) else f"torch's own kernels run on {device}"
    # It keeps its class, by which others look layers up (torch.ao, peft, counters of flops).
    forward = _CONVOLVE, {"convolve": _CONVOLUTION}
    return Decision(module, DEPTHWISE[kind], reason=reason, forward=forward)


def is_swapped(module: nn.Module) -> bool:
    """Whether a module is a depthwise convolution with our forward."""
    rewritten = rewritten_of(module)
    return rewritten is not None and rewritten.source == _CONVOLVE


def _timm_obstacle(module: nn.Module, fused: type, attributes: Mapping[str, Any]) -> str:
    """Reason why fusing a timm module would change more than rounding, or ''."""
    inplace_matters = "inplace" not in attributes and getattr(module, "inplace", False)
    if inplace_matters and "inplace" not in inspect.signature(fused).parameters:
        return "inplace=True, which the fused one lacks"
    relu = module._modules.get("relu")
    if relu is None:
        return ""
    if getattr(relu, "inplace", False):
        return "inplace=True, which leaves relu(input) in the input"
    is_plain = type(relu) in (nn.ReLU, fused_nn.ReLU) and not has_own_forward(relu)
    if not is_plain or is_hooked(relu):
        return "its relu is replaced, patched or hooked"
    return ""


def _looks_pointwise(cls: type) -> bool:
    """Whether a class is an activation which the tables lack, such as torch.nn.RReLU."""
    for base in cls.__mro__:
        if base.__module__ == _TORCH_ACTIVATIONS or _key(base).startswith(_TIMM_ACTIVATIONS):
            return base.__name__ not in _NOT_POINTWISE
    return False


def _key(cls: type) -> str:
    module = cls.__module__.replace("timm.models.layers.", "timm.layers.")  # older timm
    return f"{module}:{cls.__qualname__}"
