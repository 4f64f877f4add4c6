"""Underscore names that a module takes from torch, or from another package of ours."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_of_torch(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of private attributes of torch; ruff sees those that are imported."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            if re.fullmatch(r"(torch|nn|dist|Tensor)(\.[a-zA-Z]\w*)*", base):
                yield node.lineno, f"{base}.{node.attr}"


def private_across(package: Path, path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of every private name that a file imports from another package of ours.

    Files directly in the package are of one, and each folder is another. Modules with private names
    may be imported within the whole package: their public names are what others may use.
    """
    names = path.relative_to(package).parts
    home = names[0] if len(names) > 1 else ""
    tree = ast.parse(path.read_text())
    modules: dict[str, str] = {}  # names of modules of other packages
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = list(names[:-1])
        if node.level:
            parts = parts[: len(parts) - node.level + 1]
        elif (node.module or "").split(".")[0] == package.name:
            parts = []
        else:
            continue
        inner = [p for p in (node.module or "").split(".") if p and p != package.name]
        for alias in node.names:
            target = package.joinpath(*parts, *inner)
            is_module = (
                target.joinpath(f"{alias.name}.py").exists() or (target / alias.name).is_dir()
            )
            where = [*parts, *inner, *([alias.name] if is_module else [])]
            in_folder = package.joinpath(where[0]).is_dir() if where else False
            if (where[0] if in_folder else "") == home:
                continue
            if is_module:
                modules[alias.asname or alias.name] = ".".join(where)
            elif is_private(alias.name):
                yield node.lineno, ".".join([*where, alias.name])
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and is_private(node.attr)
        ):
            yield node.lineno, f"{modules[node.value.id]}.{node.attr}"
