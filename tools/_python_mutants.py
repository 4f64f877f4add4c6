"""Mutants of Python by rule: changes of the nodes of its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from _mutant import Mutant, marked, mutant

_COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_OPERATORS = {
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "&": "|", "|": "&", "^": "|",
    ">>": "<<", "<<": ">>",
}  # fmt: skip
_SYMBOLS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.RShift: ">>", ast.LShift: "<<",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_OTHERS = {
    "minimum": "maximum", "maximum": "minimum", "at_least": "at_most", "at_most": "at_least",
}  # fmt: skip
Change = tuple[int, str, str, str]  # offset, old, new, what


class _Source:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        keywords = [k for n in ast.walk(self.tree) if isinstance(n, ast.Call) for k in n.keywords]
        self.others = {id(k.value) for k in keywords if k.arg == "other"}
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            assert line.isascii()  # columns of ast are bytes
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def replaced(self, node: ast.AST, new: str, what: str) -> Change:
        return self.span(node)[0], self.of(node), new, what

    def symbol(self, left: ast.AST, right: ast.AST, old: str, new: str, what: str) -> Change:
        """A change of the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.text.index(old, start, end)
        return at, old, new, what


def _called(node: ast.AST) -> str:
    """The last name of what is called."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _of_call(source: _Source, node: ast.Call) -> Iterator[Change]:
    name = _called(node)
    keywords = {k.arg: k.value for k in node.keywords}
    if name in ("load", "store", "read", "write") and node.args:
        pointer = node.args[0]
        if isinstance(node.func, ast.Attribute):
            yield source.replaced(pointer, f"{source.of(pointer)} + 1", f"{name}: next element")
    mask = keywords.get("mask")
    if mask is not None:
        yield source.replaced(mask, f"({source.of(mask)}) | True", f"{name}: mask dropped")
    axis = keywords.get("axis")
    if isinstance(axis, ast.Constant) and isinstance(axis.value, int):
        yield source.replaced(axis, str(1 - axis.value), "the other axis")
    if name == "where" and len(node.args) == 3:
        _, a, b = node.args
        start, end = source.span(a)[0], source.span(b)[1]
        between = source.text[source.span(a)[1] : source.span(b)[0]]
        new = source.of(b) + between + source.of(a)
        yield start, source.text[start:end], new, "where: sides swapped"
    if name in _OTHERS:
        new = source.of(node.func).removesuffix(name) + _OTHERS[name]
        yield source.replaced(node.func, new, f"{_OTHERS[name]} for {name}")
    if name == "cdiv":
        a, b = node.args
        yield source.replaced(node, f"(({source.of(a)}) // ({source.of(b)}))", "cdiv: rounds down")
    if name == "range" and len(node.args) == 1:
        last = node.args[0]
        yield source.replaced(last, f"{source.of(last)} - 1", "range: one less")


def _of_node(source: _Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call):
        yield from _of_call(source, node)
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for left, op, right in zip(operands, node.ops, operands[1:]):
            old = _SYMBOLS.get(type(op))
            if old is not None:
                new = _COMPARISONS[old]
                yield source.symbol(left, right, old, new, f"{new} for {old}")
    elif isinstance(node, ast.BinOp):
        old = _SYMBOLS.get(type(node.op), "")
        if new := _OPERATORS.get(old):
            yield source.symbol(node.left, node.right, old, new, f"{new} for {old}")
    elif isinstance(node, ast.AugAssign):
        old = _SYMBOLS.get(type(node.op), "")
        if new := _OPERATORS.get(old):
            yield source.symbol(node.target, node.value, f"{old}=", f"{new}=", f"{old}= turned")
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield source.replaced(node, f"({source.of(node.operand)})", "sign flipped")
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    ):
        new = repr(node.value + 1) if node.value in (0, 1) else repr(node.value * 3)
        yield source.replaced(node, new, "other=" if id(node) in source.others else "constant")
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield source.replaced(node.test, f"not ({source.of(node.test)})", "branch turned")
    elif isinstance(node, ast.Expr) and _called(node.value) == "store":
        yield source.replaced(node, "pass", "store dropped")


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """In the order of the source; not annotations, constants of signatures or docstrings."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if not isinstance(child, ast.JoinedStr):
            yield from _walked(child)


def mutants_of(
    root: Path, file: str, chosen: Callable[[ast.FunctionDef], bool], calls: bool = False
) -> list[Mutant]:
    """Mutants of the `chosen` functions of a file. `calls`: statements that are calls are dropped,
    and not those to `store` alone."""
    text = (root / file).read_text()
    source, made, heads = _Source(text), [], {}
    functions = [n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and chosen(n)]
    inner = {id(n) for function in functions for n in ast.walk(function) if n is not function}
    for function in (f for f in functions if id(f) not in inner):
        heads[function.name] = function.lineno
        for statement in function.body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            for node in _walked(statement):
                changes = list(_of_node(source, node))
                if calls and isinstance(node, ast.Expr) and not changes:
                    changes = [source.replaced(node, "pass", "call dropped")]
                made += [mutant(file, text, *change, function.name) for change in changes]
    return marked(text, made, heads)
