"""Mentions of modules in the Python of a model: the attribute chains that it reads or calls.

torch.fx shows one forward in one mode. Other methods, hooks, branches that were not taken, and
forwards that torch.fx cannot trace are read as source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from .._graph.functions import closure_of, codes_of

# They tell nothing of a tensor's values.
_HARMLESS = {
    "shape", "size", "dtype", "device", "requires_grad", "requires_grad_", "ndim", "dim", "numel",
    "is_cuda", "layout", "stride", "is_contiguous", "type",
}  # fmt: skip
# They overwrite a tensor, whatever it holds.
_WRITERS = {
    "zero_", "fill_", "copy_", "zeros_", "ones_", "constant_", "uniform_", "normal_",
    "trunc_normal_", "trunc_normal_tf_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_",
    "xavier_uniform_", "orthogonal_", "dirac_", "eye_", "sparse_", "variance_scaling_",
    "lecun_normal_", "init_weight_vit", "requires_grad_",
}  # fmt: skip
WHOLE = {"parameters", "named_parameters", "state_dict", "buffers", "named_buffers"}


class Chain(NamedTuple):
    """``base.a[0].b``; no base: what comes before is no name."""

    base: str | None
    path: tuple[str | int, ...]


@dataclass(frozen=True)
class Mention:
    """A chain in the source. `called`: it is called, and `source` and `sink` are what its first
    argument comes from and what its result goes to, where these are chains in the next
    statement. `harmless`: read without a look at values."""

    chain: Chain
    called: bool
    harmless: bool
    source: Chain | None = None
    sink: Chain | None = None


def _unwound(node: ast.AST | None) -> tuple[ast.AST | None, tuple[str | int, ...]]:
    """The expression that a chain begins with, and the attributes and items that follow."""
    path: tuple[str | int, ...] = ()
    while True:
        match node:
            case ast.Attribute(value=inner, attr=key):
                pass
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                key = key if isinstance(key, (str, int)) else repr(key)
            case ast.Call(func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=key), *_]):
                key = str(key)
            case _:
                return node, path
        node, path = inner, (key, *path)


def _chain(node: ast.AST | None) -> Chain | None:
    first, path = _unwound(node)
    if isinstance(first, ast.Name):
        return Chain(first.id, path)
    return Chain(None, path) if path else None


def _called(node: ast.AST | None) -> ast.Call | None:
    return node if isinstance(node, ast.Call) else None


def _target(statement: ast.AST | None) -> str | None:
    """The one name that a statement assigns to."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


class _Reader:
    """Collects the mentions of one function."""

    def __init__(self, tree: ast.AST) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.next: dict[ast.AST, ast.AST] = {}
        self.previous: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            for name, value in ast.iter_fields(node):
                if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                    for first, second in itertools.pairwise(value):
                        self.next[first], self.previous[second] = second, first
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.mentions: list[Mention] = []
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        chain = _chain(node)
        if chain is not None and isinstance(node, ast.expr):
            self.mentions.append(self.mention(node, chain))
            first, _ = _unwound(node)
            assert first is not None
            node = first
        for child in ast.iter_child_nodes(node) if chain is None or chain.base is None else ():
            self.visit(child)

    def mention(self, node: ast.expr, chain: Chain) -> Mention:
        parent = self.parents.get(node)
        harmless = self.is_harmless(node, chain, parent)
        if not (isinstance(parent, ast.Call) and parent.func is node):
            return Mention(chain, False, harmless)
        return Mention(chain, True, harmless, self.source(parent), self.sink(parent))

    def is_harmless(self, node: ast.expr, chain: Chain, parent: ast.AST | None) -> bool:
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return True
        if _HARMLESS.intersection(key for key in chain.path if isinstance(key, str)):
            return True
        if isinstance(parent, ast.Compare):
            return all(isinstance(op, (ast.Is, ast.IsNot)) for op in parent.ops)
        if isinstance(parent, ast.Call):
            above = self.parents.get(parent)
            name = _chain(parent.func)
            last = str((name.path or (name.base,))[-1]) if name is not None else ""
            if last in ("isinstance", "hasattr", "next"):
                return True
            written = parent.func is node or parent.args[:1] == [node]
            return isinstance(above, ast.Expr) and written and last in _WRITERS
        return False

    def source(self, call: ast.Call) -> Chain | None:
        """The function that made the first argument of a call."""
        first = call.args[0] if call.args else None
        if inner := _called(first):
            return _chain(inner.func)
        before = self.previous.get(self.statement(call))
        if isinstance(first, ast.Name) and _target(before) == first.id:
            made = _called(getattr(before, "value", None))
            return None if made is None else _chain(made.func)
        return None

    def sink(self, call: ast.Call) -> Chain | None:
        """The only function that gets the result of a call."""
        parent = self.parents.get(call)
        if isinstance(parent, ast.Call) and parent.args[:1] == [call]:
            return _chain(parent.func)
        name, after = _target(parent), self.next.get(self.statement(call))
        overwritten = isinstance(after, ast.Return) or _target(after) == name
        user = _called(getattr(after, "value", None))
        if name is None or user is None or not overwritten or not user.args:
            return None
        first = user.args[0]
        once = sum(isinstance(n, ast.Name) and n.id == name for n in ast.walk(user)) == 1
        return _chain(user.func) if once and isinstance(first, ast.Name) else None

    def statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt) and node in self.parents:
            node = self.parents[node]
        return node


@functools.lru_cache(maxsize=4096)
def mentions(code: types.CodeType) -> tuple[Mention, ...]:
    """All chains in a function. Without its source: one of each name that its code looks up."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        names = (name for inner in codes_of(code) for name in inner.co_names)
        return tuple(Mention(Chain(None, (name,)), False, False) for name in names)
    return tuple(_Reader(tree).mentions)


def resolve(names: dict[str, Any], chain: Chain) -> tuple[Any, tuple[str | int, ...]]:
    """The value of a chain, as far as modules, containers and tensors go, and the rest of it."""
    if chain.base is None or chain.base not in names:
        return None, chain.path
    value: Any = names[chain.base]
    for i, key in enumerate(chain.path):
        rest = chain.path[i:]
        if isinstance(value, nn.Module):
            tables = (value._modules, value._parameters, value._buffers, vars(value))
            table = next((t for t in tables if str(key) in t), None)
            if table is None:
                return value, rest
            value = table[str(key)]
        elif type(value) in (list, tuple, dict):
            try:
                container: Any = value
                value = container[key]
            except (LookupError, TypeError):
                return value, rest
        else:
            return value, rest
    return value, ()


def environment(function: types.FunctionType, owner: object) -> dict[str, Any]:
    """Known values of the names in a function: modules in globals and closure, and its owner."""
    known: dict[str, Any] = {
        n: v for n, v in function.__globals__.items() if isinstance(v, nn.Module)
    }
    known |= closure_of(function)
    code = function.__code__
    for name in code.co_varnames:  # arguments and locals hide globals
        known.pop(name, None)
    if owner is not None and code.co_argcount:
        known[code.co_varnames[0]] = owner
    return known
