"""The laws of the house that a search can check (CONTRIBUTING.md has them in words), and the budget
of lines. lint-imports checks imports, ruff private imports from torch: pyproject.toml."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from _torch_names import newer_names

ROOT = Path(__file__).resolve().parent.parent
CSRC, PACKAGE = ROOT / "csrc", ROOT / "fusedtrain"
BROKEN: list[str] = []
SOURCES = (".py", ".h", ".cpp", ".cu", ".cuh", ".sh", ".pyi")
LONGEST = 450  # lines of a file
VAGUE = {"found", "told", "own", "here", "apart", "given"}
PICKLED = {"fusedtrain/folding/_bias.py": "own"}  # a file's attribute that keeps its name
_OPENING = re.compile(r"(What|Of|Which|Those|Who|By|Gives)\b")
# A device that is compared with a literal, or looked up in one.
SWITCH = (
    r"\.is_cuda|\.is_cpu\b|device\.type\s*([!=]=|(not )?in [(\[{])|"
    r"\}(\.get\(|\[)[\w.]*device\.type|match [\w.]*device\.type"
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def broken(path: Path, line: int, law: str) -> None:
    BROKEN.append(f"{name_of(path)}:{line}: {law}")


def forbid(pattern: str, files: Iterable[Path], law: str) -> None:
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(pattern, line.split("//")[0]):
                broken(path, number, f"{law}: {line.strip()}")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def package_of(path: Path, node: ast.ImportFrom) -> tuple[str, Path]:
    """The package of ours that an import is from, "" for the files directly in `fusedtrain/`, and
    the place that it names; `path` is of the file."""
    parts = [part for part in (node.module or "").split(".") if part]
    if node.level:
        parts = [*path.relative_to(PACKAGE).parts[: -node.level], *parts]
    elif parts[0] != PACKAGE.name:
        return "?", path
    else:
        del parts[0]
    place = PACKAGE.joinpath(*parts)
    return (parts[0] if parts and (PACKAGE / parts[0]).is_dir() else ""), place


def forbid_private_names(path: Path, tree: ast.Module) -> None:
    """A private name of torch or of another package. A private module may be imported: its public
    names are what others may use."""
    parts = path.relative_to(PACKAGE).parts
    home = parts[0] if len(parts) > 1 else ""
    modules = set()  # names of other packages' modules
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        package, place = package_of(path, node)
        for alias in node.names if package not in ("?", home) else ():
            if (place / alias.name).is_dir() or (place / f"{alias.name}.py").exists():
                modules.add(alias.asname or alias.name)
            elif is_private(alias.name):
                broken(path, node.lineno, f"no private name of another package: {alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            if base in modules:
                broken(path, node.lineno, f"no private name of another package: {node.attr}")
            of_torch = re.fullmatch(r"(torch|nn|dist|Tensor)(\.[a-zA-Z]\w*)*", base)
            if of_torch and path.name != "_torch_private.py":
                broken(path, node.lineno, f"_torch_private.py has torch's: {base}.{node.attr}")


def forbid_openings(path: Path) -> None:
    mark, goes_on = "#" if path.suffix == ".py" else "//", False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = re.search(rf'(?:^|\s){mark}\s?(.*)|^\s*"""(.*)', line)
        alone = line.lstrip().startswith(mark)
        text = (match[1] or match[2] or "") if match and not (alone and goes_on) else ""
        if _OPENING.match(text):
            broken(path, number, f"begins without its subject: {text[:60]}")
        goes_on = alone


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


