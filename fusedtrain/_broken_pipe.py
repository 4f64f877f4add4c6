"""Ends a program quietly where the reader of its output has seen enough: `... | head -1`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ENDED_BY_SIGPIPE = 141  # the exit status of such a program in a shell


@contextmanager
def quiet_pipe() -> Iterator[None]:
    """Context whose output goes out at once; ends the program if nobody reads it."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_ENDED_BY_SIGPIPE)
