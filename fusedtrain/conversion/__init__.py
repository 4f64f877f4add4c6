"""Swap the activations and max pooling of a model for the fused ones, in place, and swap them back.

A module is converted by giving the very same object another class. So its hooks, parameters, flags
and names, and whoever else refers to it, need no copying: they are never touched.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils import parametrize

from .. import nn as fused_nn
from .._graph.compiled import original_of, without_compiled_code
from .._graph.forward import (
    Rewritten as Rewritten,
    has_foreign_forward,
    is_changed,
    restore,
)
from .._graph.hooks import is_hooked
from .._graph.modules import is_quantized, is_scripted
from .._graph.records import Found, Record as Record, record_of
from .._graph.report import shown, title
from ._report import ConversionReport

# Record, Rewritten and what __getattr__ finds are not public: pickles of converted models
# look for them here.
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
_FUSED = (*_TORCH.values(), *(getattr(fused_nn, target) for target, _ in _TIMM.values()))


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
    """Give the activations, batch norms and max pooling of `model` their fused classes, in place,
    and report it.

    An activation is converted if its type is exactly an activation class of torch.nn or timm, or if
    its forward is one activation and it has nothing else (the classes of transformers.activations,
    a Swish of your own); max pooling if it is exactly torch.nn.MaxPool2d. So are the calls of
    activations in forwards, `F.gelu(x)` and `x.tanh()`, and formulas, `x * x.sigmoid()`, `F.relu6(x
    + 3) / 6 * x`, in any order (docs/convert.md lists these). A batch norm is converted if its type
    is exactly that of torch.nn or timm's BatchNormAct2d, and all that is done with its output is
    stochastic depth, the addition of another tensor, and an activation (a module or a call such as
    `F.relu(x)`), each of which may be missing: these become part of it. A product of which one
    factor comes straight from an activation (a gated linear unit, `silu(gate(x)) * up(x)`, the gate
    of squeeze-and-excitation) becomes one op, too, as does the sum of a residual branch with its
    layer scale and stochastic depth. An activation on its own that gains neither time nor memory
    stays torch's: ReLU, and LeakyReLU in place. That is read off the dataflow
    (torch.fx) of each module's forward. Where only a forward can drop a sum or a call, that one
    module gets another `forward`;
    no module, name, parameter, hook or key of the state_dict changes. What stays as it is, is in
    the report with the reason. Call it before `torch.compile`: of a compiled model it converts what
    that wraps, which compiles anew at the next call. Converting again changes nothing;
    :func:`revert` undoes it, and is due before the structure of a converted model is changed.

    With `example_inputs` (a tensor, a tuple of arguments, a dict of named ones; the shape of one
    tensor, whose normal random numbers have the dtype and device of the first floating-point
    parameter; or a function without arguments that returns one of these and may draw random
    numbers: the states of generators stay) the model runs forward and backward on it before and
    after, in its mode of training and with the same random numbers, and the report tells the bytes
    saved for backward and the largest differences. Allowed is 32 times what the stock model shows
    when its layers' outputs are off by rounding (at least 32 units in the last place of the dtype);
    where that says little, the two run in float64, too. A swap that differs by more is undone.
    Gradients, buffers and random number generators stay. The report says so where there was nothing
    to compare: in inference mode no parameter has a gradient.

    `verify=False` leaves the comparison out, for models that are too large to run twice;
    `dry_run=True` returns the report and leaves the model as it is.

    A new forward has the numbers of its module as they are now: when one of them is changed later,
    the next call raises RuntimeError.

    One thing a converted model may not do: modify the output of an activation in place,
    `y = act(x); y += z`, where backward needs that output (see fusedtrain.functional): torch raises
    RuntimeError then, naming the function. Exclude that module, or write `y = y + z`.

    And one that calls its modules where torch.fx does not see it: an activation that has become
    part of a norm or a product hands on its input, to whoever calls it. Calls in the forwards of
    the model are seen, also in those that cannot be traced; a call from outside of the model in
    another method than forward is not. `example_inputs` shows the difference; exclude that module
    then.

    To torch.fx (feature extraction of torchvision and timm, FX quantisation) a converted model
    shows the forwards of its classes: a graph has the values of the unconverted model under their
    names, at a norm its output before the activation. Fused activations, pooling and timm's norms
    with an activation stay fused in the graph; what else norms, products and sums have taken over
    is computed apart there. Where that matters, make the graph first and convert it.
    :func:`revert` leaves graphs that were made before without what they call: make them anew.

    `exclude` lists module names (as in `named_modules`) and module types (matched by isinstance):
    these stay as they are, with all that is in them.

    `memory` says what becomes of outputs that backward needs: "store" keeps them; "recompute" lets
    the forward of `model` run within :class:`fusedtrain.recompute`, so that they are computed again
    in backward, bit for bit the same as with "store";
    "inplace" lets the output of norms that LeakyReLU or nothing follows take the place of their
    input, where a convolution or a linear layer made that for them alone, and backward computes it
    from the output (how exactly, `overwrite_input` of fusedtrain.functional.batch_norm_act tells);
    what reads the input where torch.fx does not see it, such as a hook that is put on either layer
    later, reads the output then; "q8" keeps the derivatives
    of GELU, SiLU, Mish, QuickGELU and Hardswish in 8 bits, not their inputs (those that are part of
    a norm or a product excepted, which need these anyway). That is an approximation, which
    fusedtrain.functional states and the comparison with `example_inputs` leaves out. Converting
    again with another one changes that.

    Returns a :class:`ConversionReport`. Raises TypeError if `model` is not a module,
    `example_inputs` of another type or `exclude` lists something else than names and types,
    ValueError if no module has such a name, `memory` is none of these, `example_inputs` are several
    shapes or a shape for a model that begins with an embedding, or "recompute" meets a model whose
    own forward is patched, compiled or scripted, RuntimeError if swaps that are
    right one by one are wrong together, and what the model raises for the example; nothing is
    changed then.

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
    if memory == "recompute" and has_foreign_forward(model):
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
    from ..folding._tune import restore as restore_tuned

    return len(changed) + len(restore_bias(model)) + len(restore_tuned(model))


