"""Attributes of classes and modules that are replaced for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """What was replaced; `undo` puts everything back, the latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

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

        self._undo.append(undo)

    def later(self, undo: Callable[[], Any]) -> None:
        """`undo` is called with the rest."""
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
