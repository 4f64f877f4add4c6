"""Modules whose forward is an RMS norm or layer norm, written out: the first in transformers'
language models and timm's RmsNorm2d, the second over channels in ConvNeXt and SAM of their authors.

    weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + eps) * weight.reshape(1, -1, 1, 1)

    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    weight[:, None, None] * ((x - u) / torch.sqrt(s + eps)) + bias[:, None, None]

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

from .._calls import autocasts, has_torch_layout, is_plain, traced
from .._graph.flow import Trace
from ..functional import layer_norm, layer_norm_channels, rms_norm, rms_norm_channels
from ._report import Applied
from ._rules import Rules
from ._units import Change, Copy, Unit

WORDS = {"mean"}  # in the forward of such a module
# Where the dtype of a value comes from: input, weight or bias, or a constant. Several: the wider.
Dtypes = frozenset[str | torch.dtype]


class _Value(NamedTuple):
    """A product of factors: the input "x" or, without its mean "u", "c", the weight "w" or "1+w",
    the norm's divisor inverted "r" or as it is "s"; then "+b". Or one of "mean", of squares, and
    "mean+eps"."""

    factors: tuple[str, ...]
    dtypes: Dtypes = frozenset()


class RowNorm(NamedTuple):
    """A norm of `input` in a graph: layer norm where `centered`, else RMS norm. `one`: the factor
    is 1 + weight. `inner`, `outer`: dtypes of the squares and of the result. `dim`: -1 or 1.
    `ones`: dimensions of weight and bias behind their values, `rank`: all of the parameters'."""

    input: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float
    centered: bool
    one: bool
    inner: Dtypes
    outer: Dtypes
    dim: int
    ones: int
    rank: int
    nodes: tuple[fx.Node, ...]


class _Unknown(Exception):
    """An expression that is no part of such a norm."""


def row_normed(
    input: Any, weight: Any, bias: Any, eps: float, centered: bool, one: bool,
    inner: tuple[Any, ...], outer: tuple[Any, ...], dim: int, ones: int, rank: int,
) -> Any:  # fmt: skip
    """The norm of :class:`RowNorm`; NotImplemented where the stock forward would have an output of
    another dtype or layout than the function of :mod:`fusedtrain.functional`, compute in more bits,
    or raise an error; also for ONNX's exporter by TorchScript, which has no RMS norm."""
    affine: list[Tensor] = [t for t in (weight, bias) if t is not None]
    if not is_plain(input) or input.dim() <= max(dim, 0):
        return NotImplemented
    if affine and dim == 1 and input.dim() != ones + 2:
        return NotImplemented
    if dim == -1 and traced() and not input.is_contiguous():
        return NotImplemented
    if not centered and torch.jit.is_tracing():  # type: ignore[attr-defined]
        return NotImplemented
    size, place = input.shape[dim], 0 if rank == 1 else rank - 1 - ones
    if not all(
        is_plain(t) and t.dim() == rank and t.numel() == size == t.size(place) for t in affine
    ):
        return NotImplemented
    tensors = {"x": input, "w": weight, "b": bias}
    computes = _resolved(inner, tensors)
    # 16 bits are computed in float32; where the stock forward does not, autocast on CUDA may.
    narrow = input.dtype in (torch.float16, torch.bfloat16) and computes is not input.dtype
    if computes is not (torch.float32 if narrow else input.dtype):
        return NotImplemented
    if computes.itemsize == 2 and autocasts(input, "cuda"):
        return NotImplemented
    dtype = _resolved(outer, tensors)
    computed = torch.promote_types(input.dtype, dtype)
    if one or any(t.dtype is not computed for t in affine):
        wide = torch.promote_types(computed, torch.float32)
        computed = wide if centered else computed  # layer norm on a GPU takes one dtype
        affine = [t.to(wide) for t in affine]
    affine = [t.flatten() for t in affine]
    weight = None if weight is None else affine.pop(0)
    bias = affine.pop() if affine else None
    weight = 1 + weight if one else weight
    rest = (weight, bias, eps) if centered else (weight, eps)
    return _normed(input.to(computed), dim, centered, *rest).to(dtype)


row_normed.__module__ = "fusedtrain.conversion"  # the name in pickles


