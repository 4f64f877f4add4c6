"""Views of a run that several programs share: lines of the user's code, the calls of models, the
tensors of optimizers."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def _folders(*paths: str | Path) -> tuple[str, ...]:
    """Prefixes of the names of files within, with symbolic links and without."""
    return tuple(f"{p}{os.sep}" for path in paths for p in {str(path), str(Path(path).resolve())})


_OURS = _folders(Path(__file__).parents[1])
TORCH_AND_OURS = _folders(Path(torch.__file__).parent) + _OURS
_INSTALLED = _folders(*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
_LIBRARIES = TORCH_AND_OURS + _INSTALLED


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
    return file.startswith(("<", *_LIBRARIES)) or str(Path(file).resolve()).startswith(_LIBRARIES)


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the first frames that are ours, or that import or run a file."""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        machinery = path.startswith("<") or {"importlib", "runpy.py"} & {*Path(path).parts[-2:]}
        if not machinery and not path.startswith(_OURS):
            break
        trace = trace.tb_next
    return trace


def running_frames() -> Iterator[FrameType]:
    """The frames of the caller, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_site(skip: Any = None) -> Site | None:
    """The innermost line of the user's code; the `__init__` of `skip` does not count."""
    for frame in running_frames():
        code = frame.f_code
        if not is_library(code.co_filename) and not _constructs(frame, skip):
            return Site(code.co_filename, frame.f_lineno, code.co_name)
    return None


def _constructs(frame: FrameType, module: Any) -> bool:
    code = frame.f_code
    if module is None or code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is module


class OutermostCalls:
    """Calls of modules with parameters that no other call of such a module contains."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def running(self) -> list[nn.Module]:
        """The outermost module of this thread, and the modules that it calls."""
        modules: list[nn.Module] = vars(self._of_thread).setdefault("modules", [])
        return modules

    def enter(self, module: nn.Module) -> bool:
        """Whether an outermost call begins."""
        running = self.running
        outermost = not running
        if running or next(module.parameters(), None) is not None:
            running.append(module)
        return outermost and bool(running)

    def leave(self, module: nn.Module) -> bool:
        """Whether the module's outermost call ends."""
        running = self.running
        if not any(one is module for one in running):  # its call began before the hooks
            return False
        while running.pop() is not module:
            pass
        return not running


def without_parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are no parts of others; spectral_norm calls a part of a model."""
    modules = list(modules)
    parts = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in parts]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of all its parameters that have one."""
    return [p.grad for p in parameters_of(optimizer) if p.grad is not None]
