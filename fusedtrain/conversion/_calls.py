"""Calls in forwards that are an activation, and modules that are nothing but one.

Forwards that may call a norm or an activation or have a branch are worth tracing; activations that
gain time or memory are worth a swap.

A call of a function such as `F.gelu(x)` or a formula such as `x * x.sigmoid()` becomes one call of
fusedtrain.functional in a rewritten forward. A module whose forward is one such call, and which has
nothing else, gets the fused class.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .. import functional as fused_functional
from .._graph.flow import Flow, Trace
from .._graph.forward import record_of
from .._graph.guards import Guards, looked_at
from .._graph.modules import has_own_forward, is_container, is_scripted, names_of
from .._graph.names import mentioned, outside
from .._graph.report import Unchanged, title
from .._torch_private import BatchNormBase
from ..ops.row_norm import torch_layer_norm
from ..reference.pointwise import INDEX, POINTWISE
from ._algebra import TELLING, is_clamp_of_relu
from ._attention import WORDS as OF_ATTENTION, is_attention
from ._branches import may_have_branches
from ._classes import Decision
from ._formulas import (
    DROPOUT,
    FUNCTIONS,
    MODULE_OF,
    OTHERS,
    Match,
    activated,
    attention_of,
    dropout_of,
    is_activation,
    matches_of,
    mean_of,
    method,
    name_of_call,
    name_of_other,
    other_call_of,
)
from ._group_norms import NORMS
from ._report import Applied
from ._row_norms import WORDS as OF_ROW_NORMS
from ._rules import GAINS_NOTHING, Rules, gains
from ._units import Change, Copy, Unit

# These keep their output in torch, too: who writes over it meets the same error.
KEEP_OUTPUT = ("relu", "sigmoid", "tanh")
# Public names that a class may define, if its modules are to be given another class.
_USUAL = {"extra_repr", "forward", "reset_parameters", "training"}
_ENCODERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_AMBIGUOUS = {"threshold"}  # the name of many things
_NAMES = {row.name for row in POINTWISE} - _AMBIGUOUS | set(OTHERS.values())
_NAMES -= {"layer_norm", "rms_norm"}
_WRITTEN = {"layer_norm": torch_layer_norm}
_WORDS = _NAMES | TELLING | {f"{name}_" for name in _NAMES}
_WORDS |= {"rms_norm"} | OF_ROW_NORMS | OF_ATTENTION


class Candidates:
    """Tests of one model's modules for worthwhile work; each module is looked at once."""

    def __init__(self, dropout: bool, layer_norms: bool) -> None:
        self.dropout, self.layer_norms = dropout, layer_norms
        self._known = _WORDS | set(DROPOUT.values() if dropout else ())
        self._known |= {"layer_norm"} if layer_norms else set()
        self._words: dict[nn.Module, set[str]] = {}

    def tracing(self, module: nn.Module) -> bool:
        if isinstance(module, BatchNormBase):
            return False
        forward = type(module).forward
        # Wrappers such as DistributedDataParallel call what they wrap and no part of it.
        foreign = (forward.__module__ or "").startswith("torch.")
        if foreign and forward is not nn.Sequential.forward:
            return False
        if any(isinstance(part, (BatchNormBase, *NORMS)) for part in module.modules()):
            return True
        if forward is nn.Sequential.forward:
            return False
        if self.mentions(module) or any(map(self._may_be_activation, module.modules())):
            return True
        return _refers(module) or may_have_branches(module, self.dropout)

    def mentions(self, module: nn.Module) -> bool:
        """Whether the forward of a module, which is the user's, may call an activation."""
        if module not in self._words:
            self._words[module] = set() if _is_others(module) else mentioned(module) & self._known
        return bool(self._words[module])

    def names(self, module: nn.Module) -> list[str]:
        """Names of the activations that a forward may call."""
        return sorted(self._words[module] & _NAMES) if self.mentions(module) else []

    def applied(self, module: nn.Module) -> str:
        """The name of the user's torch.autograd.Function that a forward applies, if its forward
        calls what activations are made of: `MemoryEfficientSwish`."""
        if _is_others(module) or not inspect.isfunction(forward := type(module).forward):
            return ""
        outside = inspect.getclosurevars(forward)
        for value in (*outside.globals.values(), *outside.nonlocals.values()):
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                code = getattr(value.forward, "__code__", None)
                if code is not None and _WORDS & set(code.co_names):
                    return value.__name__
        return ""

    def _may_be_activation(self, module: nn.Module) -> bool:
        return is_activation(module) or (is_bare(module) and self.mentions(module))


