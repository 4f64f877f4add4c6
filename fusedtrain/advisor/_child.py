"""Starts Python processes that run a module of this package.

They are started by the path of this file: ``python -m`` puts the working directory first on
sys.path, and a ``torch.py`` or ``queue.py`` that lies there would run in place of the real one.
"""

from __future__ import annotations

import sys


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a process that runs ``module`` as ``python -m`` does."""
    return [sys.executable, __file__, module, *arguments]


def _main() -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the folder of this file
    import importlib.util
    import os
    import runpy

    # The package that has started this process, which need not be the first on sys.path.
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    name = os.path.basename(folder)
    if importlib.util.find_spec(name) is None:  # spawned workers of a loader import it
        sys.path.append(os.path.dirname(folder))
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
