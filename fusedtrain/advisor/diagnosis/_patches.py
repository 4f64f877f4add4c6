"""Attributes of classes and modules that are replaced for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_MISSING = object()


class Patches:
    """Replaced attributes. `undo` puts everything back, the latest first, and all of it even if
    one attribute raises."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces the function `owner.name` by `make(function)`."""
        before = vars(owner).get(name, _MISSING)
        original = getattr(owner, name)
        replacement = functools.wraps(original)(make(original))
        setattr(owner, name, replacement)

        def undo() -> None:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.callback(undo)

    def before(self, owner: Any, name: str, call: Callable[..., None]) -> None:
        """Calls of `owner.name` begin with `call`, which gets the same arguments."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                call(*args, **kwargs)
                return original(*args, **kwargs)

            return replacement

        self.wrap(owner, name, make)

    def after(self, owner: Any, name: str, call: Callable[..., None]) -> None:
        """Calls of `owner.name` end with `call`, unless they raise; it gets the same arguments."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def replacement(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                call(*args, **kwargs)
                return result

            return replacement

        self.wrap(owner, name, make)

    def later(self, undo: Callable[[], Any]) -> None:
        """`undo` is called with the rest."""
        self._undo.callback(undo)

    def undo(self) -> None:
        self._undo.close()
