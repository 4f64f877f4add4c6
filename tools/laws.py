"""The laws of the house that a search can check (CONTRIBUTING.md has them in words). Imports are
checked by lint-imports, private imports from torch by ruff: pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from _openings import cpp_openings, python_openings
from _private import private_across, private_of_torch
from _torch_names import OLDEST as OLDEST, newer_names

ROOT = Path(__file__).resolve().parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "fusedtrain"
FOUND: list[str] = []
LONGEST = 450  # lines of a file
VAGUE = {"found", "told", "own", "here", "apart", "given"}
PICKLED = {"fusedtrain/folding/_bias.py": "own"}  # a file's attribute that keeps its name
FUNCTIONS = ("functional.py", "ops/channelwise.py", "ops/activations_beyond_torch.py")


def forbid(pattern: str, files: list[Path], law: str) -> None:
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line.split("//")[0]):
                FOUND.append(f"{path.relative_to(ROOT)}:{number}: {law}: {line.strip()}")


def forbid_private_names(package: Path) -> None:
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package.parent)
        if path.name != "_torch_private.py":
            for line, name in private_of_torch(path):
                FOUND.append(f"{where}:{line}: torch's private names: _torch_private.py: {name}")
        for line, name in private_across(package, path):
            FOUND.append(f"{where}:{line}: no private name of another package: {name}")


def forbid_newer_names(root: Path) -> None:
    for path, line, name in newer_names(sorted((root / "csrc/bindings").iterdir())):
        FOUND.append(
            f"{path.relative_to(root)}:{line}: torch 2.10 may lack {name}: _torch_names.py"
        )


def forbid_openings(files: Iterable[Path]) -> None:
    for path in files:
        openings = python_openings if path.suffix == ".py" else cpp_openings
        for line, text in openings(path.read_text()):
            FOUND.append(f"{path}:{line}: begins without its subject: {text[:60]}")


def forbid_long_files(root: Path) -> None:
    for folder in ("benchmarks", "csrc", "examples", "fusedtrain", "tests", "tools"):
        for path in sorted((root / folder).rglob("*.*")):
            if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh"):
                lines = len(path.read_text().splitlines())
                if lines > LONGEST:
                    FOUND.append(f"{path.relative_to(root)}: {lines} lines, more than {LONGEST}")


def bound_by(node: ast.AST) -> str:
    """The name that a node of the syntax tree binds, or ""."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name.lower()
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.ExceptHandler):
        return node.name or ""
    if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return ""


def forbid_vague_names(root: Path) -> None:
    for folder in ("benchmarks", "examples", "fusedtrain", "tools"):
        for path in sorted((root / folder).rglob("*.py")):
            where = path.relative_to(root).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                name = bound_by(node)
                if name.lstrip("_") in VAGUE and name != PICKLED.get(where):
                    line = getattr(node, "lineno", 0)
                    FOUND.append(f"{where}:{line}: say what it holds: {name}")


def families_of(reference: Path) -> set[str]:
    """The keys of FAMILIES in reference/__init__.py."""
    for node in ast.walk(ast.parse(reference.read_text())):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FAMILIES":
            assert isinstance(node.value, ast.Dict)
            return {ast.literal_eval(key) for key in node.value.keys if key is not None}
    raise LookupError(f"{reference} has no FAMILIES")


def forbid_lists_of_families(files: Iterable[Path], families: set[str]) -> None:
    """A list, tuple or set that names most families is a second FAMILIES."""
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.List, ast.Set, ast.Tuple)):
                items = {e.value for e in node.elts if isinstance(e, ast.Constant)}
                if len(items & families) > len(families) // 2:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    FOUND.append(f"{where}: families are listed in reference/__init__.py alone")


def python(*exceptions: str) -> list[Path]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [p for p in files if p.relative_to(PACKAGE).as_posix() not in exceptions]


def sources(*exceptions: str) -> list[Path]:
    files = [p for p in sorted(CSRC.rglob("*")) if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return [p for p in files if p.name not in exceptions]


def included(files: Iterable[Path]) -> list[Path]:
    """The files and all of ours that they include."""
    left, reached = list(files), set[Path]()
    while left:
        path = left.pop()
        if path not in reached:
            reached.add(path)
            quoted = re.findall(r'^#include "(.+)"', path.read_text(), re.M)
            left += [(path.parent / name).resolve() for name in quoted]
    return sorted(reached)


def rows_of(formulas: str, macro: str) -> list[tuple[str, ...]]:
    """The lines of a table of activations, in their order: name, struct and columns."""
    body = formulas.split(f"#define {macro}(X)")[1].split("\n\n")[0]
    return [tuple(row.split(", ")) for row in re.findall(r"X\(([^)]*)\)", body)]


def activation_rows(reference: str) -> list[tuple[str, ...]]:
    """The rows of reference/activations.py as the formulas would have them, without the struct."""
    rows = []
    for call in ast.walk(ast.parse(reference)):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "Activation"):
            continue
        options = {word.arg: ast.unparse(word.value) for word in call.keywords}
        parameters = call.args[4] if len(call.args) > 4 else ast.Tuple([])
        assert isinstance(parameters, ast.Tuple)
        row = (ast.literal_eval(call.args[0]), str(len(parameters.elts)))
        if options.get("tensors") != "True":
            saves = f"k{ast.literal_eval(call.args[3]).capitalize()}"
            row += (options.get("rounds", "False").lower(), saves)
        rows.append(row)
    return rows


