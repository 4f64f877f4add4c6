"""Gated products: the ops, autograd around them, and the gated linear units.

``activation`` counts the lines of ``FT_POINTWISE`` (csrc/formulas.h), -1 is none; ``a`` and ``b``
are its parameters. Where a kernel does not fit (other dtypes, mixed dtypes or devices,
torch.compile, torch.func, other shapes than are told), eager torch runs, with its results and its
errors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.compiler import is_dynamo_compiling as _is_dynamo_compiling
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function as _has_any

from .. import _backends, _recompute
from .._calls import apply_of, fits, needs_grad, plain_backward
from .._graph.fx import handle as _handle
from .._torch_private import is_legacy_batched
from ..reference import gated as reference
from ..reference.dtypes import wide_of
from ..reference.pointwise import POINTWISE, Pointwise
from ._library import define, op
from .activations import BY_NAME, KERNELS, chosen, pointwise

__all__ = ["bilinear_glu", "gated", "geglu", "glu", "reglu", "swiglu"]

_IDENTITY = Pointwise()
_cpp = _backends.autograd()

define("gated", reference.gated, lambda gate, value, *_: torch.empty_like(value))
# Both gradients may be halves of one tensor.
_GRADIENTS = ("grad_gate", "grad_value")
define("gated_backward", reference.gated_backward, lambda *_: None, writes=_GRADIENTS)
_gated, _gated_backward = op("gated"), op("gated_backward")


def _fake_spread_backward(
    grad: Tensor, gate: Tensor, value: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    grad_value = (
        torch.empty_like(grad if value is None else value) if rest[-1] else grad.new_empty(0)
    )
    if value is None:
        return grad.new_empty(0, dtype=wide_of(grad)), grad_value
    return torch.empty_like(gate, memory_format=torch.contiguous_format), grad_value


define("gated_spread", reference.gated_spread, lambda gate, value, *_: torch.empty_like(value))
define("gated_spread_backward", reference.gated_spread_backward, _fake_spread_backward)
_gated_spread, _gated_spread_backward = op("gated_spread"), op("gated_spread_backward")


def _plain_gated_backward(grad: Tensor) -> bool:
    """The same of an op that writes into given tensors: torch.autograd.grad(is_grads_batched=True)
    loops over all other ops."""
    return plain_backward(grad) or is_legacy_batched(grad)


class Gated(torch.autograd.Function):
    """Saves both arguments."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, activation: Pointwise) -> Tensor:
        output: Tensor = _gated(gate, value, *activation)
        ctx.save_for_backward(gate, value)
        ctx.activation = activation
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, _gated, (gate, value), tuple(activation))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, value = ctx.saved_tensors
        if _plain_gated_backward(grad):
            return (*reference.gated_gradients(grad, gate, value, *ctx.activation), None)
        grad_gate, grad_value = torch.empty_like(gate), torch.empty_like(value)
        _gated_backward(grad, gate, value, grad_gate, grad_value, *ctx.activation)
        return grad_gate, grad_value, None


def halves(input: Tensor, dim: int, gate_last: bool) -> tuple[Tensor, Tensor]:
    """Gate and value in a packed tensor."""
    first, second = input.chunk(2, dim)
    return (second, first) if gate_last else (first, second)


def _parts(input: Tensor, value: Tensor | None, dim: int, gate_last: bool) -> tuple[Tensor, Tensor]:
    """Gate and value, packed or not."""
    return halves(input, dim, gate_last) if value is None else (input, value)


def _gated_halves(
    input: Tensor, dim: int, gate_last: bool, activation: int, a: float, b: float
) -> Tensor:
    return _gated(*halves(input, dim, gate_last), activation, a, b)


class GatedHalves(torch.autograd.Function):
    """Saves the packed tensor; the gradient is written into halves of one."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layout: tuple[int, bool], activation: Pointwise) -> Tensor:
        dim, gate_last = layout
        output = _gated_halves(input, dim, gate_last, *activation)
        ctx.save_for_backward(input)
        ctx.layout, ctx.activation = layout, activation
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, _gated_halves, (input,), (*layout, *activation))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        if _plain_gated_backward(grad):
            return _halves_gradient(grad, input, *ctx.layout, *ctx.activation), None, None
        grad_input = torch.empty_like(input)
        gate, value = halves(input, *ctx.layout)
        _gated_backward(grad, gate, value, *halves(grad_input, *ctx.layout), *ctx.activation)
        return grad_input, None, None


class GatedSpread(torch.autograd.Function):
    """Saves the gate, which is [N, C, 1, ...], and the value where the gate is trained."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, activation: Pointwise) -> Tensor:
        output: Tensor = _gated_spread(gate, value, *activation)
        keeps = ctx.needs_input_grad[0]
        ctx.save_for_backward(gate, value if keeps else None)
        ctx.activation = activation
        scope = _recompute.scope()
        if scope is not None:
            dropped = () if keeps else (value,)
            scope.tag(output, _gated_spread, (gate, value), tuple(activation), dropped)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, value = ctx.saved_tensors
        needs_gate, needs_value = ctx.needs_input_grad[:2]
        if plain_backward(grad):
            gradients = reference.gated_spread_gradients(grad, gate, value, *ctx.activation)
        else:
            gradients = _gated_spread_backward(
                grad, gate, value if needs_gate else None, *ctx.activation, needs_value
            )
        return gradients[0] if needs_gate else None, gradients[1] if needs_value else None, None


