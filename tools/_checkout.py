"""The checkout as tools see it: setup.py as a module, and a copy to build in."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def setup_module() -> ModuleType:
    """setup.py, which knows the sources and their flags."""
    spec = importlib.util.spec_from_file_location("fusedtrain_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_tree(tree: Path) -> None:
    """The files of git, those of no commit included, with their times; built files there stay."""
    for path in tree.rglob("*"):
        is_source = path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")
        if is_source and "build" not in path.relative_to(tree).parts[:1]:
            path.unlink()  # a module that is no more must not be imported
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
