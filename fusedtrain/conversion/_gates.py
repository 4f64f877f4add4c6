"""Which products have a gate for a factor: gated linear units and squeeze-and-excitation blocks.

A product is a multiplication of two values in one forward, one of which comes straight from an
activation (a module, a function, a formula) and goes nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._calls import is_plain
from .._graph.flow import Flow, Trace, is_product
from .._graph.modules import is_hooked
from .._graph.unseen_calls import UnseenCalls
from ..nn.parts import activation_of
from ..ops.gated import gated
from ..reference.pointwise import POINTWISE
from ._formulas import Match, matches_of
from ._norms import is_activation, module_of


@dataclass
class Product:
    """`node` multiplies `other` by the value of `gate`: a call of the activation `module`, or the
    last call of `match`."""

    trace: Trace
    name: str  # of the module whose forward it is in
    node: fx.Node
    gate: fx.Node
    other: fx.Node
    module: nn.Module | None
    match: Match | None = None
    aside: bool = False  # the module goes on doing its work for callers that nobody sees

    @property
    def opened(self) -> tuple[fx.Node, ...]:
        """The calls of the activation."""
        return (self.gate,) if self.match is None else self.match.nodes

    @property
    def kept(self) -> tuple[fx.Node, ...]:
        return tuple(self.gate.all_input_nodes) if self.match is None else (self.match.input,)

    @property
    def title(self) -> str:
        return type(self.module).__name__ if self.match is None else self.match.name

    @property
    def activation(self) -> tuple[str, dict[str, Any]]:
        """Name of the function in fusedtrain.functional, and its parameters."""
        if self.match is not None:
            return self.match.name, self.match.parameters
        assert self.module is not None
        pointwise = activation_of(self.module)
        assert pointwise is not None
        row = POINTWISE[pointwise.op]
        values = dict(zip(row.parameters, (pointwise.a, pointwise.b)))
        tanh = row.name == "gelu_tanh"
        return ("gelu", {"approximate": "tanh"}) if tanh else (row.name, values)


def gated_by(input: Tensor, gate: Tensor, module: nn.Module) -> Tensor:
    """``input * module(gate)``, as one op where the module is an activation without hooks."""
    traced = torch.compiler.is_compiling() or not is_plain(gate)
    in_place = getattr(module, "inplace", False)  # the gate changes, then
    activation = None if traced or in_place else activation_of(module)
    if activation is None or activation.op < 0:
        product: Tensor = input * module(gate)
        return product
    row = POINTWISE[activation.op]
    values = dict(zip(row.parameters, (activation.a, activation.b)))
    return gated(input, gate, row.name, **values)


gated_by.__module__ = "fusedtrain.conversion"  # the name in pickles


def find_products(flow: Flow, excluded: set[int]) -> list[Product]:
    """All products of a model, in the order of its forwards."""
    products = []
    unseen = UnseenCalls(flow)
    for trace in flow.traces:
        if trace.inexact or id(trace.module) in excluded:
            continue
        for node in trace.graphs[0].nodes:
            product = _product(flow, trace, node, excluded)
            if product is None:
                continue
            if product.module is not None and unseen.obstacle(product.module):
                product.aside = True
            products.append(product)
    return products


def _product(flow: Flow, trace: Trace, node: fx.Node, excluded: set[int]) -> Product | None:
    if not is_product(node):
        return None
    matches = matches_of(node.graph)
    if node in matches:
        return None  # x * x.sigmoid() is one activation
    # x * gate(s) is the usual order where both are activations.
    for gate, other in (node.args[::-1], node.args):
        match = matches.get(gate) if isinstance(gate, fx.Node) else None
        if match is not None and isinstance(other, fx.Node) and _opens(trace, match, node, other):
            return Product(
                trace, flow.names[id(trace.module)], node, match.root, other, None, match
            )
        module = trace.callee(gate)
        if module is None or not isinstance(gate, fx.Node) or not isinstance(other, fx.Node):
            continue
        plain = gate is not other and len(gate.users) == 1 and len(gate.args) == 1
        plain = plain and not gate.kwargs
        if plain and _replaceable(module) and id(module) not in excluded:
            return Product(trace, flow.names[id(trace.module)], node, gate, other, module)
    return None


def _opens(trace: Trace, match: Match, product: fx.Node, other: fx.Node) -> bool:
    """Whether a product can do the work of an activation that is its factor."""
    if match.root is other or match.in_place or match.widens or len(match.root.users) != 1:
        return False
    if trace.is_kept(match.root) or not trace.are_alike(match.root, product):
        return False
    return module_of(match) is not None


def _replaceable(module: nn.Module) -> bool:
    if not is_activation(module) or "forward" in vars(module):
        return False
    hooked = is_hooked(module)
    pointwise = None if hooked else activation_of(module)
    # In place, it would overwrite what others read.
    return pointwise is not None and pointwise.op >= 0 and not getattr(module, "inplace", False)
