"""Hooks of modules, of one and of all, and observers: hooks on all modules that change nothing, in
whose presence a fused op goes on, and tells them of the calls that it takes the place of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as _torch

from .._torch_private import GLOBAL_HOOKS, GLOBAL_HOOKS_WITH_KWARGS, is_fx_tracing
from .modules import FORWARD

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_POST, _PRE, _BACK, _PRE_BACK = GLOBAL_HOOKS
_CALL = nn.Module.__call__
Enter = Callable[[nn.Module, Any], None]
Leave = Callable[[nn.Module, Any, Any, Any], None]  # module, arguments, named ones, output


def has_another_call(cls: type) -> bool:
    """Whether something else is in the place of nn.Module.__call__; not what torch.fx puts there
    while it traces."""
    return cls.__call__ is not _CALL and not is_fx_tracing()


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks run with its calls. A scripted module has no such tables."""
    return any(getattr(module, hooks, None) for hooks in HOOKS)


def all_are_hooked() -> bool:
    """Whether hooks run with the calls of all modules, or what somebody has put into the place of
    nn.Module.__call__; observers do not count."""
    if has_another_call(nn.Module):
        return True
    if not (_POST or _PRE or _BACK or _PRE_BACK):
        return False
    return any(type(hook) is not _Hook for table in GLOBAL_HOOKS for hook in table.values())


def is_untouched(module: nn.Module, cls: type) -> bool:
    """Whether a call of the module runs the forward of this class and nothing else."""
    if type(module) is not cls or has_another_call(cls):
        return False
    state = module.__dict__
    # Not a loop over HOOKS, which takes three times as long.
    return not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
        or FORWARD in state
        or state.get("_compiled_call_impl") is not None
    )


class _Hook:
    """One of the two hooks of an observer."""

    def __init__(self, function: Callable[..., None], leaves: bool) -> None:
        self.function, self.leaves = function, leaves

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if not self.leaves:
            self.function(module, args)
        else:  # after an error torch hands over the output alone, which is None
            named, output = rest if len(rest) == 2 else ({}, rest[0])
            self.function(module, args, named, output)


class Observation:
    """An observer at work, until `remove()`."""

    def __init__(self, enter: Enter, leave: Leave) -> None:
        self.enter, self.leave = enter, leave
        self._handles = [
            _torch.register_module_forward_pre_hook(_Hook(enter, leaves=False)),
            _torch.register_module_forward_hook(
                _Hook(leave, leaves=True), with_kwargs=True, always_call=True
            ),
        ]
        OBSERVERS.append(self)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
            GLOBAL_HOOKS_WITH_KWARGS.pop(handle.id, None)
        if self in OBSERVERS:
            OBSERVERS.remove(self)


OBSERVERS: list[Observation] = []


@contextmanager
def observing(enter: Enter, leave: Leave) -> Iterator[None]:
    """Context in which an observer is told of every call of a module."""
    observation = Observation(enter, leave)
    try:
        yield
    finally:
        observation.remove()


def announced(module: nn.Module, args: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    """The value of a fused op, of which observers hear as of a call of the module."""
    watching, output = list(OBSERVERS), None
    for one in watching:
        one.enter(module, args)
    try:
        output = compute()
    finally:
        for one in reversed(watching):
            one.leave(module, args, {}, output)
    return output
