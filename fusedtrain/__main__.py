"""``python -m fusedtrain``: what a bug report needs, and the backends: loaded, or why not;
``build-autograd`` compiles what is for one torch."""

from __future__ import annotations

import argparse
import sys

from . import _autograd_build, backend_info
from ._backends import build_autograd, machine_info
from ._pipes import quiet_pipe


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedtrain", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser(
        "info", help="the backends, and why one is not loaded; system, torch, devices (the default)"
    )
    commands.add_parser(
        "build-autograd", help="compile the autograd nodes in C++ for this torch and this Python"
    )
    if parser.parse_args(argv).command == "build-autograd":
        return _build()
    print(backend_info())
    for name, value in machine_info().items():
        print(f"  {name:<10} {value}")
    return 0


def _build() -> int:
    try:
        path = build_autograd()
    except _autograd_build.CannotBuild as reason:
        print(f"fusedtrain: {_autograd_build.NAME} is not built: {reason}", file=sys.stderr)
        return 1
    print(f"{path} is built; new processes use it")
    return 0


if __name__ == "__main__":
    with quiet_pipe():
        sys.exit(main())
