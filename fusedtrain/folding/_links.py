"""Which convolution feeds which batch norm, found by following the data with torch.fx.

Every module that has a forward and children is traced on its own, its children as leaves. Where
that does not show what comes before a norm, larger parts of the model are traced through.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from .._graph.modules import is_hooked
from .._graph.report import shown
from ._kinds import conv_kind, is_norm
from ._trace import Trace, input_of, is_scripted, trace

BATCH_NORM_CALLS = (F.batch_norm, torch.batch_norm)
# Made of other modules, which are looked at instead.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _leaf_of_deep_trace(module: nn.Module) -> bool:
    if is_norm(module) or conv_kind(module) is not None or is_hooked(module):
        return True
    plain = type(module).__module__.startswith("torch.nn.")
    return plain and not isinstance(module, nn.Sequential)


class Link(NamedTuple):
    """A convolution whose output goes into a norm and nowhere else; or the other way round."""

    conv: nn.Module
    norm: nn.Module | None  # None: a call of F.batch_norm
    norm_first: bool
    trace: Trace
    conv_node: fx.Node
    norm_node: fx.Node


class _Border(str):
    """A reason that a larger trace may overcome."""


@dataclass
class Flow:
    """The dataflow of a model. `through` tells of modules that pass their input on unchanged."""

    model: nn.Module
    through: Callable[[nn.Module], bool] = lambda module: type(module) is nn.Identity
    traces: list[Trace] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # id of a module: why it has no trace
    names: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._uses: dict[int, list[tuple[Trace, fx.Node]]] = {}
        self._deep: list[Trace] | None = None
        for name, module in self.model.named_modules():
            self.names[id(module)] = name
            if not is_scripted(module) and self._has_flow(module):
                found = trace(module, lambda _: True)
                if isinstance(found, str):
                    self.failed[id(module)] = found
                    continue
                self.traces.append(found)
                for node in found.graph.nodes:
                    target = found.module_of(node)
                    if target is not None:
                        self._uses.setdefault(id(target), []).append((found, node))

    @staticmethod
    def _has_flow(module: nn.Module) -> bool:
        if is_norm(module) or isinstance(module, _CONTAINERS) or not module._modules:
            return False
        return any(is_norm(m) or conv_kind(m) is not None for m in module.modules())

    def name(self, module: nn.Module) -> str:
        return shown(self.names[id(module)])

    def uses(self, module: nn.Module) -> list[tuple[Trace, fx.Node]]:
        return self._uses.get(id(module), [])

    def is_called(self, norm: nn.Module) -> bool:
        """False where all that contains it was traced and nothing calls it (in this mode)."""
        inside = any(
            id(m) in self.failed and any(part is norm for part in m.modules())
            for m in self.model.modules()
        )
        return inside or bool(self.uses(norm))

    def norms(self) -> Iterator[nn.Module]:
        yield from filter(is_norm, self.model.modules())

    def calls(self) -> Iterator[tuple[Trace, fx.Node]]:
        """The calls of F.batch_norm."""
        for found in self.traces:
            for node in found.graph.nodes:
                if node.op == "call_function" and node.target in BATCH_NORM_CALLS:
                    yield found, node

    def before(self, norm: nn.Module) -> Link | str:
        """The convolution before a norm, or why there is none that only this norm sees."""
        return self._resolve(norm, lambda t, node: self.before_node(t, node, norm))

    def after(self, norm: nn.Module) -> Link | str:
        """The convolution after a norm, likewise."""
        return self._resolve(norm, lambda t, node: self._after_node(t, node, norm))

    def _resolve(self, norm: nn.Module, look: Callable[[Trace, fx.Node], Link | str]) -> Link | str:
        uses = self.uses(norm)
        if len(uses) > 1:
            return f"called {len(uses)} times"
        if not uses:
            return self._why_unseen(norm)
        found = look(*uses[0])
        if not isinstance(found, _Border):
            return found if isinstance(found, str) else self._if_used_once(found)
        for deep in self._deep_traces():
            nodes = [n for n in deep.graph.nodes if deep.module_of(n) is norm]
            if len(nodes) > 1:
                return f"called {len(nodes)} times"
            if nodes:
                link = look(deep, nodes[0])
                if isinstance(link, str):
                    return str(link)
                times = sum(deep.module_of(n) is link.conv for n in deep.graph.nodes)
                return self._if_used_once(link, times)
        return str(found)

    def _if_used_once(self, link: Link, times: int = 1) -> Link | str:
        times = max(times, len(self.uses(link.conv)))
        if times > 1:
            return f"{self.name(link.conv)} is called {times} times"
        return link

    def before_node(self, found: Trace, node: fx.Node, norm: nn.Module | None) -> Link | str:
        source, alone = input_of(node), True
        while True:
            if not isinstance(source, fx.Node):
                return "its input is not a tensor of the same forward"
            alone = alone and len(source.users) == 1
            module = found.module_of(source)
            if module is None:
                if source.op == "placeholder":
                    return _Border("its input comes from outside, where torch.fx cannot see")
                return f"its input is the output of {_title(source)}"
            if conv_kind(module) is not None:
                if not alone:
                    return f"the output of {self.name(module)} is used elsewhere, too"
                return Link(module, norm, False, found, source, node)
            if not self.through(module) or is_hooked(module):
                kind = type(module).__name__
                reason = f"its input is the output of {kind}"
                return _Border(reason) if module._modules and not is_norm(module) else reason
            source = input_of(source)

    def _after_node(self, found: Trace, node: fx.Node, norm: nn.Module | None) -> Link | str:
        at = node
        while True:
            if len(at.users) != 1:
                return "its output has several uses" if at.users else "its output is not used"
            user = next(iter(at.users))
            module = found.module_of(user)
            if module is None:
                outside = user.op == "output"
                return _Border("its output leaves") if outside else "no convolution follows"
            if conv_kind(module) is not None and input_of(user) is at:
                return Link(module, norm, True, found, user, node)
            if not self.through(module) or is_hooked(module):
                inner = module._modules and not is_norm(module)
                return _Border("into a module") if inner else "no convolution follows"
            at = user

    def _why_unseen(self, norm: nn.Module) -> str:
        untraced = [
            m
            for m in self.model.modules()
            if id(m) in self.failed and any(part is norm for part in m.modules())
        ]
        if not untraced:
            return "no forward calls it"
        innermost = untraced[-1]
        return f"torch.fx cannot trace {self.name(innermost)} ({self.failed[id(innermost)]})"

    def _deep_traces(self) -> list[Trace]:
        """Of the model, or of the largest parts of it that can be traced."""
        if self._deep is None:
            self._deep = []
            places: dict[int, int] = {}  # how often a module is registered
            for parent in self.model.modules():
                for child in parent._modules.values():
                    places[id(child)] = places.get(id(child), 0) + 1

            def visit(module: nn.Module) -> None:
                if not self._has_flow(module) and not isinstance(module, _CONTAINERS):
                    return
                shared = module is not self.model and any(
                    places.get(id(m), 0) > 1 for m in module.modules()
                )
                found = "shared" if shared else trace(module, _leaf_of_deep_trace)
                if isinstance(found, Trace):
                    assert self._deep is not None
                    self._deep.append(found)
                    return
                for child in module._modules.values():
                    if child is not None:
                        visit(child)

            visit(self.model)
        return self._deep


def is_flat(found: Trace, source: object) -> bool:
    """Whether a node's value surely has two dimensions, as after torch.flatten(x, 1)."""
    while isinstance(source, fx.Node):
        module = found.module_of(source)
        if isinstance(module, nn.Flatten):
            return module.start_dim == 1 and module.end_dim == -1
        if source.op == "call_function" and source.target is torch.flatten:
            return source.args[1:] == (1,) or source.kwargs == {"start_dim": 1}
        if source.op == "call_method" and source.target == "flatten":
            return source.args[1:] == (1,) or source.kwargs == {"start_dim": 1}
        keeps = module is not None and (
            isinstance(module, (nn.Linear, nn.Dropout, nn.Identity))
            or type(module).__module__ == "torch.nn.modules.activation"
            or is_norm(module)
        )
        if not keeps and source.target not in (F.relu, torch.relu, F.dropout):
            return False
        source = input_of(source)
    return False


def _title(node: fx.Node) -> str:
    target: Any = node.target
    if node.op == "call_function":
        return f"a call of {target.__name__}"
    return f"a call of .{target}()" if node.op == "call_method" else str(target)


ADDITIONS = (operator.add, operator.iadd, torch.add)
