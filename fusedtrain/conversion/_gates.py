"""Which products have a gate for a factor: gated linear units and squeeze-and-excitation blocks.

A product is a multiplication of two values in one forward, one of which comes straight from a call
of an activation module and goes nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from .._graph.flow import Flow, Trace, is_product
from .._graph.modules import is_hooked
from .._graph.unseen_calls import UnseenCalls
from ..nn.norm import activation_of
from ..reference.pointwise import POINTWISE
from ._norms import is_activation


@dataclass
class Product:
    """`node` multiplies `other` by the value of `gate`, a call of the activation `module`."""

    trace: Trace
    name: str  # of the module whose forward it is in
    node: fx.Node
    gate: fx.Node
    other: fx.Node
    module: nn.Module

    @property
    def activation(self) -> tuple[str, dict[str, Any]]:
        """Name of the function in fusedtrain.functional, and its parameters."""
        pointwise = activation_of(self.module)
        assert pointwise is not None
        row = POINTWISE[pointwise.op]
        values = dict(zip(row.parameters, (pointwise.a, pointwise.b)))
        tanh = row.name == "gelu_tanh"
        return ("gelu", {"approximate": "tanh"}) if tanh else (row.name, values)


def find_products(flow: Flow, excluded: set[int]) -> list[Product]:
    """All products of a model, in the order of its forwards."""
    products = []
    unseen = UnseenCalls(flow)
    for trace in flow.traces:
        if trace.inexact or id(trace.module) in excluded:
            continue
        for node in trace.graphs[0].nodes:
            product = _product(flow, trace, node, excluded)
            if product is not None and not unseen.obstacle(product.module):
                products.append(product)
    return products


def _product(flow: Flow, trace: Trace, node: fx.Node, excluded: set[int]) -> Product | None:
    if not is_product(node):
        return None
    # x * gate(s) is the usual order where both are activations.
    for gate, other in (node.args[::-1], node.args):
        module = trace.callee(gate)
        if module is None or not isinstance(gate, fx.Node) or not isinstance(other, fx.Node):
            continue
        plain = gate is not other and len(gate.users) == 1 and len(gate.args) == 1
        plain = plain and not gate.kwargs
        if plain and _replaceable(module) and id(module) not in excluded:
            return Product(trace, flow.names[id(trace.module)], node, gate, other, module)
    return None


def _replaceable(module: nn.Module) -> bool:
    if not is_activation(module) or "forward" in vars(module):
        return False
    hooked = is_hooked(module)
    pointwise = None if hooked else activation_of(module)
    # In place, it would overwrite what others read.
    return pointwise is not None and pointwise.op >= 0 and not getattr(module, "inplace", False)
