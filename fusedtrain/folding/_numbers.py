"""The numbers of a folded convolution, and calls of F.batch_norm that go into one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from .._graph.flow import Trace, input_of
from .._graph.modules import attribute_of
from .._graph.report import Unchanged
from ..reference import fold as formula
from ._kinds import Statistics, conv_obstacle, is_transposed, spatial
from ._links import Link, Links
from ._report import Folded, FoldReport
from ._rewrite import obstacle, rewrite_all
from ._sharing import Sharing


def apply(link: Link, stats: Statistics) -> None:
    """Sets the new weight and bias of a convolution, computed in float64 on the CPU."""
    conv: Any = link.conv
    weight, bias, gamma, beta, mean, var = (
        None if t is None else t.detach().cpu().double()
        for t in (conv.weight, conv.bias, stats.gamma, stats.beta, stats.mean, stats.var)
    )
    assert weight is not None and mean is not None and var is not None  # noqa: PT018
    groups, numbers = getattr(conv, "groups", 1), (gamma, beta, mean, var, stats.eps)
    if link.norm_first:
        new = formula.fold_weight_before(weight, bias, *numbers, groups)
    else:
        new = formula.fold_weight(weight, bias, *numbers, is_transposed(conv), groups)
    old_bias = conv.weight if conv.bias is None else conv.bias
    data = torch.empty_like(conv.weight).copy_(new[0])  # of the same strides
    conv.weight = nn.Parameter(data, requires_grad=conv.weight.requires_grad)
    conv.bias = nn.Parameter(new[1].to(old_bias), requires_grad=old_bias.requires_grad)


def fold_calls(links: Links, sharing: Sharing, model: nn.Module, report: FoldReport) -> nn.Module:
    """Folds calls of F.batch_norm: the module that makes them gets a forward without them."""
    changed = []
    flow = links.flow
    for trace, node in links.calls():
        name = flow.name(trace.module)
        choice = _choose(links, trace, node)
        if not isinstance(choice, str):
            link = choice[0]
            reason = sharing.called(link)
            choice = reason or sharing.read(link.conv, "weight", "bias", running=True) or choice
        if isinstance(choice, str):
            report.left.append(Unchanged(name, "F.batch_norm", choice))
            continue
        link, stats = choice
        apply(link, stats)
        node.replace_all_uses_with(input_of(node))  # type: ignore[arg-type]
        node.graph.erase_node(node)
        report.folded.append(
            Folded(flow.name(link.conv), type(link.conv).__name__, name, "F.batch_norm")
        )
        if trace not in changed:
            changed.append(trace)
    return rewrite_all(model, changed)


def _choose(links: Links, trace: Trace, node: fx.Node) -> tuple[Link, Statistics] | str:
    names = (
        "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps",
    )  # fmt: skip
    values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if values.get("training", False) is not False:
        return "it is in training mode"
    tensors: list[Tensor | None] = []
    for name in names[1:5]:
        argument = values.get(name)
        if argument is None and name in ("weight", "bias"):
            tensors.append(None)
            continue
        if not isinstance(argument, fx.Node) or argument.op != "get_attr":
            return f"{name} is not a parameter or buffer"
        tensors.append(attribute_of(trace.module, str(argument.target)))
    eps = values.get("eps", 1e-5)
    if not isinstance(eps, float):
        return "eps is not a number"
    link = links.before_call(trace, node)
    if isinstance(link, str):
        return link
    if reason := conv_obstacle(link.conv) or obstacle(trace):
        return reason
    if spatial(link.conv) == 0 and not link.flat:
        return "its input may have three dimensions"
    mean, var, gamma, beta = tensors
    if mean is None or var is None:
        return "it keeps no running statistics"
    channels = getattr(link.conv, "out_channels", None) or getattr(link.conv, "out_features", 0)
    if mean.numel() != channels:
        return f"the convolution has {channels} channels"
    return link, Statistics(gamma, beta, mean, var, eps)
