"""Contestants in processes of their own, for settings that a process cannot take back.

cuDNN's frontend in torch keeps the algorithm that was chosen first for a shape, whether a search
(``torch.backends.cudnn.benchmark``) or a heuristic chose the algorithm: with and without the
search cannot be compared in one process.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

Handlers = Mapping[str, Callable[[], Any]]


class WorkerFailed(RuntimeError):
    """An error in a worker; the message is the worker's traceback."""


class Worker:
    """A process that is built by ``build(*arguments)`` and answers by the functions so made.

    Args:
        build: a function of a module, which returns name -> function.
        arguments: of ``build``; all must be picklable.
    """

    def __init__(self, build: Callable[..., Handlers], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, name: str, patience: float | None = None) -> Any:
        """Returns the result of the worker's function of this name.

        Raises:
            WorkerFailed: the function raised, the process ended, or was silent for longer than
                ``patience`` seconds.
        """
        try:
            self._pipe.send(name)
            if not self._pipe.poll(patience):
                raise WorkerFailed(f"a worker was silent for {patience:.0f} s")
            error, answer = self._pipe.recv()
        except (EOFError, OSError) as lost:
            self._process.join(5)
            raise WorkerFailed(f"a worker ended: exit {self._process.exitcode}") from lost
        if error:
            raise WorkerFailed(error)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()  # the worker reads the end of the pipe
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, build: Callable[..., Handlers], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    try:
        handlers: Handlers | None = None
        while True:
            name = pipe.recv()
            handlers = handlers or build(*arguments)
            pipe.send(("", handlers[name]()))
    except (EOFError, BrokenPipeError):
        return
    except Exception:
        pipe.send((traceback.format_exc(), None))
