"""Modules that call torch's attention: their forward runs with ours in its place.

Few forwards of attention can be traced. So the forward stays what it is, and runs within a context
that sees the functions which it calls.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from .. import functional as fused_functional
from .._calls import autocast_is_on
from .._graph.flow import Flow
from .._graph.forward import Rewritten, obstacle_of, rewritten_of
from .._graph.hooks import observing
from .._graph.modules import is_scripted, names_of
from .._torch_private import top_saved_tensors_hooks
from ..ops.attention import is_faster
from ._classes import Decision

WORDS = {"scaled_dot_product_attention"}  # in a forward that calls it
_TORCHS = torch_functional.scaled_dot_product_attention
_MULTI_HEAD = torch_functional.multi_head_attention_forward
_PLAIN = {Tensor, nn.Parameter}
_TARGET = "fusedtrain.functional.scaled_dot_product_attention"
_SOURCE = "def forward(self, *args, **kwargs):\n    return attending(self, {}, args, kwargs)\n"


def _dropout_p(args: Any, kwargs: Any) -> Any:
    return kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)


def is_attention(node: fx.Node, drops: bool) -> bool:
    """Whether a call is one of torch's attention that ours can take the place of. `drops`: also
    with dropout, whose random numbers are ours then."""
    if node.op != "call_function" or node.target is not _TORCHS:
        return False
    p = _dropout_p(node.args, node.kwargs)
    return drops or (isinstance(p, (int, float)) and p == 0)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Ours but for dropout, whose random numbers stay torch's."""
    drops = _dropout_p(args, kwargs) != 0
    function = _TORCHS if drops else fused_functional.scaled_dot_product_attention
    return function(*args, **kwargs)


@functools.cache
def _multi_head(stock: Any, drops: bool) -> Any:
    """The function of nn.MultiheadAttention, which calls our attention."""
    names = dict(stock.__globals__)
    names["has_torch_function"] = lambda _: False  # modes further out see the functions within
    if drops:
        names["scaled_dot_product_attention"] = fused_functional.scaled_dot_product_attention
        names["dropout"] = fused_functional.dropout  # of weights that are returned, too
    else:
        names["scaled_dot_product_attention"] = _attention
    function = types.FunctionType(
        stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__
    )
    function.__kwdefaults__ = stock.__kwdefaults__
    return function


def _surroundings() -> tuple[bool, Any]:
    """Whether gradients are recorded, and the innermost hooks of saved tensors."""
    return torch.is_grad_enabled(), top_saved_tensors_hooks(True)


class _Attending(TorchFunctionMode):
    """Context in which calls of torch's attention run ours; but within torch.utils.checkpoint in
    the forward, which computes again in backward, where no forward is at work."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self._drops, self._surroundings = drops, _surroundings()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_one = func is _TORCHS or func is _MULTI_HEAD
        if not is_one or not set(types) <= _PLAIN or _surroundings() != self._surroundings:
            pass
        elif func is _TORCHS:
            func = fused_functional.scaled_dot_product_attention if self._drops else _attention
        else:
            func = _multi_head(func, self._drops)
        return func(*args, **(kwargs or {}))


_FILES = str(Path(torch.__file__).parent)


def _is_patched() -> bool:
    """Whether somebody has put functions of his own into torch.nn.functional: under a mode torch's
    would call them twice."""
    names = vars(torch_functional)
    if names.get("scaled_dot_product_attention") is not _TORCHS:
        return True
    return any(
        type(function) is types.FunctionType
        and not function.__code__.co_filename.startswith(_FILES)
        for function in names.values()
    )


def attending(module: nn.Module, drops: bool, args: Any, kwargs: Any) -> Any:
    """The forward of a module's class with our attention; NotImplemented where that is not faster.
    `drops`: dropout has our random numbers."""
    drops_now = drops and module.training
    if not (drops_now or torch.is_grad_enabled()):
        return NotImplemented
    if isinstance(module, nn.MultiheadAttention) and not module.training:
        return NotImplemented  # it may take its fast path
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if any(t.is_nested for t in tensors) or _is_patched():
        return NotImplemented
    floating = filter(Tensor.is_floating_point, (*tensors, *module.parameters()))
    input = next(floating, None)
    if input is None or not is_faster(input.device.type):
        return NotImplemented
    narrow = input.itemsize == 2 or autocast_is_on(input.device.type)
    rewritten = rewritten_of(module)
    if rewritten is None or not (narrow or drops_now):
        return NotImplemented
    with _Attending(drops):
        return rewritten.stock(module, *args, **kwargs)


attending.__module__ = "fusedtrain.conversion"  # the name in pickles


def attends(rewritten: Rewritten) -> bool:
    """Whether a forward of an earlier conversion is that of a module that calls attention."""
    return "attending" in rewritten.imports


class _Watching(TorchFunctionMode):
    """Calls `seen` at each call of torch's attention."""

    def __init__(self, seen: Any) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _TORCHS or func is _MULTI_HEAD:
            self._seen()
        return func(*args, **(kwargs or {}))


@contextmanager
def callers_of_attention() -> Iterator[dict[nn.Module, None]]:
    """Context of a run of the stock model: the modules whose own forward calls torch's attention,
    in the order of their calls."""
    running, callers = list[nn.Module](), dict[nn.Module, None]()

    def leave(module: nn.Module, *_: Any) -> None:
        if module in running:
            del running[running.index(module) :]

    def seen() -> None:
        if running:
            callers[running[-1]] = None

    with observing(lambda module, _: running.append(module), leave), _Watching(seen):
        yield callers


def multi_head_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules with dropout, which are known without a run."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.dropout > 0:
            yield module


def find_attention(
    flow: Flow, callers: Iterable[nn.Module], excluded: set[int], drops: bool
) -> Iterator[Decision]:
    """A decision for each caller whose calls are not seen in a trace."""
    names = names_of(flow.model)
    devices = {p.device.type for p in flow.model.parameters()}
    if not any(map(is_faster, devices)):
        return
    callers = list(callers)
    stay = {id(m) for m in callers if id(m) in excluded or obstacle_of(m) or is_scripted(m)}
    for module in callers:
        trace = flow.trace_of(module)
        if id(module) not in names or (trace is not None and trace.is_known):
            continue
        reason = "excluded" if id(module) in excluded else obstacle_of(module)
        reason = reason or ("scripted" if is_scripted(module) else "")
        if not reason and any(id(part) in stay for part in module.modules()):
            reason = "a module within it stays, and its forward would run ours, too"
        imports = {"attending": "fusedtrain.conversion:attending"}
        forward = _SOURCE.format(drops), imports
        yield Decision(
            module, type(module), reason=reason, names=names[id(module)], forward=forward,
            target=_TARGET,
        )  # fmt: skip
