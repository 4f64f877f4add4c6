"""Activations among the calls of a forward: one call of a function, or a formula of several.

`x * x.sigmoid()` is SiLU however it is written: :mod:`._algebra` compares formulas. Eager torch
rounds after each call of a formula and the function rounds once; where a kink has two slopes, the
function may have the other one.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as torch_functional
from torch import fx, nn

from .. import functional as fused_functional
from .._calls import autocasts, is_plain
from .._graph.flow import Trace
from ..nn.parts import ROW_OF, activation_of
from ..ops.pool import is_one
from ..reference.pointwise import POINTWISE
from ._algebra import FORMULAS, formula_of

_PLAIN = (int, float, bool, str, type(None))
MODULE_OF: dict[str, type] = {
    row.name: cls for cls, row in ROW_OF.items() if cls.__module__ == "fusedtrain.nn.activation"
}


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
    torch_functional.layer_norm: "layer_norm", torch.layer_norm: "layer_norm",
    torch_functional.rms_norm: "rms_norm", torch.rms_norm: "rms_norm",
    torch_functional.max_pool2d: "max_pool2d", torch.max_pool2d: "max_pool2d",
    torch_functional.prelu: "prelu", torch.prelu: "prelu", "prelu": "prelu",
}  # fmt: skip

DROPOUT: dict[Any, str] = {torch_functional.dropout: "dropout", torch.dropout: "dropout"}


def dropout_of(node: fx.Node) -> Match | None:
    """One call of dropout that may drop something, and not in place."""
    name = DROPOUT.get(node.target, "") if node.op == "call_function" else ""
    parameters = _arguments(name, node) if name else {}
    input = parameters.pop("input", None)
    drops = parameters.get("p", 0.5) != 0 and parameters.get("training", True)
    if not isinstance(input, fx.Node) or node.all_input_nodes != [input] or not drops:
        return None
    return None if parameters.pop("inplace", False) else Match(name, parameters, input, (node,))


def attention_of(node: fx.Node) -> Match | None:
    """One call of attention."""
    name = "scaled_dot_product_attention"
    parameters = _arguments(name, node)
    query = parameters.pop("query", None)
    return Match(name, parameters, query, (node,)) if isinstance(query, fx.Node) else None


def other_call_of(node: fx.Node) -> Match | None:
    """One call of a function of `OTHERS` that fusedtrain.functional has with the same arguments:
    numbers, and tensors called weight and bias."""
    name = name_of_other(node)
    parameters = _arguments(name, node) if name else {}
    input, *others = parameters.pop("input", None), *map(parameters.get, ("weight", "bias"))
    tensors = [value for value in (input, *others) if isinstance(value, fx.Node)]
    values = [v for v in parameters.values() if not isinstance(v, fx.Node) or v not in others]
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


_PLANES = (["2", "3"], ["-1", "-2"])  # dimensions of images
_SIZES = ("dim", "numel", "size", getattr)


def mean_of(node: fx.Node, module: nn.Module | None) -> Match | None:
    """The mean of each channel of images that something else reads, too: the squeeze of a gate.
    The gradients of both are added. `module` is the one that is called."""
    is_call = node.op in ("call_function", "call_method")
    if type(module) is nn.AdaptiveAvgPool2d and len(node.args) == 1 and not node.kwargs:
        name, parameters = "adaptive_avg_pool2d", {"output_size": module.output_size}
    elif is_call and node.target is torch_functional.adaptive_avg_pool2d:
        name = "adaptive_avg_pool2d"
        parameters = _arguments(name, node)
    elif is_call and node.target in (torch.mean, "mean"):
        name, parameters = "mean", _arguments("mean", node)
    else:
        return None
    parameters.pop("input", None)
    dims = parameters.get("dim", ())
    is_of_planes = isinstance(dims, (tuple, list)) and sorted(map(str, dims)) in _PLANES
    if not (is_of_planes or is_one(parameters.get("output_size"))):
        return None
    input = node.args[0] if node.args else None
    if not isinstance(input, fx.Node) or node.all_input_nodes != [input]:
        return None
    read_too = any(user is not node and user.target not in _SIZES for user in input.users)
    return Match(name, parameters, input, (node,)) if read_too else None


def method(input: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Our function for the method of a tensor; the method of anything else, such as an array."""
    if not isinstance(input, torch.Tensor):
        return getattr(input, name)(*args, **kwargs)
    if name.endswith("_"):
        kwargs["inplace"] = True
    return getattr(fused_functional, name.rstrip("_"))(input, *args, **kwargs)


method.__module__ = "fusedtrain.conversion"  # the name in pickles


def _takes_in_place(name: str) -> bool:
    return "inplace" in inspect.signature(getattr(fused_functional, name)).parameters


_matches: weakref.WeakKeyDictionary[fx.Graph, dict[fx.Node, Match]] = weakref.WeakKeyDictionary()


def matches_of(graph: fx.Graph) -> dict[fx.Node, Match]:
    """The activations of a graph by their last calls; none has a call of another one."""
    if graph not in _matches:
        matches: dict[fx.Node, Match] = {}
        taken: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            if node in taken:
                continue
            match = _formula(node) or call_of(node)
            if match is not None:
                matches[node] = match
                taken.update(match.nodes)
        _matches[graph] = dict(reversed(matches.items()))
    return _matches[graph]


def _formula(root: fx.Node) -> Match | None:
    """The formula whose last call `root` is, if nobody else sees the values in between, and all is
    computed in one context."""
    formula = formula_of(root)
    if formula is None:
        return None
    number, input, nodes, widens = formula
    for node in nodes[:-1]:
        seen = not set(node.users) <= set(nodes) or Trace.is_kept(node)
        if seen or not Trace.are_alike(node, root):
            return None
    name, parameters, _ = FORMULAS[number]
    return Match(name, parameters, input, nodes, number, widens)


def is_activation(module: nn.Module) -> bool:
    files = ("torch.nn.modules.activation", "timm.layers.activations", "fusedtrain.nn.activation")
    plain = type(module).__name__ not in ("Softmax", "Softmax2d", "GLU", "MultiheadAttention")
    return plain and any(cls.__module__.startswith(files) for cls in type(module).__mro__)


def module_of(match: Match) -> nn.Module | None:
    """The activation module that does the same, if batch norm has a kernel for it."""
    parameters = {name: v for name, v in match.parameters.items() if name != "inplace"}
    if (
        match.widens
        or not parameters.keys() <= inspect.signature(MODULE_OF[match.name]).parameters.keys()
    ):
        return None
    module: nn.Module = MODULE_OF[match.name](**parameters)
    return None if activation_of(module) is None else module
