"""Swap the activations, max pooling and depthwise convolutions of a model for the fused ones, in
place, and swap them back.

A module is converted by giving the very same object another class, or another forward. So its
hooks, parameters, flags and names, and whoever else refers to it, need no copying.

Here is which modules change class, and in `_classes` why some do not. `_conversion` has all units
(`_units`) of a model, installs and reports them; `_trials` and `_proof` prove. `_norms` (with its
unit in `_sites`), `_gates`, `_branches` and `_calls` find calls that can become one, `_formulas`
(over `_algebra`) knows which are an activation, `_candidates` what gains. `_rewrite` chooses units
that go together, `_reordering` knows whether their calls may move. `_edit` and `_source` write the
new forwards, which call `_fused_calls`. `_fuse_modules` is for torch's quantisation.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import nn as fused_nn
from .._graph.compiled import original_of, without_compiled_code
from .._graph.forward import (
    OfGraph as OfGraph,
    Rewritten as Rewritten,
    has_foreign_forward,
    is_changed,
    restore,
)
from .._graph.guards import (
    Contents as Contents,
    Gone as Gone,
    Guards as Guards,
    Held as Held,
    Same as Same,
    Seen as Seen,
)
from .._graph.hooks import is_hooked
from .._graph.modules import is_quantized, is_scripted
from .._graph.records import Decision, Record as Record, record_of
from .._graph.report import shown
from ..nn.depthwise import DEPTHWISE
from ..ops.depthwise import is_measured
from . import _fuse_modules as _fuse_modules
from ._classes import unlike
from ._report import ConversionReport

# Record, Rewritten, Guards with its rows, and what __getattr__ finds are not public: pickles of
# converted models look for them here.
__all__ = ["ConversionReport", "convert", "revert"]

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
    if isinstance(fused, type) and issubclass(fused, torch.nn.Module)
    for base in fused.__mro__[1:]
    if base.__module__ in _TORCH_FILES and base.__name__ == fused.__name__
}
MEMORY = ("store", "recompute", "inplace", "q8")  # what may become of outputs
_QUANTIZED = "quantised: the model runs on integers, in torch's kernels"
_FUSED = (
    *_TORCH.values(), *DEPTHWISE.values(),
    *(getattr(fused_nn, target) for target, _ in _TIMM.values()),
)  # fmt: skip


def __getattr__(name: str) -> Any:
    # Functions that rewritten forwards call: with them the finders of `convert` would be imported.
    homes = {"activated": "_formulas", "add_branch": "_branches", "gated_by": "_gates",
             "gated_formula": "_gates", "norm_then": "_fused_calls", "handed": "_fused_calls",
             "Then": "_fused_calls"}  # fmt: skip
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)


def convert(
    model: torch.nn.Module,
    example_inputs: Any = None,
    *,
    exclude: Iterable[type | str] = (),
    memory: str = "store",
    verify: bool = True,
    dry_run: bool = False,
) -> ConversionReport:
    """Fuse what a model computes, in place, and report it: activations, batch norm with what
    follows it, products with a gate, residual branches, max pooling, depthwise convolutions.

    The dataflow (torch.fx) of each module's forward says what can be one op. A forward that calls
    several modules or functions which become one gets another source, kept in the module; the
    modules that it calls stay what they are for everybody else: hooks, slices, replaced parts and
    torch.compile see the stock model (docs/convert.md). An activation on its own and a depthwise
    convolution get a subclass of their class with the same numbers. No name, parameter or key of
    the state dict changes. Converting again finds everything anew; :func:`revert` undoes it.

    With `example_inputs` the model runs forward and backward on it before and after, and a swap
    that changes more than rounding is undone: 32 times what the stock model shows when its layers'
    outputs are off by one unit in the last place. Gradients, buffers and random generators stay.
    Depthwise convolutions for which torch's kernels are faster in all passes of the example keep
    their class, if `memory` is "store".

    A converted activation may keep its output for backward where torch keeps its input. A model
    that modifies that output in place, `y = act(x); y += z`, raises torch's error then: exclude
    that module, or write `y = y + z`.

    Args:
        model: in its mode of training, on its device; before torch.compile.
        example_inputs: a tensor, a tuple of arguments, a dict of named ones, the shape of one
            tensor (normal random numbers in the dtype of the first floating-point parameter), or
            a function without arguments that returns one of these.
        exclude: module names (as in `named_modules`) and types (by isinstance): these stay, with
            all that is in them.
        memory: "store" keeps outputs that backward needs; "recompute" computes them again, bit for
            bit (:class:`fusedtrain.recompute`); "inplace" lets the output of a norm that LeakyReLU
            or nothing follows take the place of its input, where a convolution or a linear layer
            made that for it alone; "q8" keeps the derivatives of GELU, SiLU, Mish, QuickGELU and
            Hardswish on their own in 8 bits, an approximation that the comparison leaves out.
        verify: False does not run the example, for models that are too large to run twice.
        dry_run: True returns the report and leaves the model as it is.

    Returns:
        a :class:`ConversionReport`: what changed, what was left and why, bytes and errors.

    Raises:
        TypeError: `model` is no module, `example_inputs` or an item of `exclude` of another type.
        ValueError: an unknown name in `exclude`, another `memory`, several shapes, a shape for a
            model that begins with an embedding, or "recompute" for a model whose own forward is
            patched, compiled or scripted.
        RuntimeError: swaps that are right one by one are wrong together. And what the model raises
            for the example. Nothing is changed then.

    >>> import fusedtrain, torch
    >>> norm, act = torch.nn.BatchNorm2d(4), torch.nn.SiLU()
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), norm, act, torch.nn.Conv2d(4, 1, 1))
    >>> report = fusedtrain.convert(model, torch.randn(2, 3, 16, 16))
    >>> report.norms[0].name, report.norms[0].parts
    ('1', ('SiLU',))
    >>> report.proof.saved_before - report.proof.saved_after == 2 * 4 * 16 * 16 * 4
    True
    """
    # Tracing and comparing take as long to import as half of the package.
    from ._conversion import Conversion
    from ._trials import prove

    _check_module(model)
    if memory not in MEMORY:
        raise ValueError(f"memory: must be one of {', '.join(map(repr, MEMORY))}, not {memory!r}")
    compiled = vars(model).get("_compiled_call_impl") is not None  # by `model.compile()`
    if memory == "recompute" and (compiled or has_foreign_forward(model)):
        raise ValueError(
            f"memory: the forward of this {type(model).__name__} is not that of its class (it is "
            "patched, compiled or scripted), and cannot be replaced; convert the model before that "
            "is done to it, or run it within fusedtrain.recompute()"
        )
    original_of(model, "convert")  # warns; names are those of `model`, with its _orig_mod
    conversion = Conversion(model, *_find(model, *_split(exclude)), memory)
    if example_inputs is None or not verify:
        conversion.install()
        report = conversion.report()
    else:
        with without_compiled_code(model):
            report = prove(conversion, example_inputs)
    if example_inputs is not None and not verify:
        report.unproven = "verify=False"
    if dry_run:
        conversion.uninstall()
        report.dry_run = True
    else:
        conversion.keep_few_bits()
    return report


def revert(model: torch.nn.Module) -> int:
    """Undo :func:`convert` in place: every converted module gets its class and forward back.

    Also undoes :func:`fusedtrain.fold_frozen_norms` and :func:`fusedtrain.drop_redundant_bias`;
    each pair of a convolution and a norm counts as one module.

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
    changed = [(name, module) for name, module in model.named_modules() if is_changed(module)]
    for name, module in changed:
        record = record_of(module)
        if record is not None and type(module) is not record.fused:
            raise RuntimeError(
                f"{shown(name)}: cannot be reverted, since its class has become "
                f"{type(module).__name__} after convert; undo that first"
            )
    for _, module in changed:
        restore(module)
    # Here, because they are a tenth of the time that importing the package takes.
    from ..folding._bias import restore_bias
    from ..folding._frozen import restore as restore_frozen

    return len(changed) + restore_bias(model) + restore_frozen(model)


def _find(
    model: torch.nn.Module, names: set[str], types: tuple[type, ...]
) -> tuple[list[Decision], set[int]]:
    """Every activation, max pooling and depthwise convolution of the model once, in the order of
    named_modules, and the ids of excluded modules; changes nothing."""
    entries: dict[int, Decision] = {}
    kept: set[int] = set()
    unmatched = set(names)

    def visit(module: torch.nn.Module, name: str, excluded: bool) -> None:
        unmatched.discard(name)
        excluded = excluded or name in names or isinstance(module, types)
        if excluded:
            kept.add(id(module))
        entry = entries.get(id(module)) or _decide(module)
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


def _decide(module: torch.nn.Module) -> Decision | None:
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


def _decide_convolution(module: Any, kind: type) -> Decision | None:
    if not module.groups == module.in_channels > 1:
        return None
    device = module.weight.device.type
    theirs = "" if is_measured(device) else f"torch's own kernels run on {device}"
    return Decision(module, DEPTHWISE[kind], reason=unlike(module, kind) or theirs)


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
    is_plain = type(relu) in (torch.nn.ReLU, fused_nn.ReLU) and "forward" not in vars(relu)
    if not is_plain or is_hooked(relu):
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
