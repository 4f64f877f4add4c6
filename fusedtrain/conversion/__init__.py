"""Swap the activations, max pooling and depthwise convolutions of a model for the fused ones, in
place, and swap them back.

A module is converted by giving the very same object another class, or another forward. So its
hooks, parameters, flags and names, and whoever else refers to it, need no copying.

`_classes` decides which modules change class; `_norms` (with its unit in `_sites`), `_gates`,
`_group_norms`, `_branches` and `_calls` find calls that can become one (`_units`), `_formulas`
(over `_algebra`) those that are an activation. None of them changes the model. `_rules` has the
reasons for which a module, a call or a forward stays. `_rewrite` chooses units that go together,
`_reordering` knows whether their calls may move, `_in_place` whether a norm may write over its
input. `_conversion` has all decisions, installs and reports them; `_trials` and `_proof` compare,
and drop the wrong ones. `_source` writes the new forwards, which call `_fused_calls`.
`_fuse_modules` is for torch's quantisation.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from .._graph.compiled import original_of
from .._graph.forward import (
    Record as Record,
    Rewritten as Rewritten,
    has_foreign_forward,
    is_changed,
    record_of,
    restore,
    set_recomputing,
)
from .._graph.guards import (
    Contents as Contents,
    DeadChild as DeadChild,
    Guards as Guards,
    Held as Held,
    Same as Same,
    Seen as Seen,
)
from .._graph.report import shown
from .._recompute import MemoryPlan, fingerprint
from . import _fuse_modules as _fuse_modules
from ._classes import find_classes
from ._report import ConversionReport

# Record, Rewritten, Guards with its rows, and what __getattr__ finds are not public: pickles of
# converted models look for them here.
__all__ = ["ConversionReport", "convert", "revert"]

MEMORY = ("store", "recompute", "inplace", "q8")  # what may become of outputs


def __getattr__(name: str) -> Any:
    # Functions that rewritten forwards call: with them the finders of `convert` would be imported.
    homes = {"activated": "_formulas", "add_branch": "_branches", "attending": "_attention",
             "gated_by": "_gates",
             "gated_formula": "_gates", "group_norm_act_of": "_fused_calls",
             "group_normed": "_fused_calls", "laid_out_as": "_gates", "method": "_formulas",
             "norm_act_of": "_fused_calls", "row_normed": "_row_norms",
             "with_epilogue": "_fused_calls", "Epilogue": "_fused_calls"}  # fmt: skip
    if name in ("TimmBatchNormAct2d", "TimmSyncBatchNormAct"):  # of pickles
        return importlib.import_module(f"{__name__}._fused_calls").timms_norm(name[4:])
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)


def convert(
    model: torch.nn.Module,
    example_inputs: Any = None,
    *,
    exclude: Iterable[type | str] = (),
    memory: str | MemoryPlan = "store",
    dropout: str = "torch",
    verify: bool = True,
    dry_run: bool = False,
) -> ConversionReport:
    """Fuse what a model computes, in place, and report it: activations, batch norm with what
    follows it, products with a gate, residual branches, max pooling, depthwise convolutions.

    The dataflow (torch.fx) of each module's forward says what can be one op. A forward that calls
    several modules or functions which become one gets another source, kept in the module; the
    modules that it calls stay what they are for everybody else: hooks, slices, replaced parts and
    torch.compile see the stock model (docs/convert.md). An activation on its own gets a subclass of
    its class with the same numbers, a depthwise convolution another forward. No name, parameter or
    key of the state dict changes. Converting again finds everything anew; :func:`revert` undoes it.

    With `example_inputs` the model runs forward and backward on it before and after, and a swap
    that changes more than rounding is undone: 32 times what the stock model shows when its layers'
    outputs are off by one unit in the last place. What the forward writes to is as it was then:
    parameters, buffers, gradients, attributes, objects that modules reach, random generators.
    Depthwise convolutions for which torch's kernels are faster in all passes of the example, and
    would be in bfloat16, keep their forward, if `memory` is "store". Under autocast float32 decides
    whether a swap is right. Modules that call torch's attention run it with ours, on a CPU, in 16
    bits, where that is faster.

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
            Hardswish on their own in 8 bits, an approximation that the comparison leaves out. A
            plan of :func:`fusedtrain.plan_memory` recomputes what it has chosen, bit for bit.
        dropout: "torch" leaves dropout, and with it the random numbers that torch draws; "fused"
            computes `nn.Dropout` and `F.dropout`, and sums of a shortcut and an `nn.Dropout`, with
            :func:`fusedtrain.functional.dropout`: the same distribution, other numbers for the same
            seed, and 16 bytes for backward in place of a mask. So does attention, on a CPU. Models
            are compared without dropout. Dropout in place stays. Converting again with "torch"
            leaves fused ones: revert first.
        verify: False does not run the example, for models that are too large to run twice.
        dry_run: True returns the report and leaves the model as it is.

    Returns:
        a :class:`ConversionReport`: what changed, what was left and why, bytes and errors.

    Raises:
        TypeError: `model` is no module, `example_inputs` or an item of `exclude` of another type.
        ValueError: an unknown name in `exclude`, another `memory` or `dropout`, a plan for another
            model or made with another `dropout`, several shapes, a shape for a model that begins
            with an embedding, or "recompute" for a model whose own forward is patched, compiled or
            scripted.
        RuntimeError: swaps that are right one by one are wrong together; a parameter is not
            initialized (`nn.LazyLinear`). And what the model raises for the example. Nothing is
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
    from ._attention import multi_head_modules
    from ._conversion import Conversion
    from ._trials import prove

    _check_module(model)
    if isinstance(example_inputs, MemoryPlan):
        raise TypeError("example_inputs: expected an example, got a MemoryPlan; pass memory=plan")
    plan = memory if isinstance(memory, MemoryPlan) else None
    if plan is not None:
        memory = "recompute"
        if plan.model != fingerprint(model):
            raise ValueError(
                "memory: the plan was made for a model with other parameters (names, shapes, "
                "dtypes or requires_grad); make one for this model with fusedtrain.plan_memory"
            )
    check_dropout(dropout)
    if plan is not None and plan.dropout != dropout:
        raise ValueError(
            f"dropout: the plan was made with dropout={plan.dropout!r}, not {dropout!r}; pass the "
            "same to plan_memory and convert"
        )
    if not isinstance(memory, str) or memory not in MEMORY:
        known = ", ".join(map(repr, MEMORY))
        raise ValueError(
            f"memory: must be a MemoryPlan or one of {known}, not {memory!r}; "
            "fusedtrain.plan_memory(model, example, 0.6) makes a plan"
        )
    compiled = vars(model).get("_compiled_call_impl") is not None  # by `model.compile()`
    if memory == "recompute" and (compiled or has_foreign_forward(model)):
        raise ValueError(
            f"memory: the forward of this {type(model).__name__} is not that of its class (it is "
            "patched, compiled or scripted), and cannot be replaced; convert the model before that "
            "is done to it, or run it within fusedtrain.recompute()"
        )
    original_of(model, "convert")  # warns; names are those of `model`, with its _orig_mod
    # A plan recomputes torch's layer norms by itself.
    kinds = dropout == "fused", memory == "recompute" and plan is None
    entries, excluded = find_classes(model, exclude, *kinds)
    conversion = Conversion(model, entries, excluded, memory, *kinds)
    if example_inputs is None or not verify:
        conversion.attend(multi_head_modules(model) if dropout == "fused" else ())
        conversion.choose()
        conversion.install()
        proof = None
    else:
        proof = prove(conversion, example_inputs)
    report = conversion.report()
    report.proof = None if proof is None else replace(proof, plan=plan)
    report.dry_run = dry_run
    if example_inputs is not None and not verify:
        report.unproven = "verify=False"
    if dry_run:
        conversion.uninstall()
    else:
        conversion.keep_few_bits()
        if plan is not None:
            set_recomputing(model, plan)
    return report


