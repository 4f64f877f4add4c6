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

    def later(self, undo: Callable[[], Any]) -> None:
        """`undo` is called with the rest."""
        self._undo.callback(undo)

    def undo(self) -> None:
        self._undo.close()
