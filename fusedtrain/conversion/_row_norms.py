"""Modules whose forward is an RMS norm, written out: those of transformers' language models, and
over channels timm's RmsNorm2d.

    weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + eps) * weight.reshape(1, -1, 1, 1)

Calls are compared as products of factors, in whatever order and with whatever casts. A call with
other tensors than the formula is for runs the stock forward.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .._calls import autocasts, is_plain
from .._graph.flow import Trace
from ..functional import rms_norm, rms_norm_channels
from ._report import Applied
from ._rules import Rules
from ._units import Change, Copy, Unit

WORDS = {"mean"}  # in the forward of such a module
# Where the dtype of a value comes from: the input, the weight, or a constant. Several: the wider.
Dtypes = frozenset[str | torch.dtype]


class _Value(NamedTuple):
    """A product of factors: the input "x", the weight "w" or "1+w", the norm's divisor inverted "r"
    or as it is "s"; or one of "mean", of squares, and "mean+eps"."""

    factors: tuple[str, ...]
    dtypes: Dtypes = frozenset()


class RmsNorm(NamedTuple):
    """An RMS norm of `input` in a graph. `one`: the factor is 1 + weight. `inner`, `outer`: dtypes
    of the squares and of the result. `dim`: -1 or 1. `ones`: dimensions of the weight behind its
    values."""

    input: fx.Node
    weight: fx.Node | None
    eps: float
    one: bool
    inner: Dtypes
    outer: Dtypes
    dim: int
    ones: int
    nodes: tuple[fx.Node, ...]


class _Unknown(Exception):
    """An expression that is no part of an RMS norm."""


def rms_normed(
    input: Any, weight: Any, eps: float, one: bool, inner: tuple[Any, ...], outer: tuple[Any, ...],
    dim: int = -1, ones: int = 0,
) -> Any:  # fmt: skip
    """The RMS norm of :class:`RmsNorm`; NotImplemented where the stock forward would have an output
    of another dtype than :func:`fusedtrain.functional.rms_norm`, compute in more bits, or raise an
    error."""
    if not is_plain(input) or input.dim() <= max(dim, 0):
        return NotImplemented
    if weight is not None and not (
        is_plain(weight)
        and weight.shape == (input.shape[dim],)
        and (dim == -1 or input.dim() == ones + 2)
    ):
        return NotImplemented
    computes = _resolved(inner, input, weight)
    # 16 bits are computed in float32; where the stock forward does not, autocast on CUDA may.
    narrow = input.dtype in (torch.float16, torch.bfloat16) and computes is not input.dtype
    if computes is not (torch.float32 if narrow else input.dtype):
        return NotImplemented
    if computes.itemsize == 2 and autocasts(input, "cuda"):
        return NotImplemented
    dtype = _resolved(outer, input, weight)
    computed = torch.promote_types(input.dtype, dtype)
    if weight is not None:
        if one or weight.dtype is not computed:
            weight = weight.to(torch.promote_types(computed, torch.float32))
        weight = 1 + weight if one else weight
    input = input.to(computed)
    output: Any
    if dim == -1:
        output = rms_norm(input, list(input.shape[-1:]), weight, eps)
    else:
        output = rms_norm_channels(input, weight, eps)
    return output.to(dtype)


rms_normed.__module__ = "fusedtrain.conversion"  # the name in pickles


def _resolved(dtypes: tuple[Any, ...], input: Tensor, weight: Tensor | None) -> torch.dtype:
    tensors = {"x": input, "w": weight}
    resolved = [getattr(tensors.get(dtype), "dtype", dtype) for dtype in dtypes]
    return functools.reduce(torch.promote_types, resolved)


def rms_norm_of(trace: Trace, graph: fx.Graph) -> RmsNorm | None:
    """The RMS norm that a graph is, and nothing else."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    root = next(iter(reversed(graph.nodes))).args[0]
    if len(inputs) != 1 or not isinstance(root, fx.Node):
        return None
    known = {inputs[0]: _Value(("x",), frozenset({"x"}))}
    reader = _Reader(trace.module, known)
    try:
        value = reader.value_of(root)
    except _Unknown:
        return None
    if value.factors not in (("r", "x"), ("r", "w", "x"), ("1+w", "r", "x")):
        return None
    nodes = tuple(n for n in graph.nodes if n in known and n.op.startswith("call"))
    others = (n for n in graph.nodes if n.op.startswith("call") and n not in known)
    if not all(n.target in (getattr, operator.eq, operator.truth) for n in others):
        return None
    assert reader.eps is not None
    for node in nodes:
        seen = node is not root and not set(node.users) <= set(nodes)
        if seen or Trace.is_kept(node) or not Trace.are_alike(node, root):
            return None
    weight = reader.weight if len(value.factors) == 3 else None
    if weight is not None and reader.ones and reader.dim == -1:
        return None
    return RmsNorm(
        inputs[0], weight, reader.eps, "1+w" in value.factors, reader.inner, value.dtypes,
        reader.dim, reader.ones, nodes,
    )  # fmt: skip


