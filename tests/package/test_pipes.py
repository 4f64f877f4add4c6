"""The commands of the package whose output nobody reads to its end."""

from __future__ import annotations

import pytest

from helpers.processes import python


@pytest.mark.parametrize(
    "words",
    [
        ["fusedtrain"],
        ["fusedtrain", "--help"],
        ["fusedtrain", "bench", "--help"],
        ["fusedtrain.apex", "--help"],
    ],
)
def test_a_closed_pipe_ends_a_command_quietly(words: list[str]) -> None:
    """As `python -m fusedtrain | head -1` does, where head is faster."""
    module, *rest = words
    run = python(
        "import os, runpy, sys\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "os.dup2(writer, 1)\n"
        f"sys.argv = ['-m', *{rest}]\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
        PYTHONUNBUFFERED="",
    )
    assert run.stderr == ""
    assert run.returncode == 141
