"""The imports within a package."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

Graph = dict[str, set[str]]
_FOR_TYPES = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(package: Path) -> Graph:
    """The modules of the package that each of its modules imports, by name.

    Imports within functions count, those under ``if TYPE_CHECKING`` do not. To import ``a.b`` runs
    ``a``, too, unless the importer is in ``a``. ``importlib.import_module`` is not followed.
    """
    modules = {_name(package, path): path for path in sorted(package.rglob("*.py"))}
    graph: Graph = {}
    for module, path in modules.items():
        home = module if path.name == "__init__.py" else module.rpartition(".")[0]
        graph[module] = set()
        for name in _imported(ast.parse(path.read_text()), home):
            # `from a import b`: b is a module, or a name in a.
            target = name if name in modules else name.rpartition(".")[0]
            if target not in modules:
                continue
            graph[module].add(target)
            parent = target.rpartition(".")[0]
            while parent and not f"{module}.".startswith(f"{parent}."):
                graph[module].add(parent)
                parent = parent.rpartition(".")[0]
    return graph


def _name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.AST, home: str) -> Iterator[str]:
    """The absolute names that a module of the package `home` imports."""
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        above = home.rsplit(".", tree.level - 1)[0] if tree.level else ""
        base = ".".join(filter(None, (above, tree.module)))
        yield from (f"{base}.{alias.name}" for alias in tree.names)
    else:
        parts: Iterable[ast.AST] = ast.iter_child_nodes(tree)
        if isinstance(tree, ast.If) and ast.unparse(tree.test) in _FOR_TYPES:
            parts = tree.orelse
        for part in parts:
            yield from _imported(part, home)
