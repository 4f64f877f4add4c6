"""``info``: the backends, loaded or why not, and what a bug report needs."""

from __future__ import annotations

from .. import backend_info
from .._backends import machine_info
from ._exit import Exit


def run() -> int:
    """Prints the backends and the machine."""
    print(backend_info())
    for name, value in machine_info().items():
        print(f"  {name:<10} {value}")
    return Exit.DONE