def _normed(x: Tensor, dim: int, centered: bool, *rest: Any) -> Any:
    """The norm of one dimension, in the layout of a dense input: `view` may follow, as in stock."""
    if not (x.is_contiguous() or (dim == 1 and has_torch_layout(x)) or traced()):
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        dense, at = x.permute(order), order.index(dim % x.dim())
        if dense.is_contiguous():
            before, size, after = dense.shape[:at], x.shape[dim], dense.shape[at + 1 :]
            rows = dense.view(before.numel(), size, after.numel())
            rows = rows.squeeze(2) if after.numel() == 1 else rows
            y = _normed(rows, 1 if rows.dim() > 2 else -1, centered, *rest)
            return y.view(dense.shape).permute([order.index(i) for i in range(x.dim())])
    if dim == -1:
        function: Any = layer_norm if centered else rms_norm
        return function(x, [x.shape[-1]], *rest)
    return (layer_norm_channels if centered else rms_norm_channels)(x, *rest)


def _resolved(dtypes: tuple[Any, ...], tensors: dict[str, Any]) -> torch.dtype:
    resolved = [getattr(tensors.get(dtype), "dtype", dtype) for dtype in dtypes]
    return functools.reduce(torch.promote_types, resolved)


def row_norm_of(trace: Trace, graph: fx.Graph) -> RowNorm | None:
    """The norm that a graph is, and nothing else."""
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
    factors = {*value.factors} - {"w", "1+w"}
    if factors - {"+b"} != ({"c", "r"} if reader.centered else {"r", "x"}):
        return None
    if "+b" in factors and not reader.centered:  # no function has it
        return None
    if reader.weight is not None and not {"w", "1+w"} & {*value.factors}:  # its dtype alone
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
    readers = [r for r in (reader, reader.bias) if r is not None and r.weight is not None]
    shapes = {(r.ones, r.rank) for r in readers} or {(0, 1)}
    ones, rank = shapes.pop()
    if shapes or (ones > 0 and reader.dim != 1):
        return None
    bias = None if reader.bias is None else reader.bias.weight
    return RowNorm(
        inputs[0], reader.weight, bias, reader.eps, reader.centered, "1+w" in value.factors,
        reader.inner, value.dtypes, reader.dim, ones, rank, nodes,
    )  # fmt: skip


