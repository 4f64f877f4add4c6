"""Rules of `convert`: whether a module, a call or a forward may change, and the reason if not.

Every rule looks and changes nothing. An empty reason is permission.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from .._graph.flow import Flow, Trace
from .._graph.forward import obstacle_of
from .._graph.hooks import is_hooked, observing
from .._graph.modules import has_own_forward, is_quantized
from .._graph.report import title
from ..nn.depthwise import passes_of
from ..nn.parts import activation_of
from ._formulas import Match, module_of
from ._sites import FUSED, fused_class
from ._source import copied, source_of

# Activations of a few instructions that are one kernel in torch, too, forward and backward, and for
# which torch saves as much: the output. Of LeakyReLU torch saves it only in place; of ReLU6 and
# Hardtanh in place it clones the input.
_ALWAYS = {"relu"}
_IN_PLACE = {"relu", "leaky_relu"}
GAINS_NOTHING = "gains nothing: torch's own is one kernel and saves as much"
TORCH_IS_FASTER = "gains nothing: torch's own kernels are faster in all passes of the example"


def gains(name: str, in_place: bool, memory: str) -> bool:
    """Whether an activation that is part of nothing else is faster, or saves less, as a fused one.

    Args:
        name: of a line of ``FT_POINTWISE``, as torch's function or module computes it.
        memory: of `convert`; "recompute" needs the fused ones.
    """
    return memory == "recompute" or name not in (_IN_PLACE if in_place else _ALWAYS)


@contextmanager
def slow_convolutions(layers: Iterable[nn.Module]) -> Iterator[dict[int, str]]:
    """Context of a run of the stock model. Filled at its end: the ids of those depthwise layers
    that our kernels make faster in no pass of the run, nor in bfloat16, and the reason."""
    ids, reasons = {id(layer) for layer in layers}, dict[int, str]()
    faster: dict[int, bool] = {}

    def leave(module: nn.Module, args: Any, named: Any, _: Any) -> None:
        if id(module) in ids:
            x = args[0] if args else named.get("input")
            # Kernels are chosen at each call, which may run under autocast.
            gained = any(passes_of(module, x)) or any(passes_of(module, _narrowed(x)))
            faster[id(module)] = gained or faster.get(id(module), False)

    with observing(lambda *_: None, leave):
        yield reasons
    reasons.update((key, TORCH_IS_FASTER) for key, gained in faster.items() if not gained)


def _narrowed(value: Any) -> Any:
    is_float32 = isinstance(value, Tensor) and value.dtype is torch.float32
    return value.detach().to(torch.bfloat16) if is_float32 else None


def unlike(module: nn.Module, base: type | None) -> str:
    """Reason why a module is not an instance of `base`, its nearest class with a fused version."""
    if is_quantized(module):
        return "quantised"
    if parametrize.is_parametrized(module):
        return "parametrized"
    if base is None:
        return "no fused version"
    return obstacle_of(module) if type(module) is base else f"subclass of {title(base)}"


def no_kernel(name: str, arguments: str = "") -> str:
    return f"{name} has no kernel inside of batch norm{arguments}"


class Rules:
    """Obstacles that are the same for units of all kinds. `twins`: modules as they will be with
    their fused class, by the ids of the present ones; `undone` are those that proved wrong."""

    def __init__(
        self,
        flow: Flow,
        excluded: set[int],
        twins: Mapping[int, nn.Module],
        undone: Mapping[int, str],
    ) -> None:
        self.flow, self.excluded, self._twins, self._undone = flow, excluded, twins, undone
        # A module that gets a fused class computes all that it does in one op.
        self.traces = [trace for trace in flow.traces if id(trace.module) not in twins]
        self._sources: dict[int, str] = {}

    def fused(self, module: nn.Module) -> nn.Module:
        """The module as it will be, for questions about its class and attributes."""
        undone = id(module) in self._undone
        return module if undone else self._twins.get(id(module), module)

    def of_forward(self, trace: Trace) -> str:
        """Reason why a forward keeps its calls. It may have several ways, for training and for
        evaluation or by the truth of values."""
        return self.of_graphs(trace) or self.of_source(trace)

    def of_graphs(self, trace: Trace) -> str:
        if id(trace.module) in self.excluded:
            return "excluded"
        return "" if trace.is_known else trace.inexact

    def of_source(self, trace: Trace, inexact: str = "") -> str:
        """Reason why a forward can have no source. `inexact`: why its graphs are no use."""
        key = id(trace.module)
        if not inexact and key not in self._sources:
            reasons = (source_of(trace.module, copied(g)[0])[2] for g in trace.graphs)
            self._sources[key] = next(filter(None, reasons), "")
        reason = inexact or self._sources[key]
        name = self.flow.names[key] or "the model"
        return f"{name} cannot be rewritten: {reason}" if reason else ""

    def of_part(self, module: nn.Module, subject: str) -> str:
        """Reason why the call of a module must stay. `subject`: its name in the reason."""
        if id(module) in self.excluded:
            return f"{subject} is excluded"
        if is_hooked(module):
            return f"{subject} has hooks"
        return f"the forward of {subject} is patched" if has_own_forward(module) else ""

    def of_norm(self, norm: nn.Module) -> str:
        """Reason why a norm stays as it is."""
        cls = type(norm)
        near = (base for base in cls.__mro__ if base in FUSED)
        base = next(near, None) if fused_class(norm) is None else cls
        if reason := unlike(norm, base):
            return reason
        if is_hooked(norm):
            return "it has hooks"
        act = getattr(norm, "act", None)
        if act is not None and activation_of(self.fused(act)) is None:
            return no_kernel(type(self.fused(act)).__name__)
        return ""

    def of_gate(self, trace: Trace, gate: fx.Node, product: fx.Node, match: Match | None) -> str:
        """Reason why a product cannot do the work of its gate: the call of a module, or `match`."""
        module = trace.callee(gate)
        return (
            self.of_forward(trace)
            or _of_use(trace, gate, product)
            or ("" if module is None else self.of_part(module, "its gate"))
            or _of_formula(None if module is None else self.fused(module), match)
        )


def _of_use(trace: Trace, gate: fx.Node, product: fx.Node) -> str:
    if len(gate.users) != 1:
        return "the value of its gate is used elsewhere, too"
    if trace.is_kept(gate):
        return "the value of its gate is stored"
    if not trace.are_alike(gate, product):
        return "its gate is computed under another no_grad, autocast or checkpoint"
    if gate.op == "call_module" and (len(gate.args) != 1 or gate.kwargs):
        return "its gate is called with more than its input"
    return ""


def _of_formula(module: nn.Module | None, match: Match | None) -> str:
    if getattr(module, "inplace", False) or (match is not None and match.in_place):
        return "its gate works in place"  # it would overwrite what others read
    if match is not None:
        fits = module_of(match._replace(widens=False)) is not None
    else:
        pointwise = None if module is None else activation_of(module)
        fits = pointwise is not None and pointwise.op >= 0
    return "" if fits else "no fused version of its gate"
