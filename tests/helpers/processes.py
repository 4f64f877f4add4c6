"""Processes of Python that have imported torch, which takes 1 to 4 s of each: forks of one process
that did so."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from helpers import TESTS, environment

Done = subprocess.CompletedProcess[str]


@functools.cache
def _server(*modules: str) -> subprocess.Popen[str]:
    """It ends when its input is closed, with this process at the latest."""
    return subprocess.Popen(
        [sys.executable, str(TESTS / "helpers" / "fork_server.py"), *modules], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONUNBUFFERED")},
    )  # fmt: skip


def run_python(
    *arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None,
    timeout: float | None = None, trains: bool = False,
) -> Done:  # fmt: skip
    """As `subprocess.run` runs ``python ARGUMENTS``, the output captured as text.

    Not for what torch reads as it is loaded (ATEN_CPU_CAPABILITY), nor for the order of imports
    before it.

    Args:
        trains: the process has imported torch._dynamo too, as torch.optim does at its first use: it
            takes as long as torch.
    """
    words = [str(argument) for argument in arguments]
    env = dict(os.environ if env is None else env)
    if not hasattr(os, "fork"):
        return subprocess.run(
            [sys.executable, *words], cwd=cwd, env=env, timeout=timeout, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    server = _server(*(["torch._dynamo"] if trains else []))
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "arguments": words, "cwd": str(cwd or Path.cwd()), "env": env, "timeout": timeout,
            "folder": folder,
        }  # fmt: skip
        print(json.dumps(job), file=server.stdin, flush=True)
        status, late = json.loads(server.stdout.readline())
        # As `text=True` reads: carriage returns of progress bars become newlines.
        out, err = (Path(folder, name).read_text() for name in ("stdout", "stderr"))
    if late:
        raise subprocess.TimeoutExpired(words, timeout or 0.0, out, err)
    return subprocess.CompletedProcess(words, status, out, err)


def python(code: str, **variables: str) -> Done:
    """Runs code in a process that has imported torch, and nothing of the package."""
    return run_python("-c", code, env=environment(**variables), cwd=TESTS)


def by_capability(code: str, folder: Path) -> dict[str, Any]:
    """Tensors that the code saves to `{path!r}`, by the instruction set of the CPU's kernels, for
    those that this processor has and that were built."""
    results = {}
    for capability in ("default", "avx2", "avx512"):
        path = folder / capability
        run = python(code.format(path=str(path)), FUSEDTRAIN_CPU_CAPABILITY=capability)
        if run.returncode == 0:
            results[capability] = torch.load(path)
        else:
            assert "this processor" in run.stderr or "not built" in run.stderr, run.stderr
    return results
