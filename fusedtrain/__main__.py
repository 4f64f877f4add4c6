"""``python -m fusedtrain info``: the loaded backends, their architectures, and why one is not."""

from __future__ import annotations

import argparse
import sys

from . import backend_info


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedtrain", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="the backends that are loaded, and why one is not")
    parser.parse_args(argv)
    print(backend_info())
    return 0


if __name__ == "__main__":
    sys.exit(main())
