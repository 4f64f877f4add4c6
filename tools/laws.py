"""The laws of the house that a search can check (CONTRIBUTING.md has them in words)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "fusedtrain"
FOUND: list[str] = []


def forbid(pattern: str, files: list[Path], law: str) -> None:
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line.split("//")[0]):
                FOUND.append(f"{path.relative_to(ROOT)}:{number}: {law}: {line.strip()}")


def python(*exceptions: str) -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in exceptions]


def sources(*exceptions: str) -> list[Path]:
    files = [p for p in sorted(CSRC.rglob("*")) if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return [p for p in files if p.name not in exceptions]


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
    packages = ("optim", "amp", "fp16_utils", "compat")
    for i, package in enumerate(packages[:-1]):
        above = "|".join(packages[i + 1 :])
        forbid(
            rf"(from (\.\.|fusedtrain\.)|from (\.\.|fusedtrain) import .*\b)({above})\b",
            sorted((PACKAGE / package).rglob("*.py")),
            "of optim, amp, fp16_utils and compat each imports only those before it",
        )
    compiled_once = (
        "batch_norm.cpp", "batch_norm_tiles.h", "chains.cpp", "dispatch.cpp", "multi_tensor.cpp",
        "pool.cpp",
    )  # fmt: skip
    isa = [p for p in sources() if p.parent == CSRC / "cpu" and p.name not in compiled_once] + [
        CSRC / "formulas.h",
        CSRC / "host_device.h",
        CSRC / "ops.h",
    ]
    forbid(
        r"#include\s*<(?!(stdint\.h|immintrin\.h)>)",
        isa,
        "instruction-set units include no library (an inline function could be shared)",
    )
    formulas = (CSRC / "formulas.h").read_text()
    forbid(r"\bfor\s*\(|\bwhile\s*\(", [CSRC / "formulas.h"], "a formula knows no loop")

    # One name everywhere.
    declared = names(formulas, "FT_POINTWISE") | names(formulas, "FT_CHANNELWISE")
    reference = (PACKAGE / "reference/activations.py").read_text()
    table = set(re.findall(r'Activation\(\s*"(\w+)"', reference))
    public = set(re.findall(r"^def (\w+)\(", (PACKAGE / "functional.py").read_text(), re.M))
    for where, found in (("reference/activations.py", table), ("functional.py", public)):
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
