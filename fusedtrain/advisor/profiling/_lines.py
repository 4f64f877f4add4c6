"""Ranges of the profiler that are named after the line of Python that called torch."""

from __future__ import annotations

import os
from typing import Any

from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode

from .._views import TORCH_AND_OURS, running_frames
from ._records import LINE_RANGE

_NOT_THE_USERS = ("<", *TORCH_AND_OURS)


class Lines(TorchFunctionMode):
    """Wraps each call of torch in a range ``LINE_RANGE + "file:line"``.

    The line is the innermost that is neither torch's nor ours: a script's, a model library's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = _line() if self.active else ""
        if not line:
            return func(*args, **(kwargs or {}))
        with record_function(f"{LINE_RANGE}{line}"):
            return func(*args, **(kwargs or {}))


def _line() -> str:
    for frame in running_frames():
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS):
            return f"{_short(file)}:{frame.f_lineno}"
    return ""


def _short(path: str) -> str:
    """Relative to the working directory, or to the packages' folder."""
    path = os.path.abspath(path)
    _, separator, inner = path.rpartition(f"{os.sep}site-packages{os.sep}")
    if separator:
        return inner
    here_and_below = os.getcwd() + os.sep
    return path.removeprefix(here_and_below)