def is_bare(module: nn.Module) -> bool:
    """Whether a module has no parts and no tensors."""
    return not (module._modules or module._parameters or module._buffers)


def _is_others(module: nn.Module) -> bool:
    if is_scripted(module) or is_container(module):
        return True
    forward = getattr(type(module).forward, "__module__", None) or ""
    return forward.partition(".")[0] in ("torch", "fusedtrain")


def _refers(module: nn.Module) -> bool:
    """Whether an attribute holds a module without registering it: `self.parent = [parent]`."""
    held = (v if type(v) in (list, tuple) else (v,) for v in vars(module).values())
    return any(isinstance(item, nn.Module) for values in held for item in values)


@dataclass(eq=False, kw_only=True)
class ActivationCall(Unit):
    """One activation in a forward, which one call of a function computes; without a `match` it
    stays."""

    lines, left = "calls", "left_calls"

    match: Match | None = None
    of_use: bool = True

    @property
    def idle(self) -> str | None:
        return None if self.of_use else GAINS_NOTHING

    def written(self, change: Change, copy: Copy) -> fx.Node:
        match, graph = self.match, copy.graph
        assert match is not None
        input = copy.of(match.input)
        if match.is_formula:
            arguments = (input, match.name, match.number, match.widens)
            return graph.call_function(activated, arguments, dict(match.parameters))
        if match.root.op == "call_method":
            args, kwargs = fx.node.map_arg((match.root.args, match.root.kwargs), copy.of)
            return graph.call_function(method, (args[0], str(match.root.target), *args[1:]), kwargs)
        function = _WRITTEN.get(match.name) or getattr(fused_functional, match.name)
        parameters = {key: copy.of(value) for key, value in match.parameters.items()}
        return graph.call_function(function, (input,), parameters)

    def line(self, source: str) -> Applied:
        return Applied(self.name, source, self.title)


def _kept(match: Match) -> tuple[fx.Node, ...]:
    """Values that the fused function keeps for backward, where it does not say so by a copy."""
    if match.in_place or match.name not in INDEX:  # torch keeps as much as those of `OTHERS`
        return ()
    if POINTWISE[INDEX[match.name]].saves == "input":
        return (match.input,)
    return () if match.name in KEEP_OUTPUT else (match.root,)


def find_calls(
    rules: Rules, candidates: Candidates, known: set[int], memory: str
) -> Iterator[ActivationCall]:
    """All of a model, in the order of its forwards. `known`: ids of modules that have a line of
    their own in the report."""
    flow = rules.flow
    for name, module in flow.model.named_modules():
        if id(module) in known:
            continue
        trace, is_told = flow.trace_of(module), candidates.mentions(module)
        if trace is None:
            why = f"torch.fx cannot trace its forward ({flow.failed.get(id(module), 'unknown')})"
            for function in candidates.names(module):
                yield ActivationCall(name=name, module=module, title=function, reason=why)
            continue
        for node in (node for graph in trace.graphs for node in graph.nodes):
            function, match, reason = _called(rules, trace, node, candidates.dropout)
            if not function or (function == "layer_norm" and not candidates.layer_norms):
                continue
            of_use = not match or match.is_formula or gains(function, match.in_place, memory)
            reason = reason or (rules.of_forward if of_use else rules.of_graphs)(trace)
            if is_told or (of_use and not reason):
                change = match and Change(trace, match.nodes, node, _kept(match))
                yield ActivationCall(
                    name=name,
                    module=module,
                    title=function,
                    reason=reason,
                    change=change,
                    match=match,
                    of_use=of_use,
                )


