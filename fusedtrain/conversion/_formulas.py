"""Activations among the calls of a forward: one call of a function, or a formula of several.

`x * x.sigmoid()` is SiLU however it is written: :mod:`._algebra` compares formulas. Eager torch
rounds after each call of a formula and the function rounds once; where a kink has two slopes, the
function may have the other one.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, fx

from .. import functional as fused_functional
from .._calls import autocasts, is_plain
from .._graph.flow import Trace
from ..reference.pointwise import POINTWISE
from ._algebra import (
    TELLING,
    WIDENING,
    Atoms,
    NoFormula,
    Polynomial,
    are_equal,
    polynomial_of,
    rule_of,
)

_MOST_CALLS = 24  # in one formula
_PLAIN = (int, float, bool, str, type(None))

# The functions of fusedtrain.functional that people write by hand, as eager torch computes them.
# At infinities, where a formula has inf * 0, a function has its limit. Pickles have the numbers of
# the rows: new ones come last. 1 / (1 + exp(-x)) is none: its gradient is more exact than that of
# the sigmoid, which is computed from the rounded output.
FORMULAS: tuple[tuple[str, dict[str, Any], Callable[[Tensor], Tensor]], ...] = (
    ("silu", {}, lambda x: x * torch.sigmoid(x)),
    ("quick_gelu", {}, lambda x: x * torch.sigmoid(1.702 * x)),
    ("mish", {}, lambda x: x * torch.tanh(torch_functional.softplus(x))),
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
    ("hardsigmoid", {}, lambda x: torch_functional.relu6(x + 3) / 6),
    ("hardswish", {}, lambda x: x * (torch_functional.relu6(x + 3) / 6)),
    ("hard_mish", {}, lambda x: 0.5 * x * (x + 2).clamp(min=0, max=2)),
    ("relu_squared", {}, lambda x: torch.square(torch.relu(x))),
    ("tanhshrink", {}, lambda x: x - torch.tanh(x)),
    ("softsign", {}, lambda x: x / (1 + abs(x))),
)


class Match(NamedTuple):
    """Calls that are one activation of `input`; the last of `nodes` gives its value. `parameters`
    are the other arguments of the function of fusedtrain.functional, called `name`."""

    name: str
    parameters: dict[str, Any]
    input: fx.Node
    nodes: tuple[fx.Node, ...]
    number: int = -1  # of a formula: its place in FORMULAS
    widens: bool = False  # under autocast CUDA would compute it in float32

    @property
    def root(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def is_formula(self) -> bool:
        return self.number >= 0

    def computes(self, value: fx.Node) -> bool:
        """Whether it is a formula of this value, and all that is done with it."""
        return self.is_formula and self.input is value and set(value.users) <= set(self.nodes)

    @property
    def in_place(self) -> bool:
        return bool(self.parameters.get("inplace", False))


def activated(input: Any, name: str, number: int, widens: bool, **parameters: Any) -> Any:
    """The function that formula `number` is. Where the input is no plain floating tensor, the
    formula itself; in float32 where autocast would have computed it so."""
    if not is_plain(input):
        return FORMULAS[number][2](input)
    if widens and autocasts(input) and not autocasts(input, "cpu"):
        input = input.float()
    return getattr(fused_functional, name)(input, **parameters)


activated.__module__ = "fusedtrain.conversion"  # the name in pickles


def _functions() -> dict[Any, tuple[str, bool]]:
    """Functions and names of methods of Tensor -> activation, and whether it works in place."""
    activations: dict[Any, tuple[str, bool]] = {}
    for row in POINTWISE:
        for name, in_place in ((row.name, False), (f"{row.name}_", True)):
            for space in (torch_functional, torch, fused_functional):
                if callable(getattr(space, name, None)):
                    activations[getattr(space, name)] = (row.name, in_place)
    methods = ("relu", "sigmoid", "tanh", "hardshrink")
    return activations | {f"{m}{'_' * in_place}": (m, in_place) for m in methods
                          for in_place in (False, True)}  # fmt: skip


FUNCTIONS = _functions()


def name_of_call(node: fx.Node) -> str:
    """The activation that a call is of, by name, with whatever arguments; '' if of none."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return FUNCTIONS.get(node.target, ("", False))[0]