_apply_gated, _apply_halves = apply_of(Gated), apply_of(GatedHalves)
_apply_spread = apply_of(GatedSpread)


def _halves_gradient(
    grad: Tensor, input: Tensor, dim: int, gate_last: bool, activation: int, a: float, b: float
) -> Tensor:
    """Backward of :class:`GatedHalves` in torch operators."""
    gate, value = halves(input, dim, gate_last)
    gradients = reference.gated_gradients(grad, gate, value, activation, a, b)
    return torch.cat(gradients[::-1] if gate_last else gradients, dim)


if _cpp is not None:
    _cpp.prepare_gated(reference.gated_gradients)
    _cpp.prepare_gated_halves(_halves_gradient)
    _cpp.prepare_gated_spread(reference.gated_spread_gradients)


def run_gated(gate: Tensor, value: Tensor, activation: Pointwise) -> Tensor:
    """Two tensors of one shape, which :func:`fits` has allowed."""
    if needs_grad(gate, value):
        return _apply_gated(gate, value, activation)
    return _gated(gate, value, *activation)


def run_spread(gate: Tensor, value: Tensor, activation: Pointwise) -> Tensor:
    """A gate of [N, C, 1, ...]."""
    if needs_grad(gate, value):
        return _apply_spread(gate, value, activation)
    return _gated_spread(gate, value, *activation)


def run_halves(input: Tensor, dim: int, gate_last: bool, activation: Pointwise) -> Tensor:
    if needs_grad(input):
        return _apply_halves(input, (dim, gate_last), activation)
    return _gated_halves(input, dim, gate_last, *activation)


def _glu(
    activation: Pointwise, input: Tensor, value: Tensor | None, dim: int, gate_last: bool
) -> Tensor:
    if _cpp is not None and not _is_dynamo_compiling():
        output: Any
        if value is None:
            output = _cpp.gated_halves(input, dim, gate_last, activation)
        else:
            output = _cpp.gated(input, value, False, activation)
        if output is not NotImplemented:
            return output
    if value is None:
        size = input.size(dim)
        if size % 2:
            raise RuntimeError(
                f"Halving dimension must be even, but dimension {dim} is size {size}"
            )
        if fits(input):
            return run_halves(input, dim % input.dim(), gate_last, activation)
        gate, value = halves(input, dim, gate_last)
    else:
        gate = input
        if fits(gate, value) and gate.shape == value.shape:
            return run_gated(gate, value, activation)
    return activation.forward(gate) * value


def _named(name: str, *values: float) -> Pointwise:
    activation = pointwise(name, *values)
    assert activation is not None
    return activation


_SIGMOID, _SILU, _RELU = _named("sigmoid"), _named("silu"), _named("relu")
_GELU, _GELU_TANH = _named("gelu"), _named("gelu_tanh")


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """``a * sigmoid(b)`` where a and b are the halves of `input` along `dim` (arXiv:1612.08083).

    The halves are read in place; saves the input. See :func:`torch.nn.functional.glu`.

    Raises:
        RuntimeError: a dimension of odd size.

    Example:
        >>> glu(torch.tensor([2.0, 3.0, 0.0, 100.0]))
        tensor([1., 3.])
    """
    if _scripting():
        return torch_functional.glu(input, dim)
    if _cpp is not None and not _is_dynamo_compiling():
        output: Any = _cpp.gated_halves(input, dim, True, _SIGMOID)
        if output is not NotImplemented:
            return output
    if _has_any((input,)):
        return _handle(glu, (input,), input, dim=dim)
    is_tensor = isinstance(input, Tensor) and input.dim() > 0 and input.is_floating_point()
    if not is_tensor or isinstance(dim, str):  # before torch 2.13 a string names a dimension
        return torch_functional.glu(input, dim)
    return _glu(_SIGMOID, input, None, dim, True)


def swiglu(
    input: Tensor, value: Tensor | None = None, dim: int = -1, gate_last: bool = False
) -> Tensor:
    """``silu(gate) * value`` (arXiv:2002.05202, section 2); saves both, and no product.

    Args:
        input: the gate, or gate and value packed along `dim`: the halves are read in place.
        value: of the gate's shape.
        dim: which dimension a packed input is halved along.
        gate_last: whether the second half is the gate.

    Raises:
        RuntimeError: a dimension of odd size.

    Example:
        >>> swiglu(torch.tensor([0.0, 100.0, 2.0, 3.0]))
        tensor([  0., 300.])
    """
    if _scripting():
        gate, other = _parts(input, value, dim, gate_last)
        return torch_functional.silu(gate) * other
    if _has_any((input, value)):
        return _handle(swiglu, (input, value), input, value, dim=dim, gate_last=gate_last)
    return _glu(_SILU, input, value, dim, gate_last)


