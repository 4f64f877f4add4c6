"""Mutants of the optimizers' engine and rules, judged by the tests of optimizers. A mutant in C++
is a build of its own, without optimisation."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

from _collected import Collected
from _cpp_mutants import OTHER_SORTS, mutants_of as cpp_mutants
from _mutant import NO_MUTANT, Judge, Mutant, named
from _python_mutants import mutants_of as python_mutants

# The first need the least to be built anew.
CPP = [
    f"csrc/{file}"
    for file in (
        "cpu/optimizers.cpp", "cpu/optimizer_blocks.h", "cpu/isa/optimizers.h",
        "bindings/optimizers.h", "bindings/checks.h", "optimizer_step.h", "optimizer_rules.h",
        "state_codes.h",
    )
]  # fmt: skip
PYTHON = [
    *(f"optim/{name}.py" for name in (
        "_checkpoints", "_codes", "_engine", "_masters", "_plan", "_reports", "adagrad", "adam",
        "lamb", "lars", "lion", "novograd", "rmsprop", "sgd")),
    *(f"apex/{name}.py" for name in ("optimizers", "_apex_layerwise", "_apex_optimizer")),
]  # fmt: skip
TESTS = named("""
optimizer_numbers
apex_optimizers
optimizer_counterparts
optimizer_state
optimizer_scaler
split_master_kernels
eight_bit_states
state_code_kernels
newer_timm
optimizer_skips
small_states
""")
# Another process for each instruction set would tell nothing new, nor would other kernels.
CHOSEN = ["-k", "not instruction_set and not triton and not emulated", "--cases=all"]


def mutants(root: Path) -> list[Mutant]:
    files = (f"fusedtrain/{file}" for file in PYTHON)
    made = [m for file in files for m in python_mutants(root, file, lambda _: True, calls=True)]
    made += [m for file in CPP for m in cpp_mutants(root, file, OTHER_SORTS)]
    return [m for m in made if not m.pointless]


def _build(tree: Path) -> None:
    environment = {**os.environ, "FUSEDTRAIN_CUDA": "0", "PYTHONPATH": str(tree)}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    # Without FUSEDTRAIN_REQUIRE a compiler's error is a warning.
    if done.returncode != 0 or "_C.so is not built" in done.stdout + done.stderr:
        raise RuntimeError(f"does not compile: {done.stderr[-6000:]}")


def _build_fast(tree: Path) -> None:
    """Builds without optimisation."""
    for library in (tree / "fusedtrain").rglob("*.so"):
        library.unlink()
    # The kernels of one instruction set are mutated; the others need not be built again.
    shutil.copytree(tree / "csrc", tree / "frozen")
    (tree / "frozen").rename(tree / "csrc/frozen")
    setup = tree / "setup.py"
    text = setup.read_text()
    for before, after in (
        ("-O3 -std=c++17 -fPIC", "-O0 -std=c++17 -fPIC"),
        ('"default": "-O1 -ftree-vectorize"', '"default": ""'),
        ('CSRC / "cpu/isa"', 'CSRC / ("cpu/isa" if isa == "default" else "frozen/cpu/isa")'),
    ):
        assert before in text
        text = text.replace(before, after)
    setup.write_text(text)
    _build(tree)


def prepare(tree: Path, mutants: list[Mutant], seconds: float, ends: ExitStack) -> Judge:
    if not all(m.file.endswith(".py") for m in mutants):
        _build_fast(tree)
    sys.path.append(str(tree / "tests"))
    importlib.import_module("helpers.models").timm()  # once for all forks, and torch with it

    def first_failure(limit: float) -> str:
        """Tests of optimizers import the package as they are collected: anew for each mutant."""
        arguments = [*TESTS, *CHOSEN]
        with closing(Collected(tree, arguments, FUSEDTRAIN_CPU_CAPABILITY="default")) as tests:
            return tests.run(TESTS, limit)

    began = time.monotonic()
    if broken := first_failure(20 * seconds):
        raise RuntimeError(broken)
    limit = max(seconds, 4 * (time.monotonic() - began))

    def judge(mutant: Mutant) -> str:
        try:
            if not mutant.file.endswith(".py"):
                _build(tree)
            return first_failure(limit)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            return NO_MUTANT if reason.startswith(NO_MUTANT) else reason

    return judge