def forbid_two_tables(formulas: str, reference: str) -> None:
    """Ops take the number of a row: names, columns and order are those of the formulas."""
    header = rows_of(formulas, "FT_POINTWISE") + rows_of(formulas, "FT_CHANNELWISE")
    expected = [(name, *columns) for name, _, *columns in header]
    table = activation_rows(reference)
    for row in [row for row in expected if row not in table]:
        FOUND.append(f"one table: reference/activations.py has no row {row}, as the formulas have")
    for row in [row for row in table if row not in expected]:
        FOUND.append(f"one table: the formulas have no row {row}, as reference/activations.py has")
    if sorted(table) == sorted(expected) and table != expected:
        place = next(i for i, row in enumerate(table) if row != expected[i])
        FOUND.append(
            "one table: reference/activations.py has another order than the formulas, "
            f"{table[place][0]} where {expected[place][0]} comes"
        )


def functions_of(source: str) -> set[str]:
    """The functions of a file that other files see: those of __all__, where the file lists one."""
    tree = ast.parse(source)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        is_list = isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        if is_list and ast.unparse(node.targets[0]) == "__all__":
            names &= set(ast.literal_eval(node.value))
    return {name for name in names if not name.startswith("_")}


def forbid_other_names(declared: set[str], sources: Iterable[str], twins: str) -> None:
    """An activation of the formulas has a public function and two Triton twins of its name."""
    public = set().union(*map(functions_of, sources))
    files = ", ".join(FUNCTIONS)
    # functional.gelu reaches gelu_tanh by its argument, as torch's does.
    for name in sorted(declared - public - {"gelu_tanh"}):
        FOUND.append(f"one name everywhere: formulas have {name}, no public function of {files}")
    for name in sorted(public - declared):
        FOUND.append(f"one name everywhere: functions have {name}, no row of the formulas")
    for name in sorted(declared):
        for twin in (f"{name}_forward", f"{name}_backward"):
            if not re.search(rf"^def {twin}\(", twins, re.M):
                FOUND.append(f"one name everywhere: {twin} is not in triton/formulas.py")


def main() -> int:
    forbid(
        r"\.is_cuda|\.is_cpu\b|device\.type\s*([!=]=|(not )?in [(\[{])",
        python("_backends/__init__.py", "_capture.py"),
        "the dispatcher is the only switch",
    )
    forbid(
        r"os\.environ|getenv",
        python("_backends/__init__.py", "_capture.py"),
        "environment variables are read in _backends",
    )
    forbid(
        r"compiler\.is_exporting|is_autocast_available",
        python("_torch_private.py"),
        "torch 2.10 compiles is_exporting and autocast_is_available of _torch_private.py alone",
    )
    forbid(
        r"#include\s*[<\"](torch|ATen|c10)/",
        [p for p in sources("checks.h", "cuda.cpp") if p.parent.name != "autograd"],
        "only the bindings and the autograd nodes see torch",
    )
    forbid(
        r"<<<|cudaLaunchKernel",
        sources("launch.cuh"),
        "kernels start by launch() of launch.cuh, so that the emulator can run them",
    )
    forbid(
        r"#include\s*<(?!(stdint\.h|immintrin\.h)>)",
        # sqrt and pow in optimizer_rules.h take doubles: C functions, no inline overload of C++.
        [p for p in included((CSRC / "cpu/isa").iterdir()) if p.name != "optimizer_rules.h"],
        "instruction-set units include no library (an inline function could be shared)",
    )
    files = [CSRC / "formulas.h", CSRC / "channelwise_formulas.h"]
    formulas = "\n".join(path.read_text() for path in files)
    forbid(r"\bfor\s*\(|\bwhile\s*\(", files, "a formula knows no loop")

    forbid_private_names(PACKAGE)
    forbid_newer_names(ROOT)
    forbid_long_files(ROOT)
    forbid_vague_names(ROOT)
    listing = [p for folder in ("fusedtrain", "tools", "tests", "benchmarks", "examples")
               for p in sorted((ROOT / folder).rglob("*.py"))]  # fmt: skip
    forbid_openings([*listing, ROOT / "setup.py", *sources()])
    forbid_lists_of_families(listing, families_of(PACKAGE / "reference/__init__.py"))

    # One name everywhere.
    forbid_two_tables(formulas, (PACKAGE / "reference/activations.py").read_text())
    tables = ("FT_POINTWISE", "FT_CHANNELWISE")
    declared = {row[0] for macro in tables for row in rows_of(formulas, macro)}
    twins = (PACKAGE / "triton/formulas.py").read_text()
    forbid_other_names(declared, [(PACKAGE / f).read_text() for f in FUNCTIONS], twins)
    for line in FOUND:
        print(line)
    print(f"laws: {len(declared)} ops, {len(FOUND)} broken")
    return 1 if FOUND else 0


if __name__ == "__main__":
    sys.exit(main())
