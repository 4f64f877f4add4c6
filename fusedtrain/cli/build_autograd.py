"""``build-autograd``: compiles the autograd nodes in C++, which are for one torch."""

from __future__ import annotations

import sys

from .._backends import autograd_build, build_autograd
from ._exit import Exit


def run() -> int:
    """Compiles; prints the path of the file, or why there is none."""
    try:
        path = build_autograd()
    except autograd_build.CannotBuild as reason:
        print(f"fusedtrain: {autograd_build.NAME} is not built: {reason}", file=sys.stderr)
        return Exit.FOUND
    print(f"{path} is built; new processes use it")
    return Exit.DONE
