"""Biases that a batch norm in training mode takes away again: the report names their number."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .._graph.flow import Flow
from ._in_place import maker_for


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
