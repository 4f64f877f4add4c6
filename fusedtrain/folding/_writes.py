"""What in a graph may write in place: nothing is moved across it."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from .._graph.modules import is_hooked
from .._graph.tracer import IN_PLACE
from ._kinds import conv_kind, is_norm
from ._trace import Trace, input_of

_WRITING = {operator.setitem, operator.delitem, *(getattr(operator, name) for name in IN_PLACE)}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_KNOWN = ("torch.nn.modules.", "fusedtrain.nn.")


def _module_writes(module: nn.Module) -> bool:
    """To its input: all that is not known not to."""
    if is_hooked(module) or "forward" in vars(module):
        return True
    if isinstance(module, _CONTAINERS):
        return any(map(_module_writes, module.children()))
    if conv_kind(module) is not None or (is_norm(module) and not module._modules):
        return False
    known = type(module).__module__.startswith(_KNOWN) or is_norm(module)
    return not known or any(getattr(m, "inplace", False) for m in module.modules())


def writes(trace: Trace, node: fx.Node) -> bool:
    """Whether a node may write in place, to whatever."""
    module = trace.module_of(node)
    if module is not None:
        return _module_writes(module)
    if node.op not in ("call_function", "call_method"):
        return False
    if node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
        return True
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "_")
    if target in _WRITING or (name.endswith("_") and not name.endswith("__")):
        return True
    # F.relu(x, True)
    functional = getattr(target, "__module__", "") == "torch.nn.functional"
    if functional and any(value is True for value in node.args):
        return True
    # Of a function that is neither torch's nor an operator nothing is known.
    plain = (str(getattr(target, "__module__", "") or "torch")).partition(".")[0]
    return not isinstance(target, str) and plain not in ("torch", "_operator", "builtins", "math")


def written_between(trace: Trace, first: fx.Node, last: fx.Node, *but: fx.Node | None) -> bool:
    """Whether something may write after one node and before another."""
    node = first.next
    while node is not last and node.op != "root":
        if node not in but and writes(trace, node):
            return True
        node = node.next
    return False


def is_own(trace: Trace, node: object, later: fx.Node) -> bool:
    """Whether nobody uses a value after a node that writes to it, under another name either."""
    while isinstance(node, fx.Node):
        order = {n: i for i, n in enumerate(trace.graph.nodes)}
        for user in node.users:
            if user is not later and (order[user] > order[later] or not _is_fresh(trace, user)):
                return False
        if _is_fresh(trace, node):
            return True
        if type(trace.module_of(node)) not in (nn.Identity, nn.ReLU):
            return False
        later, node = node, input_of(node)
    return False


def _is_fresh(trace: Trace, node: fx.Node) -> bool:
    """Whether a value has memory of its own."""
    module = trace.module_of(node)
    return module is not None and conv_kind(module) is not None