class _Reader:
    """The values of a graph's nodes; `known` collects them."""

    def __init__(self, module: nn.Module, known: dict[fx.Node, _Value]) -> None:
        self.module, self.known = module, known
        self.eps: float | None = None
        self.inner: Dtypes = frozenset()
        self.weight: fx.Node | None = None
        self.bias: _Reader | None = None
        self.dim, self.ones, self.rank = 0, 0, 1
        self.centered = False

    def value_of(self, node: Any) -> _Value:
        if not isinstance(node, fx.Node):
            raise _Unknown
        if node not in self.known:
            self.known[node] = self._weight(node) if node.op == "get_attr" else self._call(node)
        return self.known[node]

    def _weight(self, node: fx.Node) -> _Value:
        tensor: Any = getattr(self.module, str(node.target), None)
        if self.weight not in (None, node) and self.weight.target != node.target:
            raise _Unknown
        shape = [*tensor.shape] if isinstance(tensor, Tensor) else []
        if len(shape) > 1 and shape[0] == 1:
            del shape[0]
        if not shape or {*shape[1:]} - {1} or tensor.dim() == 2:
            raise _Unknown
        self.weight, self.ones, self.rank = node, len(shape) - 1, tensor.dim()
        return _Value(("w",), frozenset({"w"}))

    def _call(self, node: fx.Node) -> _Value:
        name = _NAMES.get(node.target, "") if node.op.startswith("call_") else ""
        one, *others = node.args if node.args else (None,)
        if name == "cast":
            return self._cast(node, others)
        if name in ("mean", "var"):
            return self._mean(node, others, name == "var")
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
            if other in (0.5, -0.5) and value.factors == ("mean+eps",):
                return _Value(("s" if other == 0.5 else "r",), value.dtypes)
        if name == "mul":
            return self._product(self.value_of(one), self.value_of(other))
        if name == "div":
            divisor = self.value_of(other)
            if divisor.factors == ("s",):
                inverse = _Value(("r",), divisor.dtypes)
                is_one = type(one) in (int, float) and one == 1
                return inverse if is_one else self._product(self.value_of(one), inverse)
        if name == "sub":
            value, mean = self.value_of(one), self.value_of(other)
            if (value.factors, mean.factors) != (("x",), ("u",)):
                raise _Unknown
            return _Value(("c",), value.dtypes | mean.dtypes)
        if name == "add":
            one, other = (other, one) if type(one) in (int, float) else (one, other)
            if isinstance(other, fx.Node):
                return self._biased(one, other)
            return self._sum(other, self.value_of(one))
        raise _Unknown

    def _product(self, one: _Value, other: _Value) -> _Value:
        factors = tuple(sorted(one.factors + other.factors))
        if len(set(factors)) < len(factors) and factors not in _SQUARES:
            raise _Unknown
        if not set(factors) <= {"x", "c", "w", "1+w", "r"} or {"w", "1+w"} <= set(factors):
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
        if ones < 1 or self.rank > 1 or value.factors not in (("w",), ("1+w",)) or shape not in (
            [-1] + [1] * ones, [slice(None)] + [None] * ones
        ):  # fmt: skip
            raise _Unknown
        self.ones = ones
        return value

    def _biased(self, one: Any, other: Any) -> _Value:
        """A product and a bias, in either order."""
        for product, bias in ((one, other), (other, one)):
            reader = _Reader(self.module, {})
            try:
                added = reader.value_of(bias)
            except _Unknown:
                continue
            if added.factors != ("w",) or self.bias is not None:
                break
            self.bias = reader
            value = self.value_of(product)  # which may have the same parameter
            self.known |= reader.known
            dtypes = value.dtypes | {"b" if d == "w" else d for d in added.dtypes}
            return _Value(("+b", *value.factors), dtypes)
        raise _Unknown

    def _mean(self, node: fx.Node, others: list[Any], of_squares: bool) -> _Value:
        names = ("dim", "unbiased", "keepdim") if of_squares else ("dim", "keepdim")
        named = dict(zip(names, others)) | node.kwargs
        value, dim = self.value_of(node.args[0]), named.pop("dim", None)
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            dim = dim[0]
        if dim not in (-1, 1) or self.dim not in (0, dim) or len(others) > len(names):
            raise _Unknown
        self.dim = dim
        if of_squares:
            if named.pop("unbiased", named.pop("correction", None)) not in (False, 0):
                raise _Unknown
            value = value._replace(factors=value.factors * 2)
            self.centered = True
        if named.pop("keepdim", False) is not True or named:
            raise _Unknown
        if not of_squares and value.factors == ("x",):
            return value._replace(factors=("u",))
        if value.factors not in _SQUARES:
            raise _Unknown
        self.centered |= value.factors == ("c", "c")
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


_SQUARES = (("x", "x"), ("c", "c"))
_NAMES: dict[Any, str] = {
    **{
        space: name
        for name, others in {
            "add": (operator.add, "add"),
            "sub": (operator.sub, "sub"),
            "mul": (operator.mul, torch.multiply, "mul", "multiply"),
            "div": (operator.truediv, torch.divide, "div"),
            "pow": (operator.pow, "pow"),
            "mean": ("mean",),
            "var": ("var",),
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
class RowNormSite(Unit):
    """The whole forward of a module, which is a norm."""

    lines, left = "calls", "left_calls"

    norm: RowNorm

    def written(self, change: Change, copy: Copy) -> fx.Node:
        norm = self.norm
        tensors = (copy.of(node) for node in (norm.input, norm.weight, norm.bias))
        dtypes = (tuple(sorted(d, key=str)) for d in (norm.inner, norm.outer))
        kind = (norm.eps, norm.centered, norm.one)
        arguments: Any = (*kind, *dtypes, norm.dim, norm.ones, norm.rank)
        return copy.graph.call_function(row_normed, (*tensors, *arguments))

    def line(self, source: str) -> Applied:
        return Applied(self.name, source, self.title)


def find_row_norms(rules: Rules) -> Iterator[RowNormSite]:
    """All of a model."""
    for trace in rules.traces:
        norms = [(graph, row_norm_of(trace, graph)) for graph in trace.graphs]
        for _, norm in norms if all(norm is not None for _, norm in norms) else ():
            assert norm is not None
            yield RowNormSite(
                name=rules.flow.names[id(trace.module)],
                module=trace.module,
                title="layer_norm" if norm.centered else "rms_norm",
                reason=rules.of_forward(trace),
                change=Change(trace, norm.nodes, norm.nodes[-1], (norm.input,), crosses=False),
                norm=norm,
            )
