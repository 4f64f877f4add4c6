"""Runs Python programs in forks of this process, which has imported torch and the modules that its
arguments name. A line of its input is a job, written by tests/helpers/processes.py; a line of its
output is an answer."""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import signal
import sys
import threading
import types
import warnings
from typing import Any

import torch

# Without the folder of this file.
_PATH = sys.path[1:]


def _enter(job: dict[str, Any]) -> None:
    """The surroundings that a new process would have."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(job["folder"], name), os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    multiprocessing.process.ORIGINAL_DIR = job["cwd"]  # where its spawned processes look for files
    # Variables that Python and torch read when they start.
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    places = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, places.split(os.pathsep)), *_PATH]


def _run(arguments: list[str]) -> None:
    """As Python runs ``-c code``, ``-m module`` or a file, after ``-W action``."""
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])
        arguments = arguments[2:]
    kind, *rest = arguments
    if kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


def _wait(child: int, seconds: float | None) -> tuple[int, bool]:
    """The exit code, and whether the time was over before."""
    over = threading.Event()

    def end() -> None:
        over.set()
        os.kill(child, signal.SIGKILL)

    clock = threading.Timer(seconds, end) if seconds is not None else None
    if clock is not None:
        clock.start()
    status = os.waitpid(child, 0)[1]
    if clock is not None:
        clock.cancel()
        clock.join()  # no thread is left at the next fork
    return os.waitstatus_to_exitcode(status), over.is_set()


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _enter(job)
            _run(job["arguments"])
            return  # the fork ends as every Python does
        print(json.dumps(_wait(child, job["timeout"])), flush=True)


if __name__ == "__main__":
    main()