def revert(model: torch.nn.Module) -> int:
    """Undo :func:`convert` in place: every converted module gets its class and forward back.

    Also undoes :func:`fusedtrain.fold_frozen_norms` and :func:`fusedtrain.drop_redundant_bias`;
    each pair of a convolution and a norm counts as one module.

    Modules that were built as `fusedtrain.nn` classes stay, and so does a model that was never
    converted.

    Returns how many modules changed. Raises TypeError if `model` is not a module, RuntimeError if a
    converted module was given yet another class since, as parametrizations do, or a forward of its
    own; nothing is changed then.

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
        if record is None:
            continue
        change = "" if type(module) is record.fused else f"class has become {type(module).__name__}"
        if "forward" in vars(module):  # it may be that of the fused class, bound
            change = "forward has been replaced"
        if change:
            raise RuntimeError(
                f"{shown(name)}: cannot be reverted, since its {change} after convert; "
                "undo that first"
            )
    for _, module in changed:
        restore(module)
    # Here, because they are a tenth of the time that importing the package takes.
    from ..folding._bias import restore_bias
    from ..folding._frozen import restore as restore_frozen

    return len(changed) + restore_bias(model) + restore_frozen(model)


def check_dropout(dropout: str) -> None:
    """Raises ValueError unless this is a `dropout` of :func:`convert`."""
    if dropout not in ("torch", "fused"):
        raise ValueError(f"dropout: must be 'torch' or 'fused', not {dropout!r}")


def _check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
