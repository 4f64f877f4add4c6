"""Products with a gate for a factor: gated linear units and squeeze-and-excitation blocks.

A product is a multiplication of two values in one forward, one of which comes straight from an
activation (a module, a function, a formula) and goes nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._calls import autocasts, is_plain
from .._graph.flow import Trace, is_product
from ..nn.parts import activation_of
from ..ops.gated import gated
from ..reference.pointwise import POINTWISE
from ._calls import only_activation
from ._formulas import Match, activated, is_activation, matches_of
from ._report import Applied
from ._rules import Rules
from ._units import Change, Copy, Unit


@dataclass(eq=False, kw_only=True)
class Product(Unit):
    """A multiplication of `other` by the value of `gate`: a call of the activation `part`, or the
    last call of `match`."""

    lines, left, lost = "products", "left_products", "its gate is part of a batch norm"

    gate: fx.Node
    other: fx.Node
    part: nn.Module | None
    match: Match | None
    inner: Match | None  # the formula that the forward of the module is

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return () if self.part is None else (self.part,)

    def written(self, change: Change, copy: Copy) -> fx.Node:
        graph, match = copy.graph, self.match or self.inner
        opened = self.gate.args[0] if self.match is None else self.match.input
        operands = copy.of(self.other), copy.of(opened)
        if change.place.args[0] is self.gate:
            operands = graph.call_function(laid_out_as, operands[::-1]), operands[1]
        if match is None:  # the module's parameters count as they are at each call
            module = graph.get_attr(str(self.gate.target))
            return graph.call_function(gated_by, (*operands, module))
        if not match.is_formula:
            return graph.call_function(gated, (*operands, match.name), match.parameters)
        arguments = (*operands, match.name, match.number, match.widens)
        return graph.call_function(gated_formula, arguments, dict(match.parameters))

    def line(self, source: str) -> Applied:
        return Applied(self.name, source, self.title)


def laid_out_as(gate: Any, input: Any) -> Any:
    """The other factor of ``gate * input``: a copy in the layout of the gate, which is the first
    operand and decides the layout of the product."""
    if not is_plain(gate) or not is_plain(input) or gate.shape != input.shape:
        return input
    if gate.stride() == input.stride():
        return input
    return torch.empty_like(gate, dtype=input.dtype).copy_(input)


laid_out_as.__module__ = "fusedtrain.conversion"  # the name in pickles


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


gated_by.__module__ = "fusedtrain.conversion"  # the name in pickles


def find_products(rules: Rules) -> Iterator[Product]:
    """All products of a model, in the order of its forwards."""
    for trace in rules.traces:
        for graph in trace.graphs:
            inner = {n for match in matches_of(graph).values() for n in match.nodes}
            for node in filter(is_product, graph.nodes):
                if node in inner:  # x * x.sigmoid() is one activation
                    continue
                # x * gate(s) is the usual order where both are activations.
                pairs = (node.args[::-1], node.args)
                products = [p for pair in pairs if (p := _product(rules, trace, node, *pair))]
                yield from sorted(products, key=lambda product: bool(product.reason))[:1]


def _product(rules: Rules, trace: Trace, node: fx.Node, gate: Any, other: Any) -> Product | None:
    """A product with this gate, with the reason if it has to stay; None if this is no gate."""
    if not isinstance(gate, fx.Node) or not isinstance(other, fx.Node) or gate is other:
        return None
    module, match = trace.callee(gate), matches_of(node.graph).get(gate)
    fused = None if module is None else rules.fused(module)
    known = fused is not None and is_activation(fused)
    inner = None if module is None or known else only_activation(rules.flow, module)
    if match is None and inner is None and not known:
        return None
    opened = (gate,) if match is None else match.nodes
    kept = tuple(gate.all_input_nodes) if match is None else (match.input,)
    return Product(
        name=rules.flow.names[id(trace.module)],
        module=trace.module,
        title=type(fused).__name__ if match is None else match.name,
        reason=rules.of_gate(trace, gate, node, match or inner),
        change=Change(trace, [*opened, node], node, kept),
        gate=gate,
        other=other,
        part=module,
        match=match,
        inner=inner,
    )