def call_of(node: fx.Node) -> Match | None:
    """One call of an activation function, if its arguments are numbers but for the first."""
    name = name_of_call(node)
    if not name or len(node.all_input_nodes) != 1:
        return None
    parameters = _arguments(name, node)
    input = parameters.pop("input", None)
    if FUNCTIONS.get(node.target, ("", False))[1]:
        parameters["inplace"] = True
    if not isinstance(input, fx.Node) or any(type(v) not in _PLAIN for v in parameters.values()):
        return None
    if parameters.get("inplace") and not _takes_in_place(name):
        return None
    if parameters.get("inplace") is False:
        del parameters["inplace"]
    return Match(name, parameters, input, (node,))


def _arguments(name: str, node: fx.Node) -> dict[str, Any]:
    """The arguments of a call, as the function of fusedtrain.functional names them."""
    bind: Callable[..., Any] = inspect.signature(getattr(fused_functional, name)).bind
    try:
        return dict(bind(*node.args, **node.kwargs).arguments)
    except TypeError:
        return {}


# Functions that are no activation of one tensor and numbers.
OTHERS: dict[Any, str] = {
    torch_functional.glu: "glu",
    torch_functional.max_pool2d: "max_pool2d", torch.max_pool2d: "max_pool2d",
    torch_functional.prelu: "prelu", torch.prelu: "prelu", "prelu": "prelu",
}  # fmt: skip


def other_call_of(node: fx.Node) -> Match | None:
    """One call of a function of `OTHERS` that fusedtrain.functional has with the same arguments:
    numbers, and the weight of PReLU."""
    name = name_of_other(node)
    parameters = _arguments(name, node) if name else {}
    input, weight = parameters.pop("input", None), parameters.get("weight")
    tensors = [value for value in (input, weight) if isinstance(value, fx.Node)]
    values = [v for v in parameters.values() if v is not weight]
    items = [i for v in values for i in (v if isinstance(v, (list, tuple)) else [v])]
    if not tensors or not isinstance(input, fx.Node) or parameters.get("return_indices"):
        return None
    if any(type(item) not in _PLAIN for item in items) or node.all_input_nodes != tensors:
        return None
    return Match(name, parameters, input, (node,))


def name_of_other(node: fx.Node) -> str:
    """The function of `OTHERS` that a call is of, by name; '' if of none."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return OTHERS.get(node.target, "")


def _takes_in_place(name: str) -> bool:
    return "inplace" in inspect.signature(getattr(fused_functional, name)).parameters


@functools.cache
def _table() -> tuple[Atoms, list[Polynomial]]:
    atoms, rows = Atoms(), []
    for _, _, formula in FORMULAS:
        graph = fx.Tracer().trace(formula)
        leaf, *_, output = graph.nodes
        rows.append(polynomial_of(output.args[0], leaf, atoms, {}))
    return atoms, rows


def formula_of(root: fx.Node) -> Match | None:
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
                name, parameters, _ = FORMULAS[number]
                nodes = tuple(node for node in root.graph.nodes if node in between)
                widens = any(map(_widens, nodes))
                return Match(name, parameters, leaf, nodes, number, widens)
    return None


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


def _widens(node: fx.Node) -> bool:
    """Whether CUDA's autocast computes a call in float32: `1 / x` is a reciprocal to it."""
    divides = rule_of(node) in ("div", "truediv", "divide")
    return rule_of(node) in WIDENING or (divides and not isinstance(node.args[0], fx.Node))


def _region(root: fx.Node) -> list[fx.Node]:
    """The calls before a node of which a formula may consist."""
    region = [root]
    for node in region:
        fresh = [n for n in node.all_input_nodes if n not in region and rule_of(n)]
        region += fresh[: _MOST_CALLS - len(region)]
    return region


_matches: weakref.WeakKeyDictionary[fx.Graph, dict[fx.Node, Match]] = weakref.WeakKeyDictionary()


def matches_of(graph: fx.Graph) -> dict[fx.Node, Match]:
    """The activations of a graph by their last calls; none has a call of another one."""
    if graph not in _matches:
        matches: dict[fx.Node, Match] = {}
        taken: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if node in taken:
                continue
            match = formula_of(node)
            if match is None or not _is_closed(match):
                match = call_of(node)
            if match is not None:
                matches[node] = match
                taken.update(match.nodes)
        _matches[graph] = dict(reversed(matches.items()))
    return _matches[graph]


def _is_closed(match: Match) -> bool:
    """Whether nobody else sees the values in between, and all is computed in one context."""
    inner = match.nodes[:-1]
    if not all(set(node.users) <= set(match.nodes) for node in inner):
        return False
    return not any(Trace.is_kept(n) or not Trace.are_alike(n, match.root) for n in inner)
