"""A command of `make gpu`, which ends in time.

SIGINT asks it to, so that it can say what it knows; 20 s later it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE = 20.0  # seconds from SIGINT to SIGKILL
TICK = 0.25  # seconds of real time between two looks at the clock

Clock = Callable[[], float]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and by what if not by itself: "time" or "hang"."""

    code: int
    by: str = ""

    @property
    def words(self) -> str:
        how = {"time": "stopped by the time limit", "hang": "stopped, for it hung"}.get(self.by)
        return f"{how}, exit {self.code}" if how else f"exit {self.code}"


def _with_parent() -> None:
    """In the child: a group of its own, and death with the parent, whatever kills that. SIGINT is
    heard again where a shell has switched it off, as one does for `make gpu &`."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(
    command: Sequence[str],
    say: Say,
    clock: Clock,
    deadline: float,
    folder: Path,
    environment: Mapping[str, str],
    hangs: Callable[[], bool] = lambda: False,
) -> Ended:
    """Runs a command and shows what it prints as it comes.

    Args:
        command: the program and its arguments.
        say: gets each line.
        clock: seconds.
        deadline: by the clock; the command is over by then.
        folder: where it runs.
        environment: its environment.
        hangs: whether it no longer gets on, asked at every tick.
    """
    process = subprocess.Popen(
        command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        preexec_fn=_with_parent,
    )  # fmt: skip
    assert process.stdout is not None
    lines = process.stdout

    def show() -> None:
        with contextlib.suppress(ValueError):  # closed below
            for line in lines:
                say(line.rstrip("\n"))

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    by, killed_at = "", float("inf")
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TICK)
                break
            now = clock()
            if now >= min(killed_at, deadline):
                by = by or "time"
                _signal(process, signal.SIGKILL)
            elif not by and (now >= deadline - GRACE or hangs()):
                by = "time" if now >= deadline - GRACE else "hang"
                killed_at = now + GRACE
                _signal(process, signal.SIGINT)
    finally:
        _signal(process, signal.SIGKILL)  # what it leaves behind, or all of it after an interrupt
        process.wait()
        reader.join(5)
    return Ended(process.returncode, by)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
