"""Activations, and residual additions before them, that go into the convolution."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from .._graph.effects import Effects
from .._graph.flow import Trace, input_of, is_sum
from .._graph.hooks import is_hooked
from .._graph.modules import has_own_forward
from ._conv_act import KINDS, NO_ACT, PLATFORMS, Act, assign
from ._kinds import conv_obstacle
from ._links import flow_of
from ._report import Folded, FoldReport
from ._rewrite import obstacle, replace, rewrite_all
from ._sharing import Sharing

_MODULES = ("torch.nn.modules.activation", "fusedtrain.nn.activation")
_NAMES = {
    "ReLU": "relu",
    "SiLU": "swish",
    "Hardswish": "hardswish",
    "Hardsigmoid": "hardsigmoid",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}
_CALLS: dict[Any, Act] = {
    F.relu: Act("relu"),
    F.relu_: Act("relu"),
    torch.relu: Act("relu"),
    torch.relu_: Act("relu"),
    F.relu6: Act("hardtanh", (0.0, 6.0)),
    F.silu: Act("swish"),
    F.hardswish: Act("hardswish"),
    F.hardsigmoid: Act("hardsigmoid"),
    torch.sigmoid: Act("sigmoid"),
    torch.tanh: Act("tanh"),
    F.sigmoid: Act("sigmoid"),
    F.tanh: Act("tanh"),
}
# Their children are reached by index or key, which a graph module would not allow.
_INDEXED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_METHODS = {"relu": "relu", "relu_": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}


def _of_module(module: nn.Module) -> Act | None:
    if type(module).__module__ not in _MODULES or is_hooked(module) or has_own_forward(module):
        return None
    name, m = type(module).__name__, module
    values: Any = m
    if name == "ReLU6":
        return Act("hardtanh", (0.0, 6.0))
    if name == "Hardtanh":
        return Act("hardtanh", (float(values.min_val), float(values.max_val)))
    if name == "LeakyReLU":
        return Act("leaky_relu", (float(values.negative_slope),))
    if name == "GELU":
        return Act("gelu", (), values.approximate)
    return Act(_NAMES[name]) if name in _NAMES else None


def _of_node(trace: Trace, node: fx.Node) -> Act | None:
    """The activation that a node applies to its first argument."""
    module = trace.callee(node)
    if module is not None:
        return _of_module(module) if len(node.args) == 1 and not node.kwargs else None
    if node.op == "call_method" and len(node.args) == 1 and not node.kwargs:
        name = _METHODS.get(str(node.target))
        return None if name is None else Act(name)
    if node.op == "call_function" and not node.kwargs.keys() - {"inplace"} and node.args:
        extra = node.args[1:]
        if all(isinstance(value, bool) for value in extra):
            return _CALLS.get(node.target)
    return None


class _FusionSite(NamedTuple):
    """``last = act(conv(...) + something)`` in a graph; `addition` is the node of the plus."""

    trace: Trace
    conv_node: fx.Node
    conv: nn.Module
    addition: fx.Node | None
    act: Act
    last: fx.Node

    @property
    def target(self) -> nn.Module | None:
        """The activation module."""
        return self.trace.callee(self.last)


def fuse(model: nn.Module, report: FoldReport) -> nn.Module:
    """Moves activations into the convolutions before them; the root may become another object."""
    flow = flow_of(model)
    sharing, effects = Sharing(model, [flow]), Effects(flow)
    changed: list[Trace] = []
    swapped: dict[int, nn.Module] = {}
    for trace in flow.traces:
        for plans in _plans(effects, trace):
            plan, target = plans[0], plans[0].target
            movable = (
                target is not None
                and all(p.addition is None and p.target is target for p in plans)
                and not any(m is target for m in (model, plan.conv))
                and len(flow.calls(target)) == len(plans)
            )
            # A forward with several ways cannot be rewritten.
            if not movable and (isinstance(trace.module, _INDEXED) or obstacle(trace)):
                continue
            if sharing.called_apart(_modules(plan) if movable else [plan.conv]):
                continue
            label = _label(plan)
            names = flow.name(plan.conv), type(plan.conv).__name__
            assign(plan.conv, plan.act)
            report.fused.append(Folded(*names, flow.name(target or trace.module), label))
            if movable:
                assert target is not None
                swapped[id(target)] = nn.Identity().train(target.training)
            else:
                _rewrite(plan)
                if trace not in changed:
                    changed.append(trace)
    model = replace(model, swapped)
    return rewrite_all(model, changed)


def pack(model: nn.Module, report: FoldReport) -> None:
    """Sets folded convolutions without an activation to the ops of those with one, which keep the
    weight as the platform wants it: 4 of the 53 of a ResNet-50 took 7.6 of 51 ms without."""
    folded = {entry.conv for entry in report.folded}
    for name, module in model.named_modules():
        conv: Any = module
        if name not in folded or type(conv) not in KINDS or conv_obstacle(conv):
            continue
        platform = PLATFORMS.get(conv.weight.device.type)
        if platform is None or not _is_plain(conv):
            continue
        if platform.has(NO_ACT, False, conv.weight.dtype):
            assign(conv, NO_ACT)


def _is_plain(conv: Any) -> bool:
    return conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def _modules(plan: _FusionSite) -> list[nn.Module]:
    """The convolution, the modules that pass on its output, and the activation."""
    modules: list[nn.Module] = []
    node: object = plan.last
    while isinstance(node, fx.Node):
        module = plan.trace.callee(node)
        assert module is not None
        modules.append(module)
        if node is plan.conv_node:
            break
        node = input_of(node)
    return modules[::-1]


def _label(plan: _FusionSite) -> str:
    name = plan.act.name if plan.target is None else type(plan.target).__name__
    if plan.addition is None:
        return name
    return "add" if plan.act == NO_ACT else f"add + {name}"


def _only_user(trace: Trace, node: fx.Node) -> fx.Node | None:
    """The one user of a value, through nn.Identity."""
    while len(node.users) == 1 and not trace.is_kept(node):
        user = next(iter(node.users))
        module = trace.callee(user)
        if module is None or type(module) is not nn.Identity or is_hooked(module):
            return user
        node = user
    return None


def _stands_for(trace: Trace, value: object, node: fx.Node) -> bool:
    """Whether a value is that of the node, through nn.Identity."""
    while isinstance(value, fx.Node) and value is not node:
        if type(trace.callee(value)) is not nn.Identity:
            return False
        value = input_of(value)
    return value is node


def _plans(effects: Effects, trace: Trace) -> list[list[_FusionSite]]:
    """For each convolution, its plan on each way through the forward."""
    calls: dict[nn.Module, list[fx.Node]] = {}
    for graph in trace.graphs:
        for node in graph.nodes:
            conv = trace.callee(node)
            if conv is not None and type(conv) in KINDS:
                calls.setdefault(conv, []).append(node)
    result: list[list[_FusionSite]] = []
    taken: set[fx.Node] = set()
    # From the end: of two convolutions that are added up, the later one knows the other's output.
    for conv, nodes in reversed(calls.items()):
        once = len({node.graph for node in nodes}) == len(nodes) == len(effects.flow.calls(conv))
        candidates = [_plan(effects, trace, node, conv) for node in nodes if once]
        plans = [plan for plan in candidates if plan is not None]
        if len(plans) < len(nodes) or conv_obstacle(conv):
            continue
        lasts = {plan.last for plan in plans}
        if not taken & lasts:
            taken |= lasts
            result.append(plans)
    return result[::-1]


def _plan(effects: Effects, trace: Trace, node: fx.Node, conv: Any) -> _FusionSite | None:
    if len(node.args) != 1 or node.kwargs or not _is_plain(conv):
        return None
    platform = PLATFORMS.get(conv.weight.device.type)
    user = _only_user(trace, node)
    if platform is None or user is None:
        return None
    dtype = conv.weight.dtype
    act = _of_node(trace, user)
    if act is not None:
        has = platform.has(act, False, dtype)
        return _FusionSite(trace, node, conv, None, act, user) if has else None
    other = _added(trace, user, node)
    if other is None or not isinstance(input_of(node), fx.Node):
        return None
    # `other += conv` changes the other one, which somebody may see.
    in_place = user.target in (operator.iadd, "add_") and user.args[0] is other
    if in_place and not effects.is_private(trace, other, user):
        return None
    after = _only_user(trace, user)
    act = None if after is None else _of_node(trace, after)
    # The convolution moves to the last node, and with it both of its inputs are read later.
    if (
        after is not None
        and act is not None
        and platform.has(act, True, dtype)
        and effects.can_wait(trace, [node, user, after])
    ):
        return _FusionSite(trace, node, conv, user, act, after)
    if platform.has(NO_ACT, True, dtype) and effects.can_wait(trace, [node, user]):
        return _FusionSite(trace, node, conv, user, NO_ACT, user)
    return None


def _added(trace: Trace, addition: fx.Node, node: fx.Node) -> fx.Node | None:
    """The other operand of an addition to the value of a node; None if it is no plain addition."""
    if not is_sum(addition) or len(addition.args) != 2 or addition.kwargs:
        return None
    a, b = addition.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return None
    if _stands_for(trace, a, node):
        return b
    return a if _stands_for(trace, b, node) else None


def _rewrite(plan: _FusionSite) -> None:
    trace, graph = plan.trace, plan.conv_node.graph
    # Looked up only now: another plan may have replaced it.
    other = None if plan.addition is None else _added(trace, plan.addition, plan.conv_node)
    arguments = (input_of(plan.conv_node), *(() if other is None else (other,)))
    with graph.inserting_before(plan.conv_node if other is None else plan.last):
        fused = graph.call_module(str(plan.conv_node.target), arguments)
    plan.last.replace_all_uses_with(fused)
    node: fx.Node | None = plan.last
    while node is not None and not node.users:
        inputs = [n for n in node.all_input_nodes if n is not other]
        graph.erase_node(node)
        node = None if node is plan.conv_node or not inputs else inputs[0]