def geglu(
    input: Tensor,
    value: Tensor | None = None,
    dim: int = -1,
    gate_last: bool = False,
    approximate: str = "none",
) -> Tensor:
    """``gelu(gate) * value`` (arXiv:2002.05202), arguments as of :func:`swiglu`.

    Args:
        approximate: "none" for the exact form, "tanh" for the other.

    Example:
        >>> geglu(torch.tensor([0.0, 100.0, 2.0, 3.0]))
        tensor([  0., 300.])
    """
    if _scripting():
        gate, other = _parts(input, value, dim, gate_last)
        return torch_functional.gelu(gate, approximate=approximate) * other
    if _has_any((input, value)):
        return _handle(
            geglu, (input, value), input, value, dim=dim, gate_last=gate_last,
            approximate=approximate,
        )  # fmt: skip
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    return _glu(_GELU if approximate == "none" else _GELU_TANH, input, value, dim, gate_last)


def reglu(
    input: Tensor, value: Tensor | None = None, dim: int = -1, gate_last: bool = False
) -> Tensor:
    """``relu(gate) * value`` (arXiv:2002.05202), arguments as of :func:`swiglu`.

    Example:
        >>> reglu(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
        tensor([0., 3.])
    """
    if _scripting():
        gate, other = _parts(input, value, dim, gate_last)
        return torch.relu(gate) * other
    if _has_any((input, value)):
        return _handle(reglu, (input, value), input, value, dim=dim, gate_last=gate_last)
    return _glu(_RELU, input, value, dim, gate_last)


def bilinear_glu(
    input: Tensor, value: Tensor | None = None, dim: int = -1, gate_last: bool = False
) -> Tensor:
    """``gate * value`` (arXiv:2002.05202, "Bilinear"), arguments as of :func:`swiglu`.

    Example:
        >>> bilinear_glu(torch.tensor([-1.0, 1.0, 2.0, 3.0]))
        tensor([-2.,  3.])
    """
    if _scripting():
        gate, other = _parts(input, value, dim, gate_last)
        return gate * other
    if _has_any((input, value)):
        return _handle(bilinear_glu, (input, value), input, value, dim=dim, gate_last=gate_last)
    return _glu(_IDENTITY, input, value, dim, gate_last)


def gated(
    input: Tensor, gate: Tensor, activation: str | None = "sigmoid", **parameters: float
) -> Tensor:
    """``input * activation(gate)``: a gated linear unit where the shapes are equal, the gate of a
    squeeze-and-excitation block (arXiv:1709.01507) where `gate` is broadcast over space.

    Saves both arguments.

    Args:
        input: any shape; [N, C, ...] where the gate is broadcast.
        gate: of the input's shape, or [N, C, 1, ...]. Any other broadcast runs in eager torch.
        activation: the name of a function of :mod:`fusedtrain.functional`, or "identity".
        parameters: of the activation, as the function names them.

    Raises:
        ValueError: an unknown activation.
        TypeError: a parameter that the activation does not have.
        RuntimeError: shapes that cannot be broadcast.

    Example:
        >>> gated(torch.ones(1, 2, 1, 3), torch.tensor([0.0, 100.0]).view(1, 2, 1, 1)).flatten()
        tensor([0.5000, 0.5000, 0.5000, 1.0000, 1.0000, 1.0000])
    """
    fused = chosen(activation, parameters)[0] if parameters else BY_NAME.get(activation)
    if _cpp is not None and not _is_dynamo_compiling():
        output: Any = _cpp.gated(gate, input, True, fused)
        if output is not NotImplemented:
            return output
    if _has_any((input, gate)):
        return _handle(gated, (input, gate), input, gate, activation=activation, **parameters)
    fused, function = chosen(activation, parameters)
    if not fits(input, gate):
        return input * function(gate)
    if gate.shape == input.shape:
        if fused is None:
            fused, gate = _IDENTITY, function(gate)
        return run_gated(gate, input, fused)
    if fused is not None and _spreads(gate, input):
        return run_spread(gate, input, fused)
    if fused is None:
        opened = function(gate)
        if _spreads(opened, input) and fits(input, opened):
            return run_spread(opened, input, _IDENTITY)
        return input * opened
    if fused.op < 0:
        return input * gate
    row = POINTWISE[fused.op]
    return input * KERNELS[row.name](gate, False, *(fused.a, fused.b)[: len(row.parameters)])


def _spreads(gate: Tensor, input: Tensor) -> bool:
    """Whether the gate has one value for each sample and channel, [N, C, 1, ...]."""
    shape, of_input = gate.shape, input.shape
    if len(shape) != len(of_input) or len(shape) < 2 or shape[:2] != of_input[:2]:
        return False
    return gate.numel() == shape[0] * shape[1]
