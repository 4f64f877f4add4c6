"""Whether a forward does the same whatever its optional arguments are, and otherwise the calls for
which it is traced.

torch.fx cannot be asked whether `mask is None`: for a stand-in it is not. So a forward is traced
with stand-ins and with values in their place. Where the two graphs are equal once the values stand
in the first one, too, the forward hands the argument on and does not look at it.

A forward that looks at it is traced for usual calls: optional arguments have their defaults, and
there are no more of them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import fx

from .._torch_private import CHECKS


def required_of(forward: Callable[..., Any]) -> tuple[list[str], dict[str, Any]]:
    """Arguments of a method without a default, if there are several, and all defaults."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [name for name in named if name not in defaults]
    return required if len(required) > 1 else [], defaults


def optional_of(
    forward: Callable[..., Any], nullable: frozenset[str] = frozenset()
) -> dict[str, Any] | None:
    """Arguments of a forward that may be left out, and their defaults; None if any number may.
    Required ones that it compares with None, and those of `nullable`, count with the default None.
    """
    parameters = list(inspect.signature(forward).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    known = {p.name: p.default for p in parameters if p.default is not p.empty}
    asked = _asked(inspect.unwrap(forward))[0] | nullable
    return known | {p.name: None for p in parameters if p.default is p.empty and p.name in asked}


class Usual(NamedTuple):
    """Calls of a forward with its optional arguments left out. `signature` and `condition` are
    Python, as is `names`: the arguments that a graph has; `defaults` those that may be left out."""

    signature: str
    condition: str
    names: tuple[str, ...]
    defaults: dict[str, Any]

    def entered(self, source: str) -> str:
        """A forward that hands usual calls to the one of this source, and declines others."""
        # Without the line's start a string among the defaults could hold it.
        before, _, last = f"\n{source}".rpartition("\ndef forward(")
        return (
            f"{before}\ndef _usual({last}\n"
            f"def forward{self.signature}:\n"
            f"    if not ({self.condition}):\n"
            "        return NotImplemented\n"
            f"    return _usual({', '.join(('self', *self.names))})\n"
        )


# Names in the source of `Usual.entered`.
_RESERVED = frozenset({"type", "int", "float", "str", "NotImplemented", "_usual"})


def usual_of(forward: Callable[..., Any], nullable: frozenset[str] = frozenset()) -> Usual | None:
    """The usual calls of a forward; None if it has no optional arguments, defaults that are no
    plain values, or a decorator, which may tell an argument from its default. `nullable`: required
    arguments with which it does something else if they are None."""
    if inspect.unwrap(forward) is not forward:
        return None
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if not _RESERVED.isdisjoint(p.name for p in parameters):
        return None
    names: list[str] = []
    asked = _asked(forward)[0] | nullable
    conditions, defaults = [], dict[str, Any]()
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            conditions.append(f"not {p.name}")
            continue
        if p.kind is not p.POSITIONAL_OR_KEYWORD:
            return None
        names.append(p.name)
        if p.default is not p.empty:
            if p.default is not None and type(p.default) not in (bool, int, float, str):
                return None
            defaults[p.name] = p.default
            kind = type(p.default).__name__
            if p.default is None or isinstance(p.default, bool):
                same = f"{p.name} is {p.default!r}"
            elif isinstance(p.default, float):  # 0.0 is not -0.0
                same = f"type({p.name}) is float and {p.name}.hex() == {p.default.hex()!r}"
            else:
                same = f"type({p.name}) is {kind} and {p.name} == {p.default!r}"
            conditions.append(same)
        elif p.name in asked:
            conditions.append(f"{p.name} is not None")
    if not conditions or any(isinstance(v, float) and v - v != 0 for v in defaults.values()):
        return None
    bare = [p.replace(annotation=p.empty) for p in parameters]
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = str(inspect.Signature([first, *bare]))
    return Usual(signature, " and ".join(conditions), tuple(names), defaults)


def without_checks(graph: fx.Graph) -> None:
    """Erases the checks that fx makes of known values, and arguments of any number."""
    for node in reversed(graph.nodes):
        extra = node.op == "placeholder" and str(node.target).startswith("*")
        if extra or (not node.users and _is_check(node)):
            graph.erase_node(node)


def asks_results(module: type) -> bool:
    """Whether a forward, or a method that it calls, asks whether the result of a call is None."""
    forward: Any = inspect.unwrap(getattr(module, "forward"))  # noqa: B009
    code = getattr(forward, "__code__", None)
    methods = () if code is None else (getattr(module, name, None) for name in code.co_names)
    return any(_asked(one)[1] for one in (forward, *methods) if inspect.isfunction(one))


def _asked(function: Any) -> tuple[set[str], bool]:
    """Local variables that a function compares with None, and whether it so compares the result of
    a call or an item of something."""
    made: set[str] = set()  # by calls
    asked: set[str] = set()
    results = False
    code = getattr(function, "__code__", None)
    steps = [] if code is None else list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        before = steps[:i]
        if step.opname.startswith("STORE_FAST") and _is_call(before):
            made.add(str(step.argval))
        jumps = step.opname.startswith("POP_JUMP") and step.opname.endswith("NONE")
        if step.opname == "IS_OP" and before[-1].argrepr == "None":
            jumps, before = True, before[:-1]
        if not jumps or not before:
            continue
        if before[-1].opname.startswith("LOAD_FAST"):
            last = before[-1].argval
            asked.add(last[-1] if isinstance(last, tuple) else str(last))
        results |= _is_call(before)
    return asked, results or bool(asked & made)


def _is_call(steps: list[dis.Instruction]) -> bool:
    """Whether code ends with a call or an item; not `getattr(self, name, None)`, which Python
    answers while a forward is traced."""
    if not steps or not (
        steps[-1].opname.startswith(("CALL", "BINARY_SUBSCR")) or steps[-1].argrepr == "[]"
    ):
        return False
    return not any(s.opname == "LOAD_GLOBAL" and s.argval == "getattr" for s in steps[-7:])


_COMPARES = {"IS_OP", "COMPARE_OP", "CONTAINS_OP"}
_IDLE = {"PRECALL", "CACHE", "PUSH_NULL", "EXTENDED_ARG", "RESUME"}


@functools.lru_cache(1024)
def asks_identity(code: types.CodeType, known_first: bool) -> bool:
    """Whether code compares the type of a local variable, or asks whether that or an attribute of
    it is a certain object, no constant. `known_first`: but for its first argument."""
    first = code.co_varnames[0] if known_first and code.co_argcount else ""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _IDLE]

    def start(place: int) -> int:
        """Where the value begins that is there after a step."""
        while place > 0 and steps[place].opname == "LOAD_ATTR":
            place -= 1
        return place

    def is_local(step: dis.Instruction) -> bool:
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        return step.opname.startswith("LOAD_FAST") and names != (first,)

    for place, step in enumerate(steps):
        if step.opname not in ("IS_OP", "CALL", "CALL_FUNCTION") or place < 2:
            continue
        second = start(place - 1)
        before = start(second - 1)
        if step.opname == "IS_OP":
            roots = (steps[second], steps[before])
            if not any(root.opname == "LOAD_CONST" for root in roots) and any(map(is_local, roots)):
                return True
        elif step.argval == 1 and is_local(steps[second]) and second == place - 1:
            compared = {later.opname for later in steps[place + 1 : place + 5]}
            if steps[before].argval == "type" and not compared.isdisjoint(_COMPARES):
                return True
    return False


