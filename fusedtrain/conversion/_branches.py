"""Sums of residual branches: a branch after layer scale and stochastic depth, plus a shortcut.

From the sum backwards: a call of a module of stochastic depth (or Identity, which stands for one
that never drops), a product with a tensor of the module, or both in either order. Where dropout is
fused, a call of `nn.Dropout` alone, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import functional as fused_functional, nn as fused_nn
from .._graph.flow import Trace, is_product, is_sum
from .._graph.modules import STOCHASTIC_DEPTH, package_and_name
from ..nn.parts import branch_scale_of, is_stochastic_depth
from ..ops.scale_add import residual_add
from ._report import Branched
from ._rules import Rules
from ._units import Change, Copy, Unit

_LAYER_SCALE = ("timm", "LayerScale")
_SHAPES = ("reshape", "view", "unsqueeze", torch.reshape, torch.unsqueeze)
_IN_PLACE = (operator.iadd, "add_")


@dataclass(eq=False, kw_only=True)
class Branch(Unit):
    """A sum of `shortcut` and what `drop` and a product with `scale` made of `branch`."""

    lines = "branches"

    shortcut: fx.Node
    branch: fx.Node
    drop: fx.Node | None
    scale: fx.Node | None  # a tensor, or the call of a module that multiplies with one

    def written(self, change: Change, copy: Copy) -> fx.Node:
        def part(value: fx.Node | None) -> fx.Node | None:
            if value is None or value.op != "call_module":
                return copy.of(value)
            return copy.graph.get_attr(str(value.target))

        operands = copy.of(self.shortcut), copy.of(self.branch), part(self.scale), part(self.drop)
        place = change.place
        order = place.target in _IN_PLACE, place.args[0] is self.shortcut
        return copy.graph.call_function(add_branch, (*operands, *order))

    def line(self, source: str) -> Branched:
        scale = ("layer scale",) if self.scale is not None else ()
        drop = (
            ()
            if self.drop is None
            else (type(self.module.get_submodule(str(self.drop.target))).__name__,)
        )
        return Branched(self.name, source, scale + drop)


def add_branch(
    shortcut: Any,
    branch: Tensor,
    scale: Any,
    drop: nn.Module | None,
    in_place: bool = False,
    shortcut_first: bool = True,
) -> Tensor:
    """``shortcut + drop(branch * scale)``, in one pass where the shapes are those of layer scale
    and stochastic depth, else as it is written: the shortcut may be a number, and the sum may be
    written over the branch. The first operand decides the layout of a sum. `drop` draws the
    numbers that it would draw; `nn.Dropout` draws ours. `scale` is None, a tensor, or a module of
    layer scale, which stands for its `gamma`."""
    if isinstance(drop, nn.Dropout) and not drop.inplace and not in_place:
        if not shortcut_first and not _alike(shortcut, branch):
            return fused_functional.dropout(branch, drop.p, drop.training) + shortcut
        return fused_functional.dropout_add(branch, shortcut, drop.p, drop.training)
    if isinstance(scale, nn.Module):
        scale = scale.gamma
    is_tensor = isinstance(scale, Tensor)  # a number may have taken its place
    dims = [d for d, n in enumerate(scale.shape) if n != 1] if is_tensor else []
    shift = branch.dim() - scale.dim() if is_tensor else 0
    fits = isinstance(shortcut, Tensor) and shortcut.shape == branch.shape
    fits = fits and branch.dim() > 1 and shift >= 0 and len(dims) <= 1
    if fits and scale is not None:
        dim = dims[0] + shift if dims else -1
        fits = bool(dims) and dim > 0 and scale.numel() == branch.shape[dim]
        fits = fits and scale.dtype is branch.dtype
    fits = fits and shortcut.dtype is branch.dtype and (drop is None or is_stochastic_depth(drop))
    fits = fits and (not shortcut_first or shortcut.stride() == branch.stride())
    if not fits:
        branch = branch if scale is None else branch * scale
        branch = branch if drop is None else drop(branch)
        if in_place:
            return branch.add_(shortcut)
        return shortcut + branch if shortcut_first else branch + shortcut
    kept = None if drop is None else branch_scale_of(drop, branch)
    if scale is None:
        return residual_add(shortcut, branch, None, kept)
    return residual_add(shortcut, branch, scale.reshape(-1), kept, dims[0] + shift)


add_branch.__module__ = "fusedtrain.conversion"  # the name in pickles


def _alike(shortcut: Any, branch: Tensor) -> bool:
    """Whether either order of the operands gives a sum the same layout."""
    same = isinstance(shortcut, Tensor) and shortcut.shape == branch.shape
    return same and shortcut.stride() == branch.stride()


def may_have_branches(module: nn.Module, dropout: bool) -> bool:
    """Whether a forward is worth looking at: it has layers of its own, and stochastic depth, layer
    scale, or a parameter like that; dropout, if that is fused."""
    children = [child for child in module._modules.values() if child is not None]
    if not children:
        return False
    scales = (p for p in module._parameters.values() if p is not None)
    if dropout and any(isinstance(child, nn.Dropout) for child in children):
        return True
    known = {*STOCHASTIC_DEPTH, _LAYER_SCALE}
    return any(package_and_name(child) in known for child in children) or any(
        p.dim() > 0 and p.numel() == max(p.shape) for p in scales
    )


def find_branches(rules: Rules, dropout: bool) -> Iterator[Branch]:
    """All of a model, in the order of its forwards. `dropout`: those behind dropout, too."""
    for trace in rules.traces:
        if not rules.of_forward(trace):
            nodes = [node for graph in trace.graphs for node in graph.nodes]
            yield from filter(None, (_branch(rules, trace, node, dropout) for node in nodes))


def _branch(rules: Rules, trace: Trace, node: fx.Node, dropout: bool) -> Branch | None:
    if not is_sum(node) or len(node.args) != 2 or node.kwargs:
        return None
    in_place = node.target in _IN_PLACE
    for place, value in enumerate(node.args):
        other = node.args[1 - place]
        if not isinstance(value, fx.Node) or not isinstance(other, fx.Node) or value is other:
            continue
        if in_place and place == 1:
            continue  # the sum is written over the shortcut
        drop = scale = None
        gone: list[fx.Node] = []
        while len(value.users) == 1:
            if dropout and not gone and not in_place and _drops_out(rules, trace, value):
                gone, drop = [value], value
                (value,) = value.all_input_nodes
                break
            if drop is None and _drops(rules, trace, value):
                drop, following = value, value.args[0]
            elif scale is None and (product := _scaled(value)):
                scale, following = product
            elif scale is None and _scales(rules, trace, value):
                scale, following = value, value.args[0]
            else:
                break
            assert isinstance(following, fx.Node)
            gone.append(value)
            value = following
        # An in-place sum may only overwrite the output of the product.
        if not gone or (in_place and scale is None):
            continue
        if drop is not None and type(trace.callee(drop)) is nn.Identity:
            if scale is None:
                continue
            drop = None
        return Branch(
            name=rules.flow.names[id(trace.module)],
            module=trace.module,
            change=Change(trace, [*reversed(gone), node], node),
            shortcut=other,
            branch=value,
            drop=drop,
            scale=scale,
        )
    return None


def _drops(rules: Rules, trace: Trace, node: fx.Node) -> bool:
    module = _left_out(rules, trace, node)
    return type(module) is nn.Identity or (module is not None and is_stochastic_depth(module))


def _drops_out(rules: Rules, trace: Trace, node: fx.Node) -> bool:
    module = _left_out(rules, trace, node)
    if module is None or type(rules.fused(module)) is not fused_nn.Dropout:
        return False
    assert isinstance(module, nn.Dropout)
    return module.p > 0 and not module.inplace and len(node.all_input_nodes) == 1


def _scales(rules: Rules, trace: Trace, node: fx.Node) -> bool:
    """Whether a node calls a module of layer scale."""
    module = _left_out(rules, trace, node)
    return module is not None and package_and_name(module) == _LAYER_SCALE and not module.inplace


def _left_out(rules: Rules, trace: Trace, node: fx.Node) -> nn.Module | None:
    """The module that a node calls with one argument, if its call may be left out."""
    module = trace.callee(node)
    if module is None or len(node.args) != 1 or node.kwargs or rules.of_part(module, "it"):
        return None
    return module


def _scaled(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Factors of a product with a tensor of the module: that tensor, then the other factor."""
    if not is_product(node):
        return None
    for scale, other in (node.args, node.args[::-1]):
        if isinstance(scale, fx.Node) and isinstance(other, fx.Node) and _is_own(scale):
            return scale, other
    return None


def _is_own(node: fx.Node) -> bool:
    """Whether this is a parameter or buffer of the module, in another shape at most."""
    return any(step.op == "get_attr" for step in _upwards(node))


def _upwards(node: fx.Node) -> Iterator[fx.Node]:
    while True:
        yield node
        shapes = node.op in ("call_method", "call_function") and node.target in _SHAPES
        if not shapes or len(node.all_input_nodes) != 1:
            return
        node = node.all_input_nodes[0]