def _called(
    rules: Rules, trace: Trace, node: fx.Node, dropout: bool
) -> tuple[str, Match | None, str]:
    """The activation that ends with a call, or another function of ours, '' if none does, and why
    no fused one can take its arguments."""
    matches = matches_of(node.graph)
    match = matches.get(node)
    if match is None and any(node in other.nodes for other in matches.values()):
        return "", None, ""
    module = trace.callee(node)
    match = match or other_call_of(node) or mean_of(node, module)
    match = match or (dropout_of(node) if dropout else None)
    match = match or (attention_of(node) if is_attention(node, dropout) else None)
    if match is not None:
        reason = "" if module is None else rules.of_part(module, "its module")
        return match.name, match, reason
    if is_clamp_of_relu(node):
        return "clamp", None, "its slope at 0 is 1, and that of ReLU is 0"
    return name_of_call(node) or name_of_other(node), None, "its arguments are not numbers"


def find_modules(flow: Flow, known: set[int]) -> Iterator[Decision]:
    """Modules that are one activation and can be given its class; `known` are others."""
    names = names_of(flow.model)
    for module in flow.model.modules():
        if id(module) in known:
            continue
        entry = _encoder(module) if type(module) in _ENCODERS else _activation(flow, module)
        if entry is not None:
            entry.names = names[id(module)]
            yield entry


def only_activation(flow: Flow, module: nn.Module) -> Match | None:
    """The activation that a module is, and nothing else."""
    trace = flow.trace_of(module)
    if trace is None or trace.inexact or not is_bare(module) or not _is_simple(trace):
        return None
    first, *between, last = trace.graphs[0].nodes
    match = matches_of(trace.graphs[0]).get(last.args[0])
    if match is None or match.input is not first or list(match.nodes) != between:
        return None
    return None if match.in_place or match.name not in MODULE_OF else match


def _activation(flow: Flow, module: nn.Module) -> Decision | None:
    match = only_activation(flow, module)
    if match is None or match.widens:
        return None
    if any(node.kwargs or len(node.args) != 1 for _, node in flow.calls(module)):
        return None
    try:
        twin = MODULE_OF[match.name](**match.parameters)
    except TypeError:
        return None
    base = vars(nn.Module())
    return Decision(
        module, type(twin), {name: v for name, v in vars(twin).items() if name not in base}
    )


def _is_simple(trace: Trace) -> bool:
    """Whether nothing but its forward makes a module what it is."""
    cls, reads = type(trace.module), trace.reads
    numbers = Guards(looked_at(reads), outside(reads, trace.module)).compares_numbers()
    if numbers or cls.__call__ is not nn.Module.__call__:
        return False
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        if any(not name.startswith("_") and name not in _USUAL for name in vars(base)):
            return False
        if "__getattr__" in vars(base) or "__setattr__" in vars(base):
            return False
    parameters = inspect.signature(cls.forward).parameters
    return len(parameters) == 2


def _encoder(layer: nn.Module) -> Decision | None:
    """torch.nn's transformer layers call what an attribute holds. The fast path, which torch takes
    without gradients, asks for another attribute and stays."""
    activation: Any = layer.__dict__.get("activation")
    if activation is None or has_own_forward(layer):
        return None
    if record_of(layer) is not None:
        return Decision(layer)
    name, in_place = FUNCTIONS.get(activation, ("", False))
    if not name or in_place or activation is getattr(fused_functional, name):
        return None
    fused = getattr(fused_functional, name)
    target = f"fusedtrain.functional.{name}"
    return Decision(layer, type(layer), {"activation": fused}, target=target)


def target_of(entry: Decision) -> str:
    """New class or function of a converted module, for the report."""
    assert entry.fused is not None
    return entry.target or title(entry.fused)


def left_modules(flow: Flow, candidates: Candidates, known: set[int]) -> Iterator[Unchanged]:
    """Modules that look like an activation, and are none that is known."""
    for name, module in flow.model.named_modules():
        if id(module) in known or not is_bare(module):
            continue
        if function := candidates.applied(module):
            reason = f"its forward applies {function}, a torch.autograd.Function"
            yield Unchanged(name, title(type(module)), reason)
            continue
        trace = flow.trace_of(module)
        if trace is None or not candidates.mentions(module):
            continue
        if not any(map(matches_of, trace.graphs)):
            yield Unchanged(name, title(type(module)), "no fused version of its formula")
