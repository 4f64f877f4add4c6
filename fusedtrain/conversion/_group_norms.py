"""Group norms and instance norms that become one op with what follows them (modulation,
activation) or alone.

    act(norm(x) * (1 + scale) + shift)

From the call of a norm (module or function) forwards, as long as nobody else reads the value. The
modulation is that of AdaGN and DiT as they write it out; modules that hand on their input may lie
in between.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .._calls import suggests_channels_last
from .._graph.flow import Trace
from .._graph.modules import package_and_name
from ..nn.parts import activation_of
from ._formulas import Match, is_activation, matches_of, module_of
from ._fused_calls import INSTANCE_NORMS, group_norm_act_of, group_normed
from ._report import FusedNorm
from ._rules import Rules, unlike
from ._sites import named
from ._units import Change, Copy, Unit

NORMS = (nn.GroupNorm, *INSTANCE_NORMS)
_TIMM = (("timm", "GroupNorm"), ("timm", "GroupNorm1"))
_SUMS = (operator.add, torch.add, "add")
_PRODUCTS = (operator.mul, torch.mul, "mul")


@dataclass(eq=False, kw_only=True)
class GroupNormSite(Unit):
    """A group norm with the calls after it. `act`: the activation, as a module of the model
    (`called`), or made for a function."""

    lines, left = "group_norms", "left"

    call: fx.Node | None = None
    act: nn.Module | None = None
    called: fx.Node | None = None
    modulation: dict[str, fx.Node] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return () if self.called is None or self.act is None else (self.act,)

    @property
    def place(self) -> nn.Module:
        assert self.change is not None
        return self.change.trace.module

    def written(self, change: Change, copy: Copy) -> fx.Node:
        graph, call = copy.graph, self.call
        assert call is not None
        act: Any = None if self.act is None else named(self.act)
        if self.called is not None:  # the module's parameters count as they are at each call
            act = graph.get_attr(str(self.called.target))
        args, kwargs = fx.node.map_arg((call.args, call.kwargs), copy.of)
        kwargs = kwargs | {name: copy.of(value) for name, value in self.modulation.items()}
        if call.op == "call_module":
            norm = graph.get_attr(str(call.target))
            return graph.call_function(group_norm_act_of, (norm, act, *args), kwargs)
        return graph.call_function(group_normed, (act, *args), kwargs)

    def line(self, source: str) -> FusedNorm:
        parts = [*self.modulation, *([] if self.act is None else [type(self.act).__name__])]
        target = "fusedtrain.functional.group_norm_act"
        return FusedNorm(self.name, self.title or source, target, tuple(parts))


def find_group_norms(rules: Rules) -> Iterator[GroupNormSite]:
    """All of a model, in the order of its forwards; group norms that nothing follows only if the
    model is in channels_last, where torch's are slow."""
    parameters = (p for p in rules.flow.model.parameters() if not nn.parameter.is_lazy(p))
    last = any(p.dim() > 3 and suggests_channels_last(p) for p in parameters)
    for trace in rules.traces:
        for graph in trace.graphs:
            yield from filter(None, (_site(rules, trace, node, last) for node in graph.nodes))
    flow = rules.flow
    for module in flow.model.modules():
        if isinstance(module, NORMS) and not flow.calls(module):
            for owner in [o for o in flow.untraced(module) if id(o) in flow.failed][:1]:
                where, why = type(owner).__name__, flow.failed[id(owner)]
                reason = f"torch.fx cannot trace {where} ({why})"
                yield GroupNormSite(name=flow.names[id(module)], module=module, reason=reason)