def trials(optional: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Values to trace with: the defaults, None, and what else a flag can be."""
    yield optional
    yield dict.fromkeys(optional)
    if any(isinstance(value, bool) for value in optional.values()):
        yield {k: not v if isinstance(v, bool) else v for k, v in optional.items()}


def looks_at(graph: fx.Graph, values: dict[str, Any], traced: fx.Graph) -> bool:
    """Whether a graph of stand-ins is another one than that which was traced with these values."""
    return _canonical(graph, values) != _canonical(traced, values)


def computes_with_none(graph: fx.Graph) -> bool:
    """Whether a graph has an operator of Python with None, which only a stand-in takes."""
    return any(
        node.op == "call_function"
        and node.target is not operator.getitem
        and getattr(node.target, "__module__", "") == "_operator"
        and None in node.args
        for node in graph.nodes
    )


def _canonical(graph: fx.Graph, values: dict[str, Any]) -> list[Any]:
    """Calls in their order, by numbers, and the optional arguments by their values. The checks
    that fx makes of known values are left out."""
    numbers: dict[fx.Node, Any] = {}
    rows: list[Any] = []

    def known(argument: Any) -> Any:
        numbered = fx.node.map_aggregate(
            argument, lambda a: numbers[a] if isinstance(a, fx.Node) else a
        )
        return repr(numbered)

    for node in graph.nodes:
        name = str(node.target)
        if node.op == "placeholder":
            key = name if name in values else name.rpartition("_")[0]
            numbers[node] = values[key] if key in values else _Numbered(name)
        elif not _is_check(node):
            numbers[node] = _Numbered(len(rows))
            rows.append((node.op, node.target, known(node.args), known(node.kwargs)))
    return rows


class _Numbered:
    def __init__(self, name: object) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _is_check(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    compares = node.target is operator.eq and len(node.users) == 1
    return node.target in CHECKS or (compares and all(map(_is_check, node.users)))