class _Reader:
    """The values of a graph's nodes; `known` collects them."""

    def __init__(self, module: nn.Module, known: dict[fx.Node, _Value]) -> None:
        self.module, self.known = module, known
        self.eps: float | None = None
        self.inner: Dtypes = frozenset()
        self.weight: fx.Node | None = None
        self.dim, self.ones = -1, 0

    def value_of(self, node: Any) -> _Value:
        if not isinstance(node, fx.Node):
            raise _Unknown
        if node not in self.known:
            self.known[node] = self._weight(node) if node.op == "get_attr" else self._call(node)
        return self.known[node]

    def _weight(self, node: fx.Node) -> _Value:
        tensor = getattr(self.module, str(node.target), None)
        if self.weight not in (None, node) and self.weight.target != node.target:
            raise _Unknown
        if not isinstance(tensor, Tensor) or tensor.dim() != 1:
            raise _Unknown
        self.weight = node
        return _Value(("w",), frozenset({"w"}))

    def _call(self, node: fx.Node) -> _Value:
        name = _NAMES.get(node.target, "") if node.op.startswith("call_") else ""
        one, *others = node.args if node.args else (None,)
        if name == "cast":
            return self._cast(node, others)
        if name == "mean":
            return self._mean(node, others)
        if node.kwargs or not name:
            raise _Unknown
        if name in ("reshape", "getitem"):
            return self._before_ones(self.value_of(one), others)
        if len(others) > 1:
            raise _Unknown
        other = others[0] if others else None
        if name in ("rsqrt", "sqrt", "square"):
            value = self.value_of(one)
            if name == "square":
                return self._product(value, value)
            if value.factors != ("mean+eps",):
                raise _Unknown
            return _Value(("r" if name == "rsqrt" else "s",), value.dtypes)
        if name == "pow" and type(other) in (int, float):
            value = self.value_of(one)
            if other == 2:
                return self._product(value, value)
            if other == -0.5 and value.factors == ("mean+eps",):
                return _Value(("r",), value.dtypes)
        if name == "mul":
            return self._product(self.value_of(one), self.value_of(other))
        if name == "div":
            divisor = self.value_of(other)
            if divisor.factors == ("s",):
                inverse = _Value(("r",), divisor.dtypes)
                is_one = type(one) in (int, float) and one == 1
                return inverse if is_one else self._product(self.value_of(one), inverse)
        if name == "add":
            number, tensor = (one, other) if type(one) in (int, float) else (other, one)
            return self._sum(number, self.value_of(tensor))
        raise _Unknown

    def _product(self, one: _Value, other: _Value) -> _Value:
        factors = tuple(sorted(one.factors + other.factors))
        if len(set(factors)) < len(factors) and factors != ("x", "x"):
            raise _Unknown
        if not set(factors) <= {"x", "w", "1+w", "r"}:
            raise _Unknown
        return _Value(factors, one.dtypes | other.dtypes)

    def _sum(self, number: Any, value: _Value) -> _Value:
        if type(number) not in (int, float):
            raise _Unknown
        if value.factors == ("w",) and number == 1:
            return value._replace(factors=("1+w",))
        if value.factors != ("mean",) or self.eps not in (None, number) or number < 0:
            raise _Unknown
        self.eps = float(number)
        return value._replace(factors=("mean+eps",))

    def _before_ones(self, value: _Value, shape: Any) -> _Value:
        """The weight as ``weight.reshape(1, -1, 1, 1)`` or ``weight[:, None, None]``."""
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = shape[0]
        shape = [*shape]
        if shape[:1] in ([1], [None]):
            del shape[0]
        ones = len(shape) - 1
        if ones < 1 or value.factors not in (("w",), ("1+w",)) or shape not in (
            [-1] + [1] * ones, [slice(None)] + [None] * ones
        ):  # fmt: skip
            raise _Unknown
        self.ones = ones
        return value

    def _mean(self, node: fx.Node, others: list[Any]) -> _Value:
        named = dict(zip(("dim", "keepdim"), others)) | node.kwargs
        value = self.value_of(node.args[0])
        dim = named.pop("dim", None)
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            dim = dim[0]
        if value.factors != ("x", "x") or dim not in (-1, 1):
            raise _Unknown
        self.dim = dim
        if named.pop("keepdim", False) is not True or named or len(others) > 2:
            raise _Unknown
        if self.inner not in (frozenset(), value.dtypes):
            raise _Unknown
        self.inner = value.dtypes
        return value._replace(factors=("mean",))

    def _cast(self, node: fx.Node, others: list[Any]) -> _Value:
        value = self.value_of(node.args[0])
        named = dict(node.kwargs)
        target = named.pop("dtype", None) if not others else others.pop()
        if node.target in ("float", "double"):
            target = torch.float32 if node.target == "float" else torch.float64
        if others or named:
            raise _Unknown
        if target is torch.float32 or target is torch.float64:  # narrower ones overflow
            return value._replace(dtypes=frozenset({target}))
        if not isinstance(target, fx.Node):
            raise _Unknown
        if target.target is getattr and target.args[1:] == ("dtype",):
            target = target.args[0]
        elif node.target != "type_as":
            raise _Unknown
        return value._replace(dtypes=self.value_of(target).dtypes)


