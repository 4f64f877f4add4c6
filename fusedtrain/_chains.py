"""Pointwise chains: autograd around the ops of `_chain_ops.py`, and what the public functions of
:mod:`fusedtrain.functional` do where a kernel fits."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from . import _ops, _recompute
from ._calls import apply_of, needs_grad, plain_backward
from .reference import chains as reference
from .reference.dtypes import laid_out
from .reference.pointwise import INDEX, Pointwise

_gated = _ops._callable("gated")
_gated_backward = _ops._callable("gated_backward")
_scale_add = _ops._callable("scale_add")
_scale_add_backward = _ops._callable("scale_add_backward")
_bias_act = _ops._callable("bias_act")
_bias_act_backward = _ops._callable("bias_act_backward")

# Their output tells by a comparison with a bound where the slope is 0: not after a multiplication.
_BOUNDED = {INDEX[name] for name in ("relu6", "hardtanh", "hardsigmoid")}


def _plain_gated_backward(grad: Tensor) -> bool:
    """The same of an op that writes into given tensors: torch.autograd.grad(is_grads_batched=True)
    loops over all other ops."""
    return plain_backward(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)


# --- gated products ---


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


def _gated_halves(
    input: Tensor, dim: int, gate_last: bool, activation: int, a: float, b: float
) -> Tensor:
    output: Tensor = _gated(*halves(input, dim, gate_last), activation, a, b)
    return output


class GatedHalves(torch.autograd.Function):
    """Saves the packed tensor; the gradient is written into halves of one."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, dim: int, gate_last: bool, activation: Pointwise
    ) -> Tensor:
        output = _gated_halves(input, dim, gate_last, *activation)
        ctx.save_for_backward(input)
        ctx.layout, ctx.activation = (dim, gate_last), activation
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, _gated_halves, (input,), (dim, gate_last, *activation))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        dim, gate_last = ctx.layout
        gate, value = halves(input, dim, gate_last)
        if _plain_gated_backward(grad):
            found = reference.gated_gradients(grad, gate, value, *ctx.activation)
            return torch.cat(found[::-1] if gate_last else found, dim), None, None, None
        grad_input = torch.empty_like(input)
        _gated_backward(grad, gate, value, *halves(grad_input, dim, gate_last), *ctx.activation)
        return grad_input, None, None, None


_apply_gated, _apply_halves = apply_of(Gated), apply_of(GatedHalves)


def run_gated(gate: Tensor, value: Tensor, activation: Pointwise) -> Tensor:
    """Two tensors of one shape, which :func:`fits` has allowed."""
    if needs_grad(gate, value):
        return _apply_gated(gate, value, activation)
    output: Tensor = _gated(gate, value, *activation)
    return output


def run_halves(input: Tensor, dim: int, gate_last: bool, activation: Pointwise) -> Tensor:
    if needs_grad(input):
        return _apply_halves(input, dim, gate_last, activation)
    return _gated_halves(input, dim, gate_last, *activation)


# --- scaled sums ---


