"""Formulas that are an activation. They are compared as polynomials, however they are written.

A polynomial maps monomials to coefficients. A monomial is a sorted tuple of atoms; an atom is the
tensor itself (0) or a function of a polynomial, by its number in a table. So the order of operands,
brackets and the place of constant factors do not matter.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

# Constants are equal if float32 cannot tell them apart: 0.7978845608 is sqrt(2 / pi).
_TOLERANCE = 2.0**-24
# Sums that cancel have other rounding errors than what is left of them.
_CANCELLED = 1e-3
_MOST_TERMS, _MOST_POWERS = 16, 6
_MOST_CALLS = 24  # in one formula

# The functions of fusedtrain.functional that people write by hand, as eager torch computes them.
# At infinities, where a formula has inf * 0, a function has its limit. Pickles have the numbers of
# the rows: new ones come last. 1 / (1 + exp(-x)) is none: its gradient is more exact than that of
# the sigmoid, which is computed from the rounded output.
FORMULAS: tuple[tuple[str, dict[str, Any], Callable[[Tensor], Tensor]], ...] = (
    ("silu", {}, lambda x: x * torch.sigmoid(x)),
    ("quick_gelu", {}, lambda x: x * torch.sigmoid(1.702 * x)),
    ("mish", {}, lambda x: x * torch.tanh(F.softplus(x))),
    ("gelu", {}, lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5))),
    (
        "gelu",
        {"approximate": "tanh"},
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))),
    ),
    (
        "gelu",
        {"approximate": "tanh"},
        lambda x: x * torch.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x)),
    ),
    ("hardsigmoid", {}, lambda x: F.relu6(x + 3) / 6),
    ("hardswish", {}, lambda x: x * (F.relu6(x + 3) / 6)),
    ("hard_mish", {}, lambda x: 0.5 * x * (x + 2).clamp(min=0, max=2)),
    ("relu_squared", {}, lambda x: torch.square(torch.relu(x))),
    ("tanhshrink", {}, lambda x: x - torch.tanh(x)),
    ("softsign", {}, lambda x: x / (1 + abs(x))),
)

Monomial = tuple[int, ...]
Polynomial = dict[Monomial, float]
_Atom = tuple[str, Polynomial, tuple[float, ...]]  # a function, its argument, its parameters


class NoFormula(Exception):
    """An expression that is no formula of one tensor in the functions of this file."""


def is_close(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=_TOLERANCE)


def are_equal(one: Polynomial, other: Polynomial) -> bool:
    return one.keys() == other.keys() and all(is_close(one[k], other[k]) for k in one)


class Atoms:
    """Functions of polynomials by their numbers; equal ones have one number."""

    def __init__(self, others: Atoms | None = None) -> None:
        self._table: list[_Atom] = [("tensor", {}, ())] if others is None else others._table[:]

    def argument_of(self, monomial: Monomial, name: str) -> Polynomial:
        """The argument of this function, if a monomial is one call of it."""
        if len(monomial) != 1 or self._table[monomial[0]][0] != name:
            raise NoFormula
        return self._table[monomial[0]][1]

    def of(self, name: str, argument: Polynomial, parameters: tuple[float, ...] = ()) -> Polynomial:
        for number, (other, known, values) in enumerate(self._table):
            same = other == name and are_equal(known, argument)
            if same and all(map(is_close, values, parameters)):
                return {(number,): 1.0}
        self._table.append((name, argument, parameters))
        return {(len(self._table) - 1,): 1.0}

    def clamped(self, value: Polynomial, low: float, high: float) -> Polynomial:
        """Clamp of a polynomial, as the scaled clamp of one whose first coefficient is 1."""
        if not low < high:
            raise NoFormula
        first = value[max(value)]
        if not math.isfinite(1 / first):
            raise NoFormula
        bounds = sorted((low / first, high / first))
        return _scaled(self.of("clamp", _scaled(value, 1 / first), tuple(bounds)), first)


def _number(value: float) -> Polynomial:
    if not math.isfinite(value):
        raise NoFormula
    return {(): value} if value else {}


def _constant(value: Polynomial) -> float:
    if not value.keys() <= {()}:
        raise NoFormula
    return value.get((), 0.0)


def _scaled(value: Polynomial, factor: float) -> Polynomial:
    if factor == 0 or not math.isfinite(factor):
        raise NoFormula
    return {monomial: factor * c for monomial, c in value.items()}


def _sum(one: Polynomial, other: Polynomial) -> Polynomial:
    total = dict(one)
    for monomial, c in other.items():
        before = total.get(monomial, 0.0)
        total[monomial] = before + c
        if abs(before + c) <= _CANCELLED * max(abs(before), abs(c)):
            raise NoFormula
    if len(total) > _MOST_TERMS:
        raise NoFormula
    return total


def _product(one: Polynomial, other: Polynomial) -> Polynomial:
    total: Polynomial = {}
    for a, c in one.items():
        for b, d in other.items():
            monomial = tuple(sorted(a + b))
            if len(monomial) > _MOST_POWERS or c * d == 0:
                raise NoFormula
            total = _sum(total, {monomial: c * d})
    if not total:  # of nothing: 0 * x is no 0 where x is infinite
        raise NoFormula
    return total


def _power(value: Polynomial, exponent: Polynomial) -> Polynomial:
    number = _constant(exponent)
    if number not in (1.0, 2.0, 3.0):
        raise NoFormula
    result = value
    for _ in range(int(number) - 1):
        result = _product(result, value)
    return result


def _quotient(atoms: Atoms, one: Polynomial, other: Polynomial) -> Polynomial:
    if other.keys() <= {()}:
        divisor = _constant(other)
        return _scaled(one, 1 / divisor if divisor else math.inf)
    return _product(one, _logistic(atoms, other) or atoms.of("inverse", other))


def _logistic(atoms: Atoms, divisor: Polynomial) -> Polynomial:
    """The inverse of c + c exp(-z), which is sigmoid(z) / c; empty for other divisors."""
    (first, c), *others = sorted(divisor.items())
    if first != () or len(others) != 1 or not is_close(c, others[0][1]):
        return {}
    try:
        argument = atoms.argument_of(others[0][0], "exp")
    except NoFormula:
        return {}
    return _scaled(atoms.of("sigmoid", _scaled(argument, -1.0)), 1 / c)


def _clamp(atoms: Atoms, value: Polynomial, low: Any = None, high: Any = None) -> Polynomial:
    low = -math.inf if low is None else _constant(low)
    return atoms.clamped(value, low, math.inf if high is None else _constant(high))


def _softplus(
    atoms: Atoms, value: Polynomial, beta: Any = None, threshold: Any = None
) -> Polynomial:
    one, far = beta or {(): 1.0}, threshold or {(): 20.0}
    if _constant(one) != 1.0 or _constant(far) < 20.0:
        raise NoFormula
    return atoms.of("softplus", value)


def _log(atoms: Atoms, value: Polynomial) -> Polynomial:
    """Only log(1 + exp(x)), which is softplus."""
    rest = dict(value)
    if rest.pop((), 0.0) != 1.0:
        raise NoFormula
    return _log1p(atoms, rest)


def _log1p(atoms: Atoms, value: Polynomial) -> Polynomial:
    if list(value.values()) != [1.0]:
        raise NoFormula
    return atoms.of("softplus", atoms.argument_of(next(iter(value)), "exp"))


def _hardsigmoid(atoms: Atoms, value: Polynomial) -> Polynomial:
    return _scaled(atoms.clamped(_sum(value, _number(3.0)), 0.0, 6.0), 1 / 6)


_Rule = Callable[..., Polynomial]
_RULES: dict[str, _Rule] = {
    "add": lambda _, a, b: _sum(a, b),
    "sub": lambda _, a, b: _sum(a, _scaled(b, -1.0)),
    "rsub": lambda _, a, b: _sum(b, _scaled(a, -1.0)),
    "mul": lambda _, a, b: _product(a, b),
    "multiply": lambda _, a, b: _product(a, b),
    "neg": lambda _, a: _scaled(a, -1.0),
    "div": _quotient,
    "truediv": _quotient,
    "divide": _quotient,
    "reciprocal": lambda t, a: _quotient(t, {(): 1.0}, a),
    "pow": lambda _, a, b: _power(a, b),
    "square": lambda _, a: _product(a, a),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda t, a, low: _clamp(t, a, low),
    "clamp_max": lambda t, a, high: _clamp(t, a, None, high),
    "relu": lambda t, a: t.clamped(a, 0.0, math.inf),
    "relu6": lambda t, a: t.clamped(a, 0.0, 6.0),
    "hardtanh": lambda t, a, low=None, high=None: _clamp(
        t, a, {(): -1.0} if low is None else low, {(): 1.0} if high is None else high
    ),
    "hardsigmoid": _hardsigmoid,
    "softplus": _softplus,
    "expit": lambda t, a: t.of("sigmoid", a),
    "ndtr": lambda t, a: _scaled(_sum(_number(1.0), t.of("erf", _scaled(a, 0.5**0.5))), 0.5),
    "log": _log,
    "log1p": _log1p,
    **{
        name: lambda t, a, _name=name: t.of(_name, a)
        for name in ("sigmoid", "tanh", "erf", "exp", "abs")
    },
}
# Under autocast, CUDA computes these in float32 and gives float32.
WIDENING = {"softplus", "pow", "square", "exp", "log", "log1p", "reciprocal"}
_NO_METHODS = ("relu6", "hardtanh", "softplus", "expit", "ndtr")
# Functions without which an expression is no activation.
TELLING = {
    "abs", "clamp", "clamp_max", "clamp_min", "clip", "erf", "exp", "expit", "hardsigmoid",
    "hardtanh", "ndtr", "relu", "relu6", "sigmoid", "tanh",
}  # fmt: skip
_KEYWORDS = {
    "input": 0, "other": 1, "exponent": 1, "min": 1, "max": 2, "min_val": 1, "max_val": 2,
    "beta": 1, "threshold": 2,
}  # fmt: skip


def _functions() -> dict[Any, str]:
    functions: dict[Any, str] = {}
    for name in _RULES:
        for space in (torch, torch.special, F, operator):
            if callable(getattr(space, name, None)):
                functions[getattr(space, name)] = name
    return functions


_FUNCTIONS = _functions()


def rule_of(node: fx.Node) -> str:
    """The function of this file that a call is of, '' if there is none."""
    if node.op == "call_method":
        name = str(node.target)
        named = {"__add__": "add", "__mul__": "mul", "absolute": "abs", "negative": "neg"}
        name = named.get(name, name)
        return name if name in _RULES and name not in _NO_METHODS else ""
    return _FUNCTIONS.get(node.target, "") if node.op == "call_function" else ""


def polynomial_of(
    node: fx.Node, leaf: fx.Node, atoms: Atoms, known: dict[fx.Node, Polynomial]
) -> Polynomial:
    """The value of a node as a polynomial of `leaf`. `known` collects the nodes in between.

    Raises:
        NoFormula: the node computes with something else, too, or in an unknown way.
    """
    if node is leaf:
        return {(0,): 1.0}
    if node in known:
        return known[node]
    name = rule_of(node)
    if not name:
        raise NoFormula
    values: list[Any] = [None, None, None]
    places = [*enumerate(node.args)]
    for key, value in node.kwargs.items():
        if key == "inplace" and value is False:
            continue
        if key not in _KEYWORDS:  # alpha, rounding_mode, out
            raise NoFormula
        places.append((_KEYWORDS[key], value))
    for place, value in places:
        if place == 3 and name == "hardtanh" and value is False:
            continue
        if place > 2:
            raise NoFormula
        if isinstance(value, fx.Node):
            values[place] = polynomial_of(value, leaf, atoms, known)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            values[place] = _number(float(value))
        elif value is not None and not (place == 1 and name in ("relu", "relu6", "hardsigmoid")):
            raise NoFormula  # a tensor of the model, say
        elif value not in (None, False):
            raise NoFormula
    if name in ("relu", "relu6", "hardsigmoid"):
        values = values[:1]
    while values and values[-1] is None:
        values.pop()
    if not values or values[0] is None:
        raise NoFormula
    try:
        known[node] = _RULES[name](atoms, *values)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise NoFormula from None
    return known[node]


@functools.cache
def _table() -> tuple[Atoms, list[Polynomial]]:
    atoms, rows = Atoms(), []
    for _, _, formula in FORMULAS:
        graph = fx.Tracer().trace(formula)
        leaf, *_, output = graph.nodes
        rows.append(polynomial_of(output.args[0], leaf, atoms, {}))
    return atoms, rows


def _region(root: fx.Node) -> list[fx.Node]:
    """The calls before a node of which a formula may consist."""
    region = [root]
    for node in region:
        fresh = [n for n in node.all_input_nodes if n not in region and rule_of(n)]
        region += fresh[: _MOST_CALLS - len(region)]
    return region


class Formula(NamedTuple):
    """Calls that compute one of the `FORMULAS`."""

    number: int
    input: fx.Node
    nodes: tuple[fx.Node, ...]
    widens: bool  # under autocast CUDA would compute it in float32


def formula_of(root: fx.Node) -> Formula | None:
    """The formula whose last call `root` is, if it is one that is known."""
    if rule_of(root) in ("", "relu", "clamp", "sigmoid"):
        return None
    region = _region(root)
    if not any(rule_of(node) in TELLING for node in region):
        return None
    known_atoms, rows = _table()
    for leaf in dict.fromkeys(n for node in region for n in node.all_input_nodes):
        between: dict[fx.Node, Polynomial] = {}
        try:
            value = polynomial_of(root, leaf, Atoms(known_atoms), between)
        except NoFormula:
            continue
        for number, row in enumerate(rows):
            if are_equal(value, row):
                nodes = tuple(node for node in root.graph.nodes if node in between)
                return Formula(number, leaf, nodes, any(map(_widens, nodes)))
    return None


def _widens(node: fx.Node) -> bool:
    """Whether CUDA's autocast computes a call in float32: `1 / x` is a reciprocal to it."""
    divides = rule_of(node) in ("div", "truediv", "divide")
    return rule_of(node) in WIDENING or (divides and not isinstance(node.args[0], fx.Node))


def is_clamp_of_relu(node: fx.Node) -> bool:
    """Whether a call has the values of ReLU or ReLU6, and at the kinks another slope."""
    if rule_of(node) not in ("clamp", "clip", "clamp_min") or len(node.all_input_nodes) != 1:
        return False
    atoms = Atoms()
    try:
        value = polynomial_of(node, node.all_input_nodes[0], atoms, {})
    except NoFormula:
        return False
    return any(value == atoms.clamped({(0,): 1.0}, 0.0, high) for high in (math.inf, 6.0))
