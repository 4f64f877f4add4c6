"""Gives batch norms what follows them, and takes it out of the forwards around them.

An activation or drop module whose every call has gone into a norm hands on its input, wherever it
is called. A forward is rewritten only for what has no module (a sum, a function), and where some
calls of a module stay.
"""

from __future__ import annotations

import math
import operator
import types
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from .._graph.effects import Effects
from .._graph.flow import Trace
from .._graph.forward import PassesOn, Rewritten, install, remove, resolve, restore
from .._graph.modules import attribute_of
from .._graph.records import assign, record_of
from .._graph.unseen_calls import numbers_of
from ..nn.norm import activation_of
from ..ops.gated import gated
from ..reference.pointwise import POINTWISE
from ._branches import Branch, add_branch
from ._gates import Product
from ._norms import Site, Step, fused_class, has_own_steps
from ._reordering import Unit, obstacle_of, places_of

_SPECIAL = {"NoneType": "types:NoneType", "device": "torch:device"}


@dataclass
class Plan:
    """Sites that can be installed together. `left`: why one lost what it would have taken over."""

    effects: Effects
    sites: list[Site]
    products: list[Product] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)  # id of a norm
    passing: dict[int, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._unfit: dict[int, str] = {}
        self.flow = self.effects.flow
        self._arbitrate()
        self._settle()
        while self._reorders():
            self._settle()

    def _settle(self) -> None:
        """Leaves what all of this can be done together."""
        while self._truncate():
            pass
        self.products = [p for p in self.products if id(p.module) in self.passing]
        taken = {n for site in self.sites for step in site.steps for n in step.nodes}
        taken |= {p.node for p in self.products}
        self.branches = [
            b
            for b in self.branches
            if not taken & {b.node, *b.gone} and not self._unfitness(b.trace)
        ]

    def owners(self) -> list[nn.Module]:
        """Modules whose forward computes a product or a sum otherwise."""
        traces = [p.trace for p in self.products] + [b.trace for b in self.branches]
        return [trace.module for trace in traces]

    def _arbitrate(self) -> None:
        """One norm for each sum: one that can, the one called nearest to it, the later one."""
        best: dict[fx.Node, tuple[tuple[int, ...], Site]] = {}
        for site in self.sites:
            step = site.step("add")
            if step is None:
                continue
            traces = [trace for trace, _ in site.levels]
            level = traces.index(step.trace)
            order = list(step.trace.graphs[0].nodes).index(site.levels[level][1])
            unable = bool(self._obstacle(site, step) or obstacle_of(site, self.effects, {}))
            rank = (-int(unable), -level, order)
            rival = best.get(step.nodes[0])
            if rival is None or rank > rival[0]:
                best[step.nodes[0]] = (rank, site)
                site = rival[1] if rival else site
                if rival is None:
                    continue
            lost = site.step("add")
            assert lost is not None
            site.truncate(lost)

    def _cut(self, site: Site, step: Step, reason: str) -> None:
        site.truncate(step)
        self.left[id(site.norm)] = reason

    def _truncate(self) -> bool:
        """Cuts one step off that cannot be done; whether there was one."""
        taken = {
            node
            for site in self.sites
            for step in site.steps
            if step.is_call
            for node in step.nodes
        }
        self.products = [
            p for p in self.products if p.gate not in taken and not self._unfitness(p.trace)
        ]
        taken |= {p.gate for p in self.products}
        steps = [step for site in self.sites for step in site.steps if step.is_call]
        self.passing = {}
        for module in (*(step.module for step in steps), *(p.module for p in self.products)):
            if module is None or self.flow.untraced(module):
                continue
            if all(node in taken for _, node in self.flow.calls(module)):
                self.passing[id(module)] = module
        for site in self.sites:
            for step in site.steps:
                reason = self._obstacle(site, step)
                if reason:
                    self._cut(site, step, reason)
                    return True
        return False

    def _reorders(self) -> bool:
        """Takes back one step, product or sum that would move across something. Returns whether
        there was one."""
        units: list[Unit] = [*self.sites, *self.products, *self.branches]
        places = places_of(units, self.effects)
        for unit in units:
            obstacle = obstacle_of(unit, self.effects, places)
            if obstacle is None:
                continue
            reason, step = obstacle
            if isinstance(unit, Site):
                assert step is not None
                self._cut(unit, step, reason)
            self.products = [p for p in self.products if p is not unit]
            self.branches = [b for b in self.branches if b is not unit]
            return True
        return False

    def _obstacle(self, site: Site, step: Step) -> str:
        if step.kind != "add":
            passes = step.is_call and id(step.module) in self.passing
            return "" if passes else self._unfitness(step.trace)
        traces = [trace for trace, _ in site.levels]
        level = traces.index(step.trace)
        reasons = [self._unfitness(trace) for trace in traces[: level + 1]]
        if step.overwrites:
            return "the sum is written over its other operand"
        return next(filter(None, reasons), "")

    def _unfitness(self, trace: Trace) -> str:
        """Why a forward cannot be rewritten; '' where it can."""
        key = id(trace.module)
        if key not in self._unfit:
            name = self.flow.names[key] or "the model"
            reason = trace.inexact
            if isinstance(trace.module, fx.GraphModule):
                reason = "it is a GraphModule"
            if not reason:
                copy, _ = _copied(trace)
                reason = _source(trace.module, copy)[2]
            self._unfit[key] = f"{name} cannot be rewritten: {reason}" if reason else ""
        return self._unfit[key]


def apply(plan: Plan) -> list[nn.Module]:
    """Installs all sites of a plan; returns the modules other than norms that have a forward of
    their own now."""
    changed: list[nn.Module] = []
    edits: dict[int, _Edit] = {}

    def edit(trace: Trace) -> _Edit:
        return edits.setdefault(id(trace), _Edit(trace))

    for site in plan.sites:
        assign(site.norm, _class_for(site.norm), _attributes(site))
        for step in site.steps:
            if step.kind == "add":
                traces = [trace for trace, _ in site.levels]
                level = traces.index(step.trace)
                keyword = "residual"
                for trace, callee in site.levels[:level]:
                    edit(trace).routed, edit(trace).keyword = callee, keyword
                    keyword = _keyword(trace)
                edit(step.trace).adds.append((site.levels[level][1], step, keyword))
            elif not (step.is_call and id(step.module) in plan.passing):
                edit(step.trace).removed.append(step.nodes[0])
    for product in plan.products:
        edit(product.trace).products.append(product)
    for branch in plan.branches:
        edit(branch.trace).branches.append(branch)
    for one in edits.values():
        source, imports, _ = one.rewritten()
        install(Rewritten(one.trace.module, source, imports, frozen=one.frozen()))
        changed.append(one.trace.module)
    for module in plan.passing.values():
        install(PassesOn(module))
        changed.append(module)
    return changed


def undo(plan: Plan) -> None:
    """Takes back what `apply` did, and leaves activations their fused classes."""
    for site in plan.sites:
        if record_of(site.norm) is not None:
            restore(site.norm)
        for trace, _ in site.levels:
            remove(trace.module)
    for product in plan.products:
        remove(product.trace.module)
    for branch in plan.branches:
        remove(branch.trace.module)
    for module in plan.passing.values():
        remove(module)


def _class_for(norm: nn.Module) -> type:
    fused = fused_class(norm)
    assert fused is not None
    return fused


def _attributes(site: Site) -> dict[str, Any]:
    """What a norm needs beside its class. In its `__dict__`, modules are no children of it."""
    wanted: dict[str, Any] = {}
    for kind in ("act", "drop"):
        step = site.step(kind)
        if step is not None:
            wanted[kind] = step.module
        elif kind not in site.norm._modules:
            wanted[kind] = nn.Identity()
    add = site.step("add")
    if add is not None:
        wanted["_adds"] = "in place" if add.in_place else "out of place"
    if not site.steps and not has_own_steps(site.norm):
        wanted["_as_torch"] = True
    wanted["overwrite_input"] = site.overwrites or getattr(site.norm, "overwrite_input", False)
    return wanted


@dataclass
class _Edit:
    """All that changes in one forward."""

    trace: Trace
    removed: list[fx.Node] = field(default_factory=list)
    adds: list[tuple[fx.Node, Step, str]] = field(default_factory=list)  # with a keyword
    products: list[Product] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    routed: fx.Node | None = None  # is handed a residual from outside
    keyword: str = ""  # by which it takes that

    def frozen(self) -> dict[str, Any]:
        """The present numbers of the module and of its gates, which stand in the source."""
        numbers = numbers_of(self.trace.module)
        for product in self.products:
            row = POINTWISE[activation_of(product.module).op]  # type: ignore[union-attr]
            for name in (*row.parameters, "approximate"):
                if hasattr(product.module, name):
                    numbers[f"{product.gate.target}.{name}"] = getattr(product.module, name)
        return numbers

    def rewritten(self) -> tuple[str, dict[str, str], str]:
        graph, new = _copied(self.trace)
        if self.routed is not None:
            last = [node for node in graph.nodes if node.op == "placeholder"][-1]
            with graph.inserting_after(last):
                residual = graph.placeholder(_keyword(self.trace), default_value=None)
            new[self.routed].kwargs = {self.keyword: residual}
        for node in self.removed:
            _replace(graph, new[node], new[node].args[0])
        for callee, step, keyword in self.adds:
            total, call = new[step.nodes[0]], new[callee]
            branch, other = total.args[step.place], total.args[1 - step.place]
            order = {node: i for i, node in enumerate(graph.nodes)}
            if isinstance(other, fx.Node) and order[other] > order[call]:
                for node in _chain(call, branch):
                    total.prepend(node)
            call.kwargs = {keyword: other}
            _replace(graph, total, branch)
        # Operands are read off the calls as they are by now: one may be another sum or product.
        for product in self.products:
            node, gate = new[product.node], new[product.gate]
            name, parameters = product.activation
            with graph.inserting_before(node):
                # The activation hands on its input: its call stays for the sake of hooks.
                arguments = (_other(node, gate), gate, name)
                call = graph.call_function(gated, arguments, parameters)
            _replace(graph, node, call)
        for one in self.branches:
            node, gone = new[one.node], [new[n] for n in one.gone]  # from the sum backwards
            scale = None if one.scale is None else new[one.scale]
            branch, shortcut = _other(gone[-1], scale), _other(node, gone[0])
            with graph.inserting_before(node):
                if scale is not None and scale.op == "call_module":
                    scale = graph.get_attr(f"{scale.target}.gamma")
                drop = None if one.drop is None else graph.get_attr(str(one.drop.target))
                in_place = node.target in (operator.iadd, "add_")
                arguments = (shortcut, branch, scale, drop, *([True] if in_place else []))
                call = graph.call_function(add_branch, arguments)
            _replace(graph, node, call)
            for call in gone:
                graph.erase_node(call)
        return _source(self.trace.module, graph)


def _keyword(trace: Trace) -> str:
    """The name of a rewritten forward's residual argument: none of the other arguments'."""
    taken = {str(node.target) for node in trace.graphs[0].nodes if node.op == "placeholder"}
    name = "residual"
    while name in taken:
        name = f"outer_{name}"
    return name


def _other(call: fx.Node, than: fx.Node | None) -> Any:
    """The operand of a call that is not this one."""
    return next(operand for operand in call.args if operand is not than)


def _replace(graph: fx.Graph, node: fx.Node, value: Any) -> None:
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _chain(first: fx.Node, last: Any) -> list[fx.Node]:
    """The calls from that of a norm to that of which the value is added."""
    nodes = [first]
    while nodes[-1] is not last:
        nodes.append(next(iter(nodes[-1].users)))
    return nodes


def _copied(trace: Trace) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    output = graph.graph_copy(trace.graphs[0], new)
    graph.output(output)
    for node in graph.nodes:
        node.type = None
    return graph, new


def _source(module: nn.Module, graph: fx.Graph) -> tuple[str, dict[str, str], str]:
    """Code of a graph, what its names stand for, and why it cannot be used ('' if it can)."""
    for node in graph.nodes:
        if node.op == "get_attr" and attribute_of(module, str(node.target)) is None:
            return "", {}, "its forward makes tensors"
    code = graph.python_code("self")
    used = _names(compile(code.src, "forward", "exec"))
    imports = {}
    for name, value in code.globals.items():
        if name in used:
            imports[name] = _path(name, value)
            if not imports[name]:
                return "", {}, f"its forward calls {name}, which cannot be imported"
    return code.src, imports, ""


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _path(name: str, value: Any) -> str:
    """Where a value can be imported from, as "module:qualified.name"."""
    if isinstance(value, types.ModuleType):
        return f"{value.__name__}:"
    if isinstance(value, float):
        return f"math:{'nan' if math.isnan(value) else 'inf'}"
    path = _SPECIAL.get(name) or (
        f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    )
    try:
        return path if resolve(path) is value else ""
    except (ImportError, AttributeError, ValueError):
        return ""