_NAMES: dict[Any, str] = {
    **{
        space: name
        for name, others in {
            "add": (operator.add, "add"),
            "mul": (operator.mul, torch.multiply, "mul", "multiply"),
            "div": (operator.truediv, torch.divide, "div"),
            "pow": (operator.pow, "pow"),
            "mean": ("mean",),
            "rsqrt": ("rsqrt",),
            "sqrt": ("sqrt",),
            "square": ("square",),
            "reshape": ("reshape", "view"),
        }.items()
        for space in (getattr(torch, name), *others)
    },
    **dict.fromkeys(("to", "float", "double", "type", "type_as"), "cast"),
    operator.getitem: "getitem",
}


@dataclass(eq=False, kw_only=True)
class RmsNormSite(Unit):
    """The whole forward of a module, which is an RMS norm."""

    lines, left = "calls", "left_calls"

    norm: RmsNorm

    def written(self, change: Change, copy: Copy) -> fx.Node:
        norm = self.norm
        dtypes = (tuple(sorted(d, key=str)) for d in (norm.inner, norm.outer))
        arguments = (copy.of(norm.input), copy.of(norm.weight), norm.eps, norm.one, *dtypes)
        over = () if norm.dim == -1 else (norm.dim, norm.ones)
        return copy.graph.call_function(rms_normed, (*arguments, *over))

    def line(self, source: str) -> Applied:
        return Applied(self.name, source, "rms_norm")


def find_row_norms(rules: Rules) -> Iterator[RmsNormSite]:
    """All of a model."""
    for trace in rules.traces:
        norms = [(graph, rms_norm_of(trace, graph)) for graph in trace.graphs]
        for _, norm in norms if all(norm is not None for _, norm in norms) else ():
            assert norm is not None
            yield RmsNormSite(
                name=rules.flow.names[id(trace.module)],
                module=trace.module,
                title="rms_norm",
                reason=rules.of_forward(trace),
                change=Change(trace, norm.nodes, norm.nodes[-1], (norm.input,), crosses=False),
                norm=norm,
            )
