"""Lines of the user's code: the frame that called torch, and the text of a line."""

from __future__ import annotations

import functools
import linecache
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

_PACKAGE = str(Path(__file__).resolve().parents[2])
_LIBRARIES = tuple(
    {
        str(Path(torch.__file__).resolve().parent),
        *(str(Path(sysconfig.get_path(key)).resolve()) for key in ("stdlib", "purelib", "platlib")),
        str(Path(sysconfig.get_path("stdlib"))),
        str(Path(sysconfig.get_path("purelib"))),
        _PACKAGE,
    }
)


class Site(NamedTuple):
    """A line of a file. `function`: the function that contains the line."""

    file: str
    line: int
    function: str = ""

    @property
    def code(self) -> str:
        """The text of the line, without indentation."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{shortest(self.file)}:{self.line}"


def shortest(file: str) -> str:
    """The path as seen from the working directory, where the file is below this directory."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file


@functools.cache
def is_library(file: str) -> bool:
    """Whether the file belongs to Python, to an installed package, or to fusedtrain."""
    if file.startswith("<"):
        return True
    path = str(Path(file).resolve())
    return any(
        file.startswith(f"{folder}/") or path.startswith(f"{folder}/") for folder in _LIBRARIES
    )


def user_frame(skip: Any = None) -> FrameType | None:
    """The innermost frame of the user's code; frames of the `__init__` of `skip` do not count."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_library(code.co_filename) and not _constructs(frame, skip):
            return frame
        frame = frame.f_back
    return None


def _constructs(frame: FrameType, module: Any) -> bool:
    code = frame.f_code
    if module is None or code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is module


def user_site(skip: Any = None) -> Site | None:
    """The line of :func:`user_frame`."""
    frame = user_frame(skip)
    return None if frame is None else site_of(frame)


def site_of(frame: FrameType) -> Site:
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