def _find(
    model: torch.nn.Module, names: set[str], types: tuple[type, ...]
) -> tuple[list[Found], set[int]]:
    """Every activation and max pooling of the model once, in the order of named_modules, and the
    ids of excluded modules; changes nothing."""
    entries: dict[int, Found] = {}
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
            if excluded and entry.fused is not None:
                entry.reason = "excluded"
            # Once fused, an activation does not call its children (the relu of timm's StarReLU).
            if not entry.reason or is_scripted(module):
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


def _decide(module: torch.nn.Module) -> Found | None:
    """What to do with one module; None if it is neither activation nor max pooling."""
    cls = type(module)
    if is_scripted(module):
        known = {base.__name__ for base in _TORCH}
        if any(getattr(part, "original_name", None) in known for part in module.modules()):
            return Found(module, reason="scripted; convert before scripting")
        return None
    if isinstance(module, _FUSED):
        return Found(module)
    base = next((base for base in cls.__mro__ if base in _TORCH or _key(base) in _TIMM), None)
    if base is None:
        return Found(module, reason="no fused version") if _looks_pointwise(cls) else None
    if base is not cls:
        if is_quantized(module):
            return Found(module, reason="quantised")
        changed = parametrize.is_parametrized(module)
        return Found(module, reason="parametrized" if changed else f"subclass of {title(base)}")
    if "forward" in vars(module):
        return Found(module, reason="its forward is patched")
    if cls in _TORCH:
        return Found(module, _TORCH[cls])
    target, attributes = _TIMM[_key(cls)]
    fused = getattr(fused_nn, target)
    return Found(module, fused, attributes, _timm_obstacle(module, fused, attributes))


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
