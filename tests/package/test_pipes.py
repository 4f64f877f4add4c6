"""The commands of the package whose output nobody reads to its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "words",
    [
        ["fusedtrain"],
        ["fusedtrain", "--help"],
        ["fusedtrain", "bench", "--help"],
        ["fusedtrain.compat", "--help"],
    ],
)
def test_a_closed_pipe_ends_a_command_quietly(words: list[str]) -> None:
    """As `python -m fusedtrain | head -1` does, where head is faster."""
    reader, writer = os.pipe()
    os.close(reader)
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", *words]
    try:
        run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=settings)
    finally:
        os.close(writer)
    assert run.stderr == b""
    assert run.returncode == 141
