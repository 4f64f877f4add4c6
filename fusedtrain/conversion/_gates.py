"""Products with a gate for a factor: gated linear units and squeeze-and-excitation blocks.

A product is a multiplication of two values in one forward, one of which comes straight from an
activation (a module, a function, a formula) and goes nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from .._calls import autocasts, is_plain
from .._graph.flow import Flow, Trace, is_product
from .._graph.hooks import is_hooked
from .._graph.report import Unchanged
from ..nn.parts import activation_of
from ..ops.gated import gated
from ..reference.pointwise import POINTWISE
from ._calls import only_activation
from ._formulas import Match, activated, matches_of
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
    inner: Match | None = None  # the formula that the forward of the module is

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

    def replacement(self, graph: fx.Graph, other: Any, opened: Any) -> fx.Node:
        """The call in a copy of the graph, of the activation's input `opened`."""
        match = self.match or self.inner
        if match is None:  # the module's parameters count as they are at each call
            module = graph.get_attr(str(self.gate.target))
            return graph.call_function(gated_by, (other, opened, module))
        if not match.is_formula:
            return graph.call_function(gated, (other, opened, match.name), match.parameters)
        arguments = (other, opened, match.name, match.number, match.widens)
        return graph.call_function(gated_formula, arguments, dict(match.parameters))


def gated_formula(
    input: Any, gate: Any, name: str, number: int, widens: bool, **parameters: Any
) -> Any:
    """``input * activated(gate, ...)``, as one op where that gives the dtype of the formula."""
    wide = widens and autocasts(gate) and not autocasts(gate, "cpu")
    if wide or not is_plain(gate):
        return input * activated(gate, name, number, widens, **parameters)
    return gated(input, gate, name, **parameters)


gated_formula.__module__ = "fusedtrain.conversion"  # the name in pickles


def gated_by(input: Tensor, gate: Tensor, module: nn.Module) -> Tensor:
    """``input * module(gate)``, as one op where the module is an activation."""
    in_place = getattr(module, "inplace", False)  # the gate changes, then
    activation = None if in_place or not is_plain(gate) else activation_of(module)
    if activation is None or activation.op < 0:
        product: Tensor = input * module(gate)
        return product
    row = POINTWISE[activation.op]
    values = dict(zip(row.parameters, (activation.a, activation.b)))
    return gated(input, gate, row.name, **values)


_NO_KERNEL = "no fused version of its gate"
gated_by.__module__ = "fusedtrain.conversion"  # the name in pickles


def find_products(flow: Flow, excluded: set[int]) -> tuple[list[Product], dict[fx.Node, Unchanged]]:
    """All products of a model, in the order of its forwards, and those that have to stay."""
    products: list[Product] = []
    left: dict[fx.Node, Unchanged] = {}
    for trace in flow.traces:
        for graph in trace.graphs:
            inner = {n for match in matches_of(graph).values() for n in match.nodes}
            for node in filter(is_product, graph.nodes):
                if node in inner:  # x * x.sigmoid() is one activation
                    continue
                product = _product(flow, trace, node, excluded)
                if isinstance(product, Product):
                    products.append(product)
                elif product is not None:
                    left[node] = product
    return products, left


def _product(
    flow: Flow, trace: Trace, node: fx.Node, excluded: set[int]
) -> Product | Unchanged | None:
    """A product, or why it has to stay; None of one without a gate."""
    first, second = node.args
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    name, left = flow.names[id(trace.module)], None
    # x * gate(s) is the usual order where both are activations.
    for gate, other in ((second, first), (first, second)):
        module, match = trace.callee(gate), matches_of(node.graph).get(gate)
        known = module is not None and is_activation(module)
        inner = None if module is None or known else only_activation(flow, module)
        if match is None and inner is None and not known:
            continue
        if id(trace.module) in excluded:
            reason = "excluded"
        elif module is not None and id(module) in excluded:
            reason = "its gate is excluded"
        elif not trace.is_known:
            reason = trace.inexact
        else:
            reason = _obstacle(trace, gate, node) or _unfitness(module, match or inner)
        product = Product(trace, name, node, gate, other, module, match, inner)
        if not reason:
            return product
        left = left or Unchanged(name, product.title, reason)
    return left


def _obstacle(trace: Trace, gate: fx.Node, product: fx.Node) -> str:
    if len(gate.users) != 1:
        return "the value of its gate is used elsewhere, too"
    if trace.is_kept(gate):
        return "the value of its gate is stored"
    if not trace.are_alike(gate, product):
        return "its gate is computed under another no_grad, autocast or checkpoint"
    if gate.op == "call_module" and (len(gate.args) != 1 or gate.kwargs):
        return "its gate is called with more than its input"
    return ""


def _unfitness(module: nn.Module | None, match: Match | None) -> str:
    """Why a product cannot do the work of a module, a call or a formula."""
    if module is not None and is_hooked(module):
        return "its gate has hooks"
    if module is not None and "forward" in vars(module):
        return "the forward of its gate is patched"
    if getattr(module, "inplace", False) or (match is not None and match.in_place):
        return "its gate works in place"  # it would overwrite what others read
    if match is not None:
        return "" if module_of(match._replace(widens=False)) else _NO_KERNEL
    assert module is not None
    pointwise = activation_of(module)
    return _NO_KERNEL if pointwise is None or pointwise.op < 0 else ""
