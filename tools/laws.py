"""The laws of the house that a search can check (CONTRIBUTING.md has them in words)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from _imports import circles_in, imports_of

ROOT = Path(__file__).resolve().parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "fusedtrain"
FOUND: list[str] = []
FUNCTIONS = ("functional.py", "ops/channelwise.py", "ops/more_activations.py")


def forbid(pattern: str, files: list[Path], law: str) -> None:
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line.split("//")[0]):
                FOUND.append(f"{path.relative_to(ROOT)}:{number}: {law}: {line.strip()}")


# What is right under fusedtrain/, from the ground up: each imports only those before it.
FLOORS = (
    "_version", "_gpus", "_calls", "_recompute", "reference", "triton", "_backends", "_graph",
    "ops", "functional", "nn", "optim", "integrations", "amp", "fp16_utils", "compat", "folding",
    "conversion", "memory", "__init__", "__main__",
)  # fmt: skip


def forbid_upward(package: Path) -> None:
    """Names the modules that import one of a higher floor, or that have no floor."""

    def floor(module: str) -> int:
        room = (module.split(".") + ["__init__"])[1]
        if room not in FLOORS:
            FOUND.append(f"each imports only those before it: FLOORS lacks {room}")
            return len(FLOORS)
        return FLOORS.index(room)

    for module, imported in sorted(imports_of(package).items()):
        for other in sorted(imported):
            # Each imports the package itself, by importing anything in it.
            if other != package.name and floor(other) > floor(module):
                FOUND.append(f"each imports only those before it: {module} imports {other}")


def forbid_circles(package: Path) -> None:
    for circle in circles_in(imports_of(package)):
        modules = ", ".join(sorted(circle))
        FOUND.append(f"no import circle, imports within functions included: {modules}")


def python(*exceptions: str) -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in exceptions]


def sources(*exceptions: str) -> list[Path]:
    files = [p for p in sorted(CSRC.rglob("*")) if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return [p for p in files if p.name not in exceptions]


def included(files: Iterable[Path]) -> list[Path]:
    """The files and all of ours that they include."""
    left, found = list(files), set[Path]()
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            quoted = re.findall(r'^#include "(.+)"', path.read_text(), re.M)
            left += [(path.parent / name).resolve() for name in quoted]
    return sorted(found)


def names(text: str, macro: str) -> set[str]:
    body = text.split(f"#define {macro}(X)")[1].split("\n\n")[0]
    return set(re.findall(r"X\((\w+),", body))


def main() -> int:
    forbid(
        r"\.is_cuda|\.is_cpu\b|device\.type\s*[!=]=",
        python("_backends.py"),
        "the dispatcher is the only switch",
    )
    forbid(
        r"os\.environ|getenv",
        python("_backends.py"),
        "environment variables are read in _backends.py",
    )
    forbid(
        r"#include\s*[<\"](torch|ATen|c10)/",
        sources("checks.h", "binding_cuda.cpp"),
        "only the bindings see torch",
    )
    forbid(
        r"<<<|cudaLaunchKernel",
        sources("launch.cuh"),
        "kernels start by launch() of launch.cuh, so that the emulator can run them",
    )
    forbid(
        r"#include\s*<(?!(stdint\.h|immintrin\.h)>)",
        # The sqrt and pow of optimizers.h take doubles: C functions, no inline overload of C++.
        [p for p in included((CSRC / "cpu").glob("isa_*.cpp")) if p.name != "optimizers.h"],
        "instruction-set units include no library (an inline function could be shared)",
    )
    formulas = (CSRC / "formulas.h").read_text()
    forbid(r"\bfor\s*\(|\bwhile\s*\(", [CSRC / "formulas.h"], "a formula knows no loop")

    forbid_circles(PACKAGE)
    forbid_upward(PACKAGE)

    # One name everywhere.
    declared = names(formulas, "FT_POINTWISE") | names(formulas, "FT_CHANNELWISE")
    reference = (PACKAGE / "reference/activations.py").read_text()
    table = set(re.findall(r'Activation\(\s*"(\w+)"', reference))
    functions = "".join((PACKAGE / f).read_text() for f in FUNCTIONS)
    public = set(re.findall(r"^def ([a-z]\w*)\(", functions, re.M))
    for where, found in (("reference/activations.py", table), ("the functions", public)):
        # functional.gelu reaches gelu_tanh by its argument, as torch's does
        for name in declared ^ (found | ({"gelu_tanh"} if found is public else set())):
            FOUND.append(f"one name everywhere: {name} is not in both formulas.h and {where}")
    twins = (PACKAGE / "triton/formulas.py").read_text()
    for name in sorted(declared):
        for twin in (f"{name}_forward", f"{name}_backward"):
            if not re.search(rf"^def {twin}\(", twins, re.M):
                FOUND.append(f"one name everywhere: {twin} is not in triton/formulas.py")
    for line in FOUND:
        print(line)
    print(f"laws: {len(declared)} ops, {len(FOUND)} broken")
    return 1 if FOUND else 0


if __name__ == "__main__":
    sys.exit(main())