def forbid_vague_names(path: Path, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        name = bound_by(node)
        if name.lstrip("_") in VAGUE and name != PICKLED.get(name_of(path)):
            broken(path, getattr(node, "lineno", 0), f"say what it holds: {name}")


def families(tree: ast.Module) -> set[str]:
    """The keys of FAMILIES in reference/__init__.py."""
    table = next(
        node.value for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FAMILIES"
    )  # fmt: skip
    assert isinstance(table, ast.Dict)
    return {ast.literal_eval(key) for key in table.keys if key is not None}


def forbid_lists_of_families(path: Path, tree: ast.Module, names: set[str]) -> None:
    """A list, tuple or set that names most families is a second FAMILIES."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Set, ast.Tuple)):
            items = {e.value for e in node.elts if isinstance(e, ast.Constant)}
            if len(items & names) > len(names) // 2:
                broken(path, node.lineno, "families are listed in reference/__init__.py alone")


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


def budget(text: str, lines: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Folder, lines that it has, and lines that it may have. `text`: tools/lines.txt."""
    for row in filter(None, (line.partition("#")[0].split() for line in text.splitlines())):
        within = "" if row[0] == "." else f"{row[0]}/"
        yield row[0], sum(n for name, n in lines.items() if name.startswith(within)), int(row[1])


def forbid_in(path: Path, names: set[str]) -> None:
    """All laws of one file."""
    name = name_of(path)
    forbid_openings(path)
    if path.suffix == ".py":
        tree = ast.parse(path.read_text())
        forbid_lists_of_families(path, tree, names)
        if not name.startswith("tests/"):
            forbid_vague_names(path, tree)
        if name.startswith("fusedtrain/"):
            forbid_private_names(path, tree)


def forbid_patterns(files: list[Path]) -> None:
    def python(*exceptions: str) -> list[Path]:
        ours = [path for path in files if name_of(path).startswith("fusedtrain/")]
        return [path for path in ours if not name_of(path).endswith(exceptions)]

    def sources(*exceptions: str) -> list[Path]:
        return [p for p in files if name_of(p).startswith("csrc/") and p.name not in exceptions]

    switches = ("_backends/__init__.py", "_capture.py")
    forbid(SWITCH, python(*switches), "the dispatcher is the only switch")
    forbid(r"os\.environ|getenv", python(*switches), "environment variables are read in _backends")
    forbid(
        r"compiler\.is_exporting|is_autocast_available", python("_torch_private.py"),
        "torch 2.10 compiles is_exporting and autocast_is_available of _torch_private.py alone",
    )  # fmt: skip
    forbid(
        r"#include\s*[<\"](torch|ATen|c10)/",
        [p for p in sources("checks.h", "cuda.cpp") if p.parent.name != "autograd"],
        "only the bindings and the autograd nodes see torch",
    )
    forbid(
        r"<<<|cudaLaunchKernel", sources("launch.cuh"),
        "kernels start by launch() of launch.cuh, so that the emulator can run them",
    )  # fmt: skip
    forbid(
        r"#include\s*<(?!(stdint\.h|immintrin\.h)>)",
        # sqrt and pow in optimizer_rules.h take doubles: C functions, no inline overload of C++.
        [p for p in included((CSRC / "cpu/isa").iterdir()) if p.name != "optimizer_rules.h"],
        "instruction-set units include no library (an inline function could be shared)",
    )
    formulas = [CSRC / "formulas.h", CSRC / "channelwise_formulas.h"]
    forbid(r"\bfor\s*\(|\bwhile\s*\(", formulas, "a formula knows no loop")
    for path, line, name in newer_names(sorted((CSRC / "bindings").iterdir())):
        broken(path, line, f"torch 2.10 may lack {name}: _torch_names.py")


def main() -> int:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.splitlines() if Path(name).suffix in SOURCES]
    files = [path for path in paths if path.is_file()]
    lines = {name_of(path): len(path.read_text().splitlines()) for path in files}
    names = families(ast.parse((PACKAGE / "reference/__init__.py").read_text()))
    for path in files:
        if lines[name_of(path)] > LONGEST:
            broken(path, LONGEST, f"{lines[name_of(path)]} lines, more than {LONGEST}")
        forbid_in(path, names)
    forbid_patterns(files)
    for folder, count, most in budget((ROOT / "tools/lines.txt").read_text(), lines):
        print(f"  {folder}: {count} lines, {most - count} left")
        if count > most:
            BROKEN.append(f"{folder}: {count} lines, {most} in tools/lines.txt")
    for line in BROKEN:
        print(line)
    print(f"laws: {len(BROKEN)} broken")
    return 1 if BROKEN else 0


if __name__ == "__main__":
    sys.exit(main())