def _site(rules: Rules, trace: Trace, call: fx.Node, alone: bool) -> GroupNormSite | None:
    norm = trace.callee(call)
    if isinstance(norm, NORMS):
        if not _is_known(norm) or len(call.args) != 1 or call.kwargs:
            return None
    elif call.op != "call_function" or call.target is not F.group_norm or not call.args:
        return None
    nodes, modulation = _modulated(rules, trace, [call])
    act, called, match = _activation(rules, trace, nodes[-1])
    alone = alone or type(norm) in INSTANCE_NORMS
    if act is None and not modulation and not (alone and norm is not None):
        return None
    last = nodes[-1]
    if match is not None:
        nodes += match.nodes
    elif called is not None:
        nodes.append(called)
    if not all(trace.are_alike(call, node) for node in nodes):
        return None
    module = norm or trace.module
    change = Change(trace, nodes, call, crosses=bool(modulation))
    if modulation:  # the operands are there
        change.place, change.kept = last, tuple(modulation.values())
    subjects = [part for part in map(trace.callee, nodes[1:]) if part is not None]
    reasons = [rules.of_part(part, "a module after it") for part in subjects]
    if norm is not None:
        ours = package_and_name(norm) in _TIMM or type(norm) in INSTANCE_NORMS
        base = type(norm) if ours else nn.GroupNorm
        reasons += [unlike(norm, base), rules.of_part(norm, "it")]
    return GroupNormSite(
        name=rules.flow.names[id(module)],
        module=module,
        title="" if norm is not None else "group_norm",
        reason=next(filter(None, (rules.of_forward(trace), *reasons)), ""),
        change=change,
        call=call,
        act=act,
        called=called,
        modulation=modulation,
    )


def _is_known(norm: Any) -> bool:
    """Whether a norm is of torch's class or does what that does, as timm's; another subclass with a
    forward of its own is looked into."""
    if not isinstance(norm, nn.GroupNorm):
        return type(norm) in INSTANCE_NORMS and not norm.track_running_stats
    timm = package_and_name(norm) in _TIMM and not getattr(norm, "_fast_norm", True)
    return timm or type(norm).forward is nn.GroupNorm.forward


def _only_user(trace: Trace, value: fx.Node) -> fx.Node | None:
    return None if trace.is_kept(value) or len(value.users) != 1 else next(iter(value.users))


def _modulated(
    rules: Rules, trace: Trace, nodes: list[fx.Node]
) -> tuple[list[fx.Node], dict[str, fx.Node]]:
    """The calls from the norm on up to the activation, and the operands of the modulation."""
    nodes, modulation = list(nodes), dict[str, fx.Node]()
    while (user := _only_user(trace, nodes[-1])) is not None:
        module = trace.callee(user)
        if type(module) is nn.Identity and user.args == (nodes[-1],) and not user.kwargs:
            nodes.append(user)
        elif not modulation and (factor := _operand(user, nodes[-1], _PRODUCTS)) is not None:
            scale = _less_one(factor)
            if scale is None or _only_user(trace, factor) is None:
                break
            modulation["scale"] = scale
            nodes += [factor, user]
        elif (
            "shift" not in modulation
            and modulation
            and ((shift := _operand(user, nodes[-1], _SUMS)) is not None)
        ):
            modulation["shift"] = shift
            nodes.append(user)
        else:
            break
    return nodes, modulation


def _operand(node: fx.Node, value: fx.Node, functions: tuple[Any, ...]) -> fx.Node | None:
    """The other operand of a sum or product of a value."""
    is_call = node.op in ("call_function", "call_method") and node.target in functions
    if not is_call or len(node.args) != 2 or node.kwargs:
        return None
    other = node.args[1] if node.args[0] is value else node.args[0]
    return other if isinstance(other, fx.Node) and other is not value else None


def _less_one(factor: fx.Node) -> fx.Node | None:
    """`scale` of ``1 + scale``."""
    if factor.target not in _SUMS or len(factor.args) != 2 or factor.kwargs:
        return None
    for one, scale in (factor.args, factor.args[::-1]):
        if type(one) in (int, float) and one == 1 and isinstance(scale, fx.Node):
            return scale
    return None


def _activation(
    rules: Rules, trace: Trace, value: fx.Node
) -> tuple[nn.Module | None, fx.Node | None, Match | None]:
    """The activation of a value: a module that does it, its call, or the calls of a function."""
    if trace.is_kept(value):
        return None, None, None
    for match in matches_of(value.graph).values():
        alone = match.computes(value) or (
            list(value.users) == [match.root] and len(match.nodes) == 1
        )
        if match.input is value and alone:
            made = module_of(match)
            return made, None, match if made is not None else None
    user = _only_user(trace, value)
    module = None if user is None else trace.callee(user)
    if user is None or module is None or user.args != (value,) or user.kwargs:
        return None, None, None
    fused = rules.fused(module)
    point = activation_of(fused) if is_activation(fused) else None
    if point is None or point.op < 0:
        return None, None, None
    return module, user, None
