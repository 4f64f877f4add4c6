"""The builds of `make sanitize`: _C.so and the emulator with sanitizers, in a copy of the checkout.

In build/sanitize: `cpu`, the objects; `tree`, the copy, in whose root `import fusedtrain` finds the
sanitized file; `faults`, the planted ones. Nothing is built twice where no source has changed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
TREE = BUILD / "tree"
ISAS = ("default", "avx2", "avx512")

# Three parts of `undefined` are off. vptr: no class here has virtual functions. null and
# object-size: AddressSanitizer reports what they report, and the unit of one instruction set takes
# 60 s of CPU without them (GCC 12, AVX2), and more than 100 s with both.
SANITIZERS = (
    "-fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr,null,object-size "
    "-fno-sanitize-recover=undefined,float-cast-overflow -fno-omit-frame-pointer -g1"
)
FLAGS = f"{SANITIZERS} -O1 -w"  # -w: `make build` shows the warnings

OPTIONS = {
    # Python and torch keep memory until the process ends: no leak of ours could be told apart.
    # detect_stack_use_after_return stays off in the emulator, whose threads have stacks of their
    # own; allocator_may_return_null: tests ask for more memory than there is, and expect an error.
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64:"
    "detect_stack_use_after_return={after_return}",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class CannotRun(Exception):
    """Why nothing can be sanitized here."""


@functools.cache
def setup_module() -> ModuleType:
    """setup.py, which knows the sources and their flags."""
    spec = importlib.util.spec_from_file_location("fusedtrain_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def runtime() -> list[str]:
    """The libraries to load before all others: Python is not linked with them.

    libstdc++ too: AddressSanitizer looks for `__cxa_throw` when it starts, and Python has none.
    """
    compiler = setup_module().cxx().split()[0]
    paths = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        run = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        )
        path = Path(run.stdout.strip())
        if not path.is_absolute():
            raise CannotRun(
                f"{compiler} has no {name} (make sanitize needs GCC and its sanitizers)"
            )
        paths.append(str(path.resolve()))
    return paths


def environment(
    isa: str = "", after_return: bool = True, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of a process that loads sanitized code: runtime, its options, instruction set."""
    options = {k: v.format(after_return=int(after_return)) for k, v in OPTIONS.items()}
    forced = {"FUSEDTRAIN_CPU_CAPABILITY": isa} if isa else {}
    preload = {"LD_PRELOAD": " ".join(runtime()), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **preload, **options, **forced, **(more or {})}


def machine_isas() -> list[str]:
    """The instruction sets that this processor has, the best one last."""
    isas: list[str] = setup_module().machine_isas()
    return isas


def copy_tree(tree: Path) -> None:
    """Python files, tests and sources into a folder, times kept; the built files there stay."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source, target = ROOT / name, tree / name
        if target.exists() and target.stat().st_mtime_ns == source.stat().st_mtime_ns:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    for path in tree.rglob("*"):
        name = str(path.relative_to(tree))
        of_git = not name.startswith("build") and path.suffix in (
            ".py",
            ".h",
            ".cpp",
            ".cu",
            ".cuh",
        )
        if of_git and name not in names:
            path.unlink()  # a module that is no more must not be found


def build_cpu(isas: list[str]) -> Path:
    """_C.so with these instruction sets alone: `import fusedtrain` refuses others by its own
    message."""
    setup = setup_module()
    folder = BUILD / "-".join(isas)
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / "_C.so"
    setup.build_cpu(built, BUILD, isas, FLAGS)
    target = TREE / "fusedtrain" / "_C.so"
    if not target.exists() or target.stat().st_mtime_ns != built.stat().st_mtime_ns:
        target.unlink(missing_ok=True)
        shutil.copy2(built, target)
    (TREE / "fusedtrain/_build_info.json").write_text('{"cuda_not_built": "sanitized"}\n')
    return target


def build_emulator() -> None:
    """The emulated CUDA kernels, in TREE/build/emulator."""
    # Without the kernels of the CPU, for they need the runtime, and the compiler is slow under it.
    env = {**os.environ, "FUSEDTRAIN_BACKEND": "reference"}
    code = "import sys; sys.path.insert(0, 'tests'); import cuda_emulator; cuda_emulator.build()"
    subprocess.run(
        [sys.executable, "-c", code], cwd=TREE, check=True,
        env={**env, "FUSEDTRAIN_TEST_EMULATOR_SANITIZERS": SANITIZERS},
    )  # fmt: skip


def compiler_script() -> Path:
    """A compiler that adds the sanitizers: for the small libraries that tests build."""
    path = BUILD / "c++"
    path.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {setup_module().cxx()} {FLAGS} "$@"\n')
    path.chmod(0o755)
    return path


def build_faults(folder: Path) -> Path:
    """The planted faults, with the flags of the kernels."""
    setup = setup_module()
    n = setup.Ninja(folder)
    compiler, out = setup.cxx(), folder / "faults.so"
    source = ROOT / "tools" / "sanitizer_faults.cpp"
    n.link(out, [n.compile(source, compiler, f"{setup.CXX_FLAGS} {FLAGS}")], compiler, FLAGS)
    setup.run_ninja(n, "the planted faults, 2 seconds")
    return out
