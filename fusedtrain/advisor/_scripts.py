"""Runs a user's script in a fresh process until it has taken so many optimizer steps.

The parent calls `in_fresh_process` with the name of a `Watcher`. The child (`__main__.py`, started
by `_child.py`) makes the watcher and runs the script as ``__main__`` with its own arguments, as
Python does. A step is an optimizer's ``step()``, of whichever optimizer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ._child import command
from ._views import users_part

DONE, ENDED, RAISED, STOPPED = "done", "ended", "raised", "stopped"
EXITED, DIED = "exited", "died"
_GRACE = 20  # seconds after Ctrl-C in which the child may write its results
# Seconds in which a script that was ended may clean up. A thread of its own that waits for work
# would keep the process for ever.
_CLEAN_UP = 60.0
_LAST_WORDS = 5.0  # seconds in which a script that is terminated may clean up


class Watcher(Protocol):
    """Observer of a script while it runs."""

    def begin(self) -> None:
        """Called before the script's first line."""

    def step(self, count: int, optimizer: Optimizer) -> bool:
        """Called after optimizer step number ``count`` (from 1); returns whether all was seen."""

    def finish(self) -> dict[str, Any]:
        """The results. Called once: all was seen, or the script has ended or raised."""


@dataclass(frozen=True)
class Run:
    """Outcome of a script.

    Args:
        end: "done" (it was ended after enough steps), "ended" (before that, by itself), "raised",
            "exited" (by sys.exit, with a status that is not 0), "stopped" (by Ctrl-C), or "died"
            (the process, without Python's doing).
        steps: optimizer steps that it took.
        status: the exit status of the process.
        results: of the watcher; empty where the process died.
    """

    end: str
    steps: int
    status: int
    results: dict[str, Any] = field(default_factory=dict)


# --- the parent ---


def in_fresh_process(
    watcher: str,
    options: dict[str, Any],
    script: str,
    arguments: Sequence[str],
    *,
    script_prints_to_stderr: bool = False,
) -> Run:
    """Runs the script under a watcher, which the child makes as ``watcher(script, **options)``.

    The script's output and a traceback go where they would go without us, its stdout to stderr if
    stdout is for the results.

    Args:
        watcher: "module:Class".
        options: travel as JSON, and so do the results.
    """
    with tempfile.TemporaryDirectory(prefix="fusedtrain-") as folder:
        task, written = Path(folder, "task.json"), Path(folder, "results.json")
        task.write_text(json.dumps({"watcher": watcher, "options": options}))
        words = command(__package__, str(task), str(written), script, *arguments)
        sys.stdout.flush()
        output = sys.stderr.fileno() if script_prints_to_stderr else None
        # A session of its own: Ctrl-C of a terminal reaches us alone, and what ends us ends it all.
        process = subprocess.Popen(words, stdout=output, start_new_session=True)
        interrupted = False
        try:
            with _raising(signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
                status = _wait(process, written)
        except KeyboardInterrupt:
            interrupted = True
            status = _wait_after_interrupt(process)
        except BaseException:
            end_group(process, _LAST_WORDS)
            raise
        if written.exists():
            return Run(**json.loads(written.read_text()), status=status)
    # Interrupted before it came to the script, the child has nothing to write.
    return Run(STOPPED if interrupted else DIED, 0, status)


def _wait(process: subprocess.Popen[bytes], results: Path) -> int:
    """Waits for the process to end, and kills the process of an ended script that goes on."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
        if results.exists() and json.loads(results.read_text())["end"] == DONE:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_CLEAN_UP)
            end_group(process)


def _wait_after_interrupt(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    try:
        return process.wait(_GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        end_group(process)
        return process.wait()


@contextlib.contextmanager
def _raising(*signals: signal.Signals) -> Iterator[None]:
    """Lets signals that would end this process raise SystemExit, so that it can clean up. They come
    from `timeout`, batch systems and closed terminals."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {one: signal.getsignal(one) for one in signals}
    ours = [one for one, handler in before.items() if handler is signal.SIG_DFL]

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    for one in ours:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in ours:
            signal.signal(one, signal.SIG_DFL)


def end_group(process: subprocess.Popen[Any], grace: float = 0.0) -> None:
    """Ends a process that leads a session, and the processes that it has started, such as workers
    of a loader. `grace`: seconds to clean up."""
    if not hasattr(os, "killpg"):  # Windows
        process.kill()
    else:
        for how in (signal.SIGTERM, signal.SIGKILL) if grace else (signal.SIGKILL,):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, how)
                process.wait(grace)
    process.wait()


# --- the child ---


class _EnoughSteps(BaseException):
    """Ends the script. ``except Exception`` of a script does not catch this."""


def run_task(task: str, results: str, script: str, *arguments: str) -> int:
    """The work of the child; returns the exit status."""
    sent = json.loads(Path(task).read_text())
    watcher: Watcher = pkgutil.resolve_name(sent["watcher"])(script, **sent["options"])
    return run_until(watcher, results, script, arguments)


def run_until(watcher: Watcher, results: str, script: str, arguments: Sequence[str]) -> int:
    """Runs the script as ``__main__``, writes what the watcher has seen; returns the exit status.

    The script may train in another thread, which it need not wait for: Python waits at its end.
    Worker processes of multiprocessing import the script as they do without us, and are not
    watched.
    """
    owner = os.getpid()
    steps, written = 0, False

    def write(end: str) -> None:
        nonlocal written
        if written:
            return
        written = True
        seen = {"end": end, "steps": steps, "results": watcher.finish()}
        partly = Path(f"{results}.part")
        partly.write_text(json.dumps(seen))
        partly.rename(results)

    def after_step(optimizer: Optimizer, *call: Any) -> None:
        nonlocal steps
        if os.getpid() != owner:  # a forked process
            return
        if written:  # the script caught _EnoughSteps and goes on
            sys.stdout.flush()
            os._exit(0)
        steps += 1
        if watcher.step(steps, optimizer):
            write(DONE)
            raise _EnoughSteps

    sys.argv = [script, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        # As when Python runs a script.
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    # A fork server would by default run the script before it receives sys.argv.
    multiprocessing.set_forkserver_preload([])
    register_optimizer_step_post_hook(after_step)
    threading.excepthook = functools.partial(_thread_ends, threading.excepthook)
    try:
        watcher.begin()
        runpy.run_path(script, run_name="__main__")
        _at_end_of_threads(write)
    except _EnoughSteps:
        pass
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        write(STOPPED)
        return 130
    except SystemExit as end:
        if end.code not in (None, 0):
            write(EXITED)
        else:
            _at_end_of_threads(write)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exception(type(error), error, users_part(error.__traceback__))
        write(RAISED)
        return 1
    return 0


def _thread_ends(show: Callable[[Any], Any], ended: Any) -> None:
    """An exception that ends a thread is shown, except ours."""
    if not issubclass(ended.exc_type, _EnoughSteps):
        show(ended)


def _at_end_of_threads(write: Callable[[str], None]) -> None:
    """The script has ended, except for threads that Python waits for: one of them may train."""
    if any(not thread.daemon for thread in threading.enumerate()[1:]):
        atexit.register(write, ENDED)
    else:
        write(ENDED)
