"""Runs a script that imports Apex, without Apex."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from .._broken_pipe import quiet_pipe
from .install import install_apex


class _Script(str):
    """Path of the script in sys.argv. multiprocessing sends sys.argv to a fresh process, which then
    runs the script to have its functions: unpickling the path installs the stand-in first."""

    def __reduce__(self) -> Any:
        return _received, (str(self),)


def _received(path: str) -> _Script:
    install_apex()
    return _Script(path)


def main(argv: list[str] | None = None) -> int:
    """Runs the script as ``__main__``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedtrain.apex", description=__doc__)
    parser.add_argument("script", help="path of the script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    with quiet_pipe():  # for the help alone, not for the script's output
        options = parser.parse_args(argv)
    if not Path(options.script).exists():
        parser.error(f"there is no file {options.script}")
    sys.argv = [_Script(options.script), *options.args]
    if not getattr(sys.flags, "safe_path", False):
        # The script's folder, as when Python runs a script; -m has put the working directory here.
        sys.path[0] = os.path.dirname(os.path.realpath(options.script))
    try:
        install_apex()
    except RuntimeError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    # A fork server would by default run the script before it receives sys.argv.
    multiprocessing.set_forkserver_preload([])
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0
