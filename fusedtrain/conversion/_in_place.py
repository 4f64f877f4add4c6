"""Test for batch norms that can write over their input: nobody else may read it, nobody may write
over the output, which backward needs then."""

from __future__ import annotations

import torch
from torch import fx, nn

from .. import nn as fused_nn
from .._graph.effects import Effects
from .._graph.flow import Trace, Value
from .._graph.hooks import all_are_hooked, is_hooked
from .._graph.modules import CONVOLUTIONS
from ..nn.parts import activation_of
from ..ops.batch_norm_in_place import slope_of
from ..reference.pointwise import Pointwise

_CALLED = ("__call__", "forward", "_conv_forward")


def can_overwrite(
    effects: Effects, norm: nn.Module, act: nn.Module | None, ends: list[Value]
) -> bool:
    """Whether a norm followed by an activation (None: by nothing) can write over its input: every
    call takes what a convolution or a linear layer made for it alone. `ends`: the values that it
    becomes, if not those of its own calls."""
    flow = effects.flow
    activation = Pointwise() if act is None else activation_of(act)
    calls = flow.calls(norm)
    if activation is None or slope_of(activation, torch.float32) is None or flow.untraced(norm):
        return False
    if isinstance(norm, (nn.SyncBatchNorm, fused_nn.SyncBatchNormAct)) or is_hooked(norm):
        return False
    if all_are_hooked():
        return False
    made = all(_is_made_for_it(*call) for call in calls)
    return bool(calls) and made and not any(effects.is_overwritten(*v) for v in ends or calls)


def _is_made_for_it(trace: Trace, node: fx.Node) -> bool:
    value = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    maker = trace.callee(value)
    if trace.inexact or maker is None or not isinstance(value, fx.Node) or len(value.users) != 1:
        return False
    if "forward" in vars(maker) or is_hooked(maker):
        return False
    # Convolutions do not save their output.
    base = next((base for base in CONVOLUTIONS if isinstance(maker, base)), None)
    # A subclass may do something of its own with its output.
    return base is not None and all(
        getattr(type(maker), name, None) is getattr(base, name, None) for name in _CALLED
    )
