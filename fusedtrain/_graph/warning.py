"""The user's line, to which a warning points, and silence."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_warnings() -> Iterator[None]:
    """Context without warnings, and without messages of loggers."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def level_outside() -> int:
    """The stacklevel, for a warning of the caller, of the first frame that is neither in this
    package nor in torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if not str(frame.f_globals.get("__name__")).startswith(("fusedtrain.", "torch.")):
            break
        level, frame = level + 1, frame.f_back
    return level
