"""The build of ``_C_autograd.so``, by ``python -m fusedtrain build-autograd`` and by setup.py.

The latter loads this file by its path. Imports neither torch nor the rest of the package.

The file is for one torch and one Python, whose headers it is compiled with. It needs a C++ compiler
and Python.h, no ninja.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

NAME = "_C_autograd.so"
COMMAND = "python -m fusedtrain build-autograd"
_RECORD = "_build_info.json"
# Version of the calls from the package into the file: to be raised with each change, so that a
# checkout does not load the file of an older state.
_INTERFACE = 5
# Without optimisation a call costs more than in Python.
_FLAGS = "-O2 -std=c++20 -fPIC -fvisibility=hidden -Wall"


class CannotBuild(Exception):
    """Why a file is not built."""


def find_compiler(setting: str | None) -> str:
    """The C++ compiler.

    Args:
        setting: of the variable CXX; may have arguments.
    """
    compiler = setting or shutil.which("c++") or shutil.which("g++")
    if not compiler or not shutil.which(compiler.split()[0]):
        raise CannotBuild(
            "no C++ compiler found (set CXX, or install g++ 9 or clang++ 10 or newer)"
        )
    return compiler


def source_in(package: Path) -> Path:
    """The one unit, beside an installed package or in a checkout."""
    places = [folder / "csrc/autograd/module.cpp" for folder in (package, package.parent)]
    source = next((place for place in places if place.exists()), None)
    if source is None:
        raise CannotBuild(f"the sources are missing: {places[0].parent}")
    return source


def built_for(torch_version: str) -> dict[str, Any]:
    """Torch, Python and interface that a file built now is for, as the build is recorded."""
    return {
        "torch": torch_version,
        "python": sysconfig.get_config_var("SOABI"),
        "interface": _INTERFACE,
    }


def flags(torch: Path) -> tuple[str, str]:
    """Flags of the compiler and of the linker, for the headers of this torch and this Python."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise CannotBuild(
            f"{include}/Python.h is missing (the headers of Python; Debian: apt-get install "
            "python3-dev)"
        )
    link = f"-L{torch}/lib -ltorch_python -ltorch -ltorch_cpu -lc10"
    if sys.platform == "darwin":
        link += " -undefined dynamic_lookup"
    return f"{_FLAGS} -isystem {include} -isystem {torch}/include", link


def build(package: Path, torch: Path, torch_version: str, compiler: str) -> Path:
    """Builds the file beside an installed package, and notes what it was built for.

    Args:
        package: the folder of fusedtrain.
        torch: the folder of torch.
    """
    source, (compile_flags, link_flags) = source_in(package), flags(torch)
    out = package / NAME
    if not os.access(package, os.W_OK):
        raise CannotBuild(f"{package} cannot be written to")
    print(f"compiling {source}, about 20 seconds", flush=True)
    start = time.monotonic()
    new = out.with_suffix(f".{os.getpid()}.so")
    command = [
        *compiler.split(), *shlex.split(compile_flags), "-shared", str(source),
        *shlex.split(link_flags), "-o", str(new),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True)
        new.replace(out)  # A process that has loaded the old file keeps it.
    except (subprocess.CalledProcessError, OSError) as error:
        raise CannotBuild(f"the compiler failed ({error}); its messages are above") from error
    finally:
        new.unlink(missing_ok=True)
    _note(package, built_for(torch_version))
    print(f"compiled in {time.monotonic() - start:.0f} s")
    return out


def _note(package: Path, made_for: dict[str, Any]) -> None:
    path = package / _RECORD
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        record = {}
    record.pop("autograd_not_built", None)
    record["autograd"] = made_for
    new = path.with_suffix(f".{os.getpid()}.json")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.replace(path)
