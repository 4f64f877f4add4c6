"""What a user sees of modules whose work `convert` has given to others, and of those others.

Nothing here runs in a forward: the notes are in `repr`, the warnings where a module is hooked or
replaced.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .records import record_of
from .warning import level_outside

NOTE = "hands on its input: fused"
# Methods of a module that put a hook on it.
HOOKING = (
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_backward_hook",
)  # fmt: skip


def warning_method(name: str) -> Callable[..., Any]:
    """A method for the replacement of a forward: warns, and does what the module's method does."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        module: nn.Module = self._module()
        warnings.warn(
            f"{name}: fusedtrain.convert has given the work of this {type(module).__name__} to a "
            "batch norm or a product. A hook sees the result of that op as input and as output, "
            "and what it does to the input comes too late. Call fusedtrain.revert before hooking, "
            "or list the module in `exclude` of convert",
            stacklevel=level_outside(),
        )
        return getattr(type(module), name)(module, *args, **kwargs)

    method.__name__ = method.__qualname__ = name  # pickle looks for it by this name
    return method


def _has_taken_over(module: nn.Module) -> bool:
    """Whether it is a norm that does the work of other modules or of a sum."""
    if record_of(module) is None:
        return False
    mine = vars(module)
    parts = (mine.get(kind) for kind in ("act", "drop"))
    return bool(mine.get("_adds")) or any(
        part is not None and type(part) is not nn.Identity for part in parts
    )


def _check_replaced(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    children = vars(parent).get("_modules")
    old = children.get(name) if isinstance(children, dict) else None
    if old is None or (new is not None and any(part is old for part in new.modules())):
        return
    forward = vars(old).get("forward")
    if getattr(getattr(forward, "__self__", forward), "hands_on", False):
        what = (
            "its work is still done by a batch norm or a product, and what replaces it is done too"
        )
    elif _has_taken_over(old):
        what = "it also does the work of modules behind it, which hand on their input"
    else:
        return
    warnings.warn(
        f"{name}: this {type(old).__name__} was converted by fusedtrain.convert, and {what}. Call "
        "fusedtrain.revert before replacing modules, and convert again",
        stacklevel=level_outside(),
    )


@functools.cache
def watch_replacements() -> None:
    """From now on, replacing what was converted warns. Costs 0.8 us for each module that is
    registered anywhere, and nothing in a forward."""
    register_module_module_registration_hook(_check_replaced)