class ScaleAdd(torch.autograd.Function):
    """Saves the scale, and the input where the scale is trained."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, scale: Tensor, residual: Tensor | None, dim: int
    ) -> Tensor:
        output: Tensor = _scale_add(input, scale, residual, dim)
        keeps = ctx.needs_input_grad[1]
        ctx.save_for_backward(input if keeps else None, scale)
        ctx.dim = dim
        scope = _recompute.scope()
        if scope is not None:
            dropped = (residual, None if keeps else input)
            scope.tag(output, _scale_add, (input, scale, residual), (dim,), dropped)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, scale = ctx.saved_tensors
        needs_input, needs_scale, needs_residual = ctx.needs_input_grad[:3]
        if plain_backward(grad):
            wide = grad * reference.spread(scale, grad, ctx.dim)
            sums = None
            if needs_scale:
                sums = reference._sums(grad * input, scale.shape[0], ctx.dim)
            found: tuple[Any, Any] = wide, sums
        else:
            found = _scale_add_backward(
                grad, input if needs_scale else None, scale, ctx.dim, needs_input
            )
        return (
            found[0] if needs_input else None,
            found[1].to(scale.dtype) if needs_scale else None,
            grad if needs_residual else None,
            None,
        )


_apply_scale = apply_of(ScaleAdd)


def run_scale(input: Tensor, scale: Tensor, residual: Tensor | None, dim: int) -> Tensor:
    """`scale` is [samples, channels]; :func:`fits` has allowed them all."""
    if needs_grad(input, scale, residual):
        return _apply_scale(input, scale, residual, dim)
    output: Tensor = _scale_add(input, scale, residual, dim)
    return output


# --- bias, activation, gain, clamp, dropout ---


def _differentiable_bias_act(
    grad: Tensor, saved: Tensor, bias: Tensor | None, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    gradient = reference.bias_act_gradient(grad, saved, bias, seed, *rest[:-1])
    sums = gradient
    if rest[-1]:
        sums = reference._sums(gradient, 1, rest[0])
    return gradient.to(grad.dtype), sums


class BiasAct(torch.autograd.Function):
    """Saves the output where the derivative is a function of it, else the input."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
        activation: Pointwise, gain: float, clamp: float, p: float,
    ) -> Tensor:  # fmt: skip
        rest = (dim, *activation, gain, clamp, p)
        output: Tensor = _bias_act(input, bias, seed, *rest)
        by_output = activation.saves_output
        # Without an activation the derivative is that of a clamp, or constant.
        needs = by_output or activation.op >= 0 or clamp >= 0
        ctx.save_for_backward((output if by_output else input) if needs else None, bias, seed)
        ctx.rest, ctx.strides = rest, output.stride()
        scope = _recompute.scope()
        if scope is not None:
            dropped = () if needs and not by_output else (input,)
            scope.tag(output, _bias_act, (input, bias, seed), rest, dropped)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved, bias, seed = ctx.saved_tensors
        needs_bias = bias is not None and ctx.needs_input_grad[1]
        if seed is not None:  # the mask goes by the order of the output's memory
            grad = laid_out(grad, ctx.strides)
            saved = None if saved is None else laid_out(saved, ctx.strides)
        op = _differentiable_bias_act if plain_backward(grad) else _bias_act_backward
        found = op(grad, grad if saved is None else saved, bias, seed, *ctx.rest, needs_bias)
        grad_bias = found[1].view(-1).to(bias.dtype) if needs_bias else None
        return (found[0], grad_bias, *(None,) * 6)


_apply_bias_act = apply_of(BiasAct)


def new_seed(input: Tensor) -> Tensor:
    """Two random numbers of the device's generator, left on the device: 16 bytes."""
    return torch.empty(2, dtype=torch.int64, device=input.device).random_()


@functools.cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    """As the dtype holds it: backward compares what was clamped with the bound."""
    return float(torch.tensor(value, dtype=dtype, device="cpu"))


def run_bias_act(
    input: Tensor, bias: Tensor | None, dim: int, activation: Pointwise,
    gain: float = 1.0, clamp: float = -1.0, p: float = 0.0,
) -> Tensor:  # fmt: skip
    """:func:`fits` has allowed the tensors; ``0 <= p < 1``, gain finite and not 0."""
    keep = 1 / (1 - p)
    if activation.op in _BOUNDED and (gain * keep != 1 or clamp >= 0):
        input = run_bias_act(input, bias, dim, activation)
        bias, activation = None, Pointwise()
    if clamp >= 0:
        clamp = _rounded(clamp, input.dtype)
    seed = new_seed(input) if p > 0 else None
    if needs_grad(input, bias):
        return _apply_bias_act(input, bias, seed, dim, activation, gain, clamp, p)
    output: Tensor = _bias_act(input, bias, seed, dim, *activation, gain, clamp, p)
    return output


def biased(input: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    """The sum in torch's operators."""
    if bias is None:
        return input
    shape = [1] * input.dim()
    shape[dim] = -1
    return input + bias.reshape(shape)


def usable(gain: float, dtype: torch.dtype) -> bool:
    """Whether backward can undo the gain of an output: in float16, small ones cost digits."""
    smallest = 2.0**-7 if dtype is torch.float16 else 1e-30
    return math.isfinite(gain) and abs(gain) >= smallest
