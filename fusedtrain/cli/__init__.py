"""The commands of ``python -m fusedtrain`` and of the console script ``fusedtrain``.

``info`` (the default) and ``build-autograd`` need nothing but torch. The other commands are made
with click and rich (the extra ``cli``), and are imported when they are called.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from .._broken_pipe import quiet_pipe
from ._exit import Exit

__all__ = ["Exit", "main"]

_PLAIN = {
    "info": "the backends, and why one is not loaded; system, torch, devices (the default)",
    "build-autograd": "compile the autograd nodes in C++ for this torch and this Python",
}
# Each is a module of this package, in which `command` is a click command that returns an Exit.
_WITH_EXTRA = {
    "bench": "fusedtrain's kernels against eager torch on this machine",
    "tune": "which switches make a model train faster on this machine, and the recipe",
    "fit": "the largest batch, or the fastest way to train one, in so much memory; the plan",
    "profile": "where the time of a training script goes, before and after fusedtrain",
    "doctor": "what costs a training script time, memory or accuracy; a diff that removes it",
}
_EXTRA = ("click", "matplotlib", "rich")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status (`Exit`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    started_as_module = os.path.basename(sys.argv[0]) == "__main__.py"
    program = "python -m fusedtrain" if started_as_module else "fusedtrain"
    for stream in (sys.stdout, sys.stderr):  # a name of a script need not be in their alphabet
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with quiet_pipe():
        if words and words[0] in _WITH_EXTRA:
            return _run_with_extra(program, words[0], words[1:])
        return _run_plain(program, words)


def _run_plain(program: str, words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=program, description="fused training for PyTorch")
    parser.epilog = f"{program} COMMAND --help says what a command does. Guide: docs/cli.md"
    commands = parser.add_subparsers(dest="command")
    for name, help_text in {**_PLAIN, **_WITH_EXTRA}.items():
        commands.add_parser(name, help=help_text)
    chosen = parser.parse_args(words).command or "info"
    module = importlib.import_module(f".{chosen.replace('-', '_')}", __name__)
    status: int = module.run()
    return status


def _run_with_extra(program: str, name: str, words: Sequence[str]) -> int:
    try:
        import click

        command = importlib.import_module(f".{name}", __name__).command
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        message = f'{name} needs {error.name}: pip install "fusedtrain[cli]"'
        print(f"{program}: {message}", file=sys.stderr)
        return Exit.USAGE
    # Not command.main(): click would end a program whose pipe is closed with 1, and quiet_pipe
    # with 141, as a shell does.
    try:
        with command.make_context(f"{program} {name}", list(words)) as context:
            return int(command.invoke(context))
    except click.exceptions.Exit as end:  # --help
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print(f"{program} {name}: stopped", file=sys.stderr)
        return Exit.STOPPED
