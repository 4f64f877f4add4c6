"""Which batch norms can write over their input: nobody else may read it, nobody may write over the
output, which backward needs then."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.nn.modules import module as global_hooks

from . import nn as fused_nn
from ._batch_norm_in_place import slope_of
from ._dataflow import Flow, Trace, works_in_place
from ._norm_sites import is_activation
from ._rewritten import passes_on
from .nn.norm import _HOOKS, activation_of
from .reference.batch_norm import Pointwise

# These do not save their output.
_MAKERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_CALLED = ("__call__", "forward", "_conv_forward")
# By name, functions and methods that return their argument, or a view of it.
_ALIASES = {
    "alpha_dropout", "bfloat16", "chunk", "contiguous", "detach", "dropout", "dropout1d",
    "dropout2d", "dropout3d", "expand", "expand_as", "feature_alpha_dropout", "flatten", "float",
    "getitem", "half", "movedim", "narrow", "permute", "reshape", "select", "split", "squeeze",
    "swapaxes", "t", "to", "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view",
    "view_as",
}  # fmt: skip


def can_overwrite(
    flow: Flow, norm: nn.Module, act: nn.Module | None, ends: list[tuple[Trace, fx.Node]]
) -> bool:
    """Whether a norm followed by an activation (None: by nothing) can write over its input: every
    call takes what a convolution or a linear layer made for it alone. `ends`: the values that it
    becomes, if not those of its own calls."""
    activation = Pointwise() if act is None else activation_of(act)
    calls = flow.calls(norm)
    if activation is None or slope_of(activation, torch.float32) is None or flow.untraced(norm):
        return False
    if isinstance(norm, (nn.SyncBatchNorm, fused_nn.SyncBatchNormAct)) or _is_hooked(norm):
        return False
    if global_hooks._global_forward_hooks:
        return False
    made = all(_is_made_for_it(trace, node) for trace, _, node in calls)
    values = ends or [(trace, node) for trace, _, node in calls]
    return bool(calls) and made and not any(_is_overwritten(flow, *v, set()) for v in values)


def _is_made_for_it(trace: Trace, node: fx.Node) -> bool:
    value = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    maker = trace.callee(value)
    if trace.inexact or maker is None or not isinstance(value, fx.Node) or len(value.users) != 1:
        return False
    if "forward" in vars(maker) or _is_hooked(maker):
        return False
    base = next((base for base in _MAKERS if isinstance(maker, base)), None)
    # A subclass may do something of its own with its output.
    return base is not None and all(
        getattr(type(maker), name, None) is getattr(base, name, None) for name in _CALLED
    )


def _is_hooked(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _is_overwritten(flow: Flow, trace: Trace, value: fx.Node, seen: set[fx.Node]) -> bool:
    """Whether somebody may write over a value, or over a view of it."""
    if value in seen:
        return False
    seen.add(value)
    for user in value.users:
        if user.op == "output":
            if flow.untraced(trace.module):
                return True
            if any(_is_overwritten(flow, t, n, seen) for t, _, n in flow.calls(trace.module)):
                return True
            continue
        module = trace.callee(user)
        if module is not None:
            inside = [t for t in flow.traces if t.module is module]
            if not inside and not passes_on(module) and works_in_place(trace, user):
                return True
            for t in inside:
                if any(_is_overwritten(flow, t, n, seen) for n in _taken(t, user, value)):
                    return True
            hands_on = bool(module._modules) or passes_on(module) or _returns_input(module)
        else:
            if user.args[:1] == (value,) and works_in_place(trace, user):
                return True
            name = getattr(user.target, "__name__", user.target)
            hands_on = name in _ALIASES
        if hands_on and _is_overwritten(flow, trace, user, seen):
            return True
    return False


def _returns_input(module: nn.Module) -> bool:
    """Whether a module without layers of its own may, as dropout does in eval mode."""
    known = module._parameters or module._buffers or is_activation(module)
    return not known and "pooling" not in type(module).__module__


def _taken(trace: Trace, call: fx.Node, value: fx.Node) -> Iterator[fx.Node]:
    """The stand-ins, in a module's own graphs, for a value that it is called with."""
    for graph in trace.graphs:
        places = [node for node in graph.nodes if node.op == "placeholder"]
        for place, given in zip(places, call.args):
            if given is value:
                yield place
        for place in places:
            if call.kwargs.get(str(place.target)) is value:
                yield place
