"""One way through a forward: a clone of the module runs on stand-ins, and leaves no trace in it."""

from __future__ import annotations

import copy
import functools
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import fx, nn

from .forward import has_foreign_forward
from .intercept import Reads
from .modules import is_scripted
from .optional import asks_identity
from .state import State, is_opaque
from .tracer import (
    Choices,
    Tracer,
    Watch,
    answering,
    bypass,
    collector_paused,
    context_now,
    has_block,
    may_ask_mode,
    random_states,
    same_generators,
)
from .warning import silent_warnings

_LISTS = (list, set, deque)
_TABLES = (dict, OrderedDict, defaultdict, Counter)
_NUMBERS = (int, float, str, bool)
_SHARED = frozenset({*_NUMBERS, type(None), torch.Tensor, nn.Parameter, types.FunctionType})
# The module's training flag, that of its children, gradients; None: as they are.
Mode = tuple[bool | None, bool | None, bool | None]


def _clone(root: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """The module, whose forward may store in it what it likes: tensors are shared, no more. And the
    modules by the ids of their clones."""
    clones = {id(m): m if is_scripted(m) else object.__new__(type(m)) for m in root.modules()}

    def copied(value: Any) -> Any:
        kind = type(value)
        if kind in _SHARED:
            return value
        if isinstance(value, nn.Module):
            return clones.get(id(value), value)
        if kind is tuple:
            return tuple(map(copied, value))
        if kind in (dict, OrderedDict):  # empty as a rule: six tables of hooks a module
            return kind([(key, copied(item)) for key, item in value.items()]) if value else kind()
        if kind not in (*_LISTS, *_TABLES):
            return value
        twin = copy.copy(value)
        twin.clear()
        if kind in _TABLES:
            twin.update({key: copied(item) for key, item in value.items()})
        else:
            (twin.update if kind is set else twin.extend)(map(copied, value))
        return twin

    for module in root.modules():
        clone = clones[id(module)]
        if clone is not module:
            vars(clone).update((key, copied(value)) for key, value in vars(module).items())
    originals = {id(clones[id(module)]): module for module in root.modules()}
    return clones[id(root)], originals


@collector_paused()
def trace_once(
    module: nn.Module,
    choices: Choices,
    mode: Mode,
    defaults: dict[str, Any],
    extras: bool = True,
) -> tuple[fx.Graph, Tracer]:
    """One way through a forward, and the tracer, which knows what makes it one of several."""
    root_training, children, gradients = mode
    (clone, originals), tracer, watch = _clone(module), Tracer(choices, extras), Watch()
    forward = type(module).forward
    for part in clone.modules():
        if not is_scripted(part):
            training = root_training if part is clone else children
            if training is not None:
                vars(part)["training"] = training
            if part is not clone and not has_foreign_forward(part):
                vars(part)["forward"] = functools.partial(bypass, tracer, part)
    states, state = random_states(), State([clone], type(clone).__mro__)
    gradients = torch.is_grad_enabled() if gradients is None else gradients
    try:
        with same_generators(), torch.set_grad_enabled(gradients):
            tracer.context = context_now()
            # About what the stand-ins lack.
            with answering(type(clone).forward, tracer), watch, silent_warnings():
                tracer.seen.originals, tracer.parts_train = originals, children
                with tracer.seen:
                    graph = tracer.trace(clone, defaults or None)
                tracer.asks_mode = tracer.seen.asks_mode or may_ask_mode(clone)
            tracer.mark_kept()
            drawn = random_states() != states
        if state.changed():
            tracer.guessed = tracer.guessed or "its forward stores something"
            state.restore()
    except BaseException:
        state.restore()
        raise
    if used := _opaque(tracer.seen.reads):
        tracer.guessed = tracer.guessed or f"its forward uses a {used}"
    if watch.computed or drawn:
        tracer.guessed = tracer.guessed or "its forward computes from more than its input"
    block = has_block(forward.__code__) if hasattr(forward, "__code__") else ""
    if block:
        tracer.guessed = tracer.guessed or f"its forward has a {block} statement"
    if tracer.seen.enters:
        tracer.guessed = tracer.guessed or "its forward works under no_grad, autocast or checkpoint"
    if tracer.seen.asks_state:
        tracer.guessed = tracer.guessed or f"its forward asks {tracer.seen.asks_state}()"
    ran = tracer.seen.reads.ran
    asked = [
        "isinstance" in code.co_names and values is not forward.__globals__
        for (code, kind, _), values in ran.items()
        if issubclass(kind, fx.Proxy)  # in another file `answering` is not there
    ]
    if any(asked) or any(
        asks_identity(code, not issubclass(kind, fx.Proxy)) for code, kind, _ in ran
    ):
        tracer.guessed = tracer.guessed or "its forward asks for the type of its input"
    return graph, tracer


def _opaque(reads: Reads) -> str:
    """The type of an attribute whose state nobody sees; '' as a rule."""
    values = (vars(module).get(name) for module, names in reads.modules.values() for name in names)
    return next((type(value).__name__ for value in values if is_opaque(value)), "")
