"""``python -m fusedtrain``: what a bug report needs, and the backends: loaded, or why not."""

from __future__ import annotations

import argparse
import sys

from . import backend_info
from ._backends import machine_info
from ._pipes import quiet_pipe


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedtrain", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser(
        "info", help="the backends, and why one is not loaded; system, torch, devices (the default)"
    )
    parser.parse_args(argv)
    print(backend_info())
    for name, value in machine_info().items():
        print(f"  {name:<10} {value}")
    return 0


if __name__ == "__main__":
    with quiet_pipe():
        sys.exit(main())
