"""Runs a script that imports Apex, without Apex."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from .install import install_apex


class _Script(str):
    """Path of the script, as it stands in sys.argv. A process that multiprocessing starts afresh is
    sent sys.argv, and then runs the script to have its functions: the stand-in comes first."""

    def __reduce__(self) -> Any:
        return _received, (str(self),)


def _received(path: str) -> _Script:
    install_apex()
    return _Script(path)


def main(argv: list[str] | None = None) -> int:
    """Runs the script as ``__main__``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedtrain.compat", description=__doc__)
    parser.add_argument("script", help="path of the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    given = parser.parse_args(argv)
    if not Path(given.script).exists():
        parser.error(f"there is no file {given.script}")
    sys.argv = [_Script(given.script), *given.args]
    if not getattr(sys.flags, "safe_path", False):
        # As where Python runs a script; -m has put the working directory there.
        sys.path[0] = os.path.dirname(os.path.realpath(given.script))
    try:
        install_apex()
    except RuntimeError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    # By default a fork server runs the script before it is sent sys.argv.
    multiprocessing.set_forkserver_preload([])
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0
