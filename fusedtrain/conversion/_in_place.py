"""Tests of what stands before a batch norm: an input that the norm may write over, a bias that it
takes away again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from .. import nn as fused_nn
from .._graph.effects import Effects
from .._graph.flow import Flow, Trace
from .._graph.hooks import all_are_hooked, is_hooked
from .._graph.modules import CONVOLUTIONS, has_own_forward
from ..nn.parts import activation_of
from ..ops.batch_norm_in_place import slope_of
from ..reference.pointwise import Pointwise
from ._sites import EpilogueStep

_CALLED = ("__call__", "forward", "_conv_forward")


def can_overwrite(effects: Effects, norm: nn.Module, steps: Sequence[EpilogueStep]) -> bool:
    """Whether a norm can write over its input: an activation follows at most, of these steps or its
    own; every call takes what a convolution or a linear layer made for it alone; and nobody writes
    over the output, which backward needs then."""
    acts: list[Any] = [step.module for step in steps if step.kind == "act"]
    parts = (getattr(norm, name, None) for name in ("drop", "act"))
    acts += [part for part in parts if part is not None and type(part) is not nn.Identity]
    if len(acts) > 1 or len(acts) < len(steps):
        return False
    flow = effects.flow
    activation = activation_of(effects.form_of(acts[0])) if acts else Pointwise()
    calls = flow.calls(norm)
    if activation is None or slope_of(activation, torch.float32) is None or flow.untraced(norm):
        return False
    if isinstance(norm, (nn.SyncBatchNorm, fused_nn.SyncBatchNormAct)) or is_hooked(norm):
        return False
    if all_are_hooked():
        return False
    makers = [maker_for(*call) for call in calls]
    made = all(m is not None and effects.form_of(m) is m for m in makers)
    values = [(step.trace, node) for step in steps for node in step.nodes][-1:] or calls
    return bool(calls) and made and not any(effects.is_overwritten(*value) for value in values)


def maker_for(trace: Trace, node: fx.Node) -> nn.Module | None:
    """The convolution or linear layer that made the input of a call for this call alone."""
    value = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    maker = trace.callee(value)
    if trace.inexact or maker is None or not isinstance(value, fx.Node) or len(value.users) != 1:
        return None
    if has_own_forward(maker) or is_hooked(maker):
        return None
    # Convolutions do not save their output.
    base = next((base for base in CONVOLUTIONS if isinstance(maker, base)), None)
    # A subclass may do something of its own with its output.
    is_plain = base is not None and all(
        getattr(type(maker), name, None) is getattr(base, name, None) for name in _CALLED
    )
    return maker if is_plain else None


def idle_biases(flow: Flow, norms: Iterable[nn.Module]) -> list[str]:
    """Names of the convolutions whose trained bias goes to such a norm alone.

    The traces are those that `convert` has. Those of `drop_redundant_bias`, in both modes and with
    all that shares a tensor, took 0.8 to 2.5 times as long as `convert` itself (ResNet-50, VGG-16,
    EfficientNet-B0; AMD EPYC, busy, 2026-11-27). Linear layers are left out: whether a norm takes
    the mean over their channels depends on the number of dimensions.
    """
    names = []
    for norm in norms:
        makers = {maker_for(*call) for call in flow.calls(norm)}
        maker = makers.pop() if len(makers) == 1 and norm.training else None
        bias = getattr(maker, "bias", None)
        if maker is None or isinstance(maker, nn.Linear) or len(flow.calls(maker)) != 1:
            continue
        if isinstance(bias, nn.Parameter) and bias.requires_grad:
            names.append(flow.names[id(maker)])
    return names
