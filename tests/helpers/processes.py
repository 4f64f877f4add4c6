"""Processes of Python that have imported torch: forks of one process that did so."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers import TESTS, environment

_SERVER = """
import json, os, sys, traceback
import torch

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(os.path.join(job["folder"], name), os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(job["variables"])
        status = 0
        try:
            exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as stopped:
            status = stopped.code
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends when its input is closed, with this process at the latest."""
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=TESTS, env=environment(),
    )  # fmt: skip


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process that has imported torch, and nothing of the package."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        job = {"code": code, "folder": folder, "variables": variables}
        print(json.dumps(job), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(code, status, out, err)
