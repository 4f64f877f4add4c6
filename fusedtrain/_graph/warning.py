"""The user's line, to which a warning points."""

from __future__ import annotations

import sys


def level_outside() -> int:
    """The stacklevel, for a warning of the caller, of the first frame that is neither in this
    package nor in torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if not str(frame.f_globals.get("__name__")).startswith(("fusedtrain.", "torch.")):
            break
        level, frame = level + 1, frame.f_back
    return level
