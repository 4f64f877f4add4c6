"""Bias, activation, gain, clamp and dropout in one pass: the ops, autograd, public functions.

``activation`` counts the lines of ``FT_POINTWISE`` (csrc/formulas.h), -1 is none; ``a`` and ``b``
are its parameters. ``seed`` is two int64 numbers.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
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
from ..reference import bias_act as reference
from ..reference.channels import channel_sums
from ..reference.dtypes import laid_out, wide_of
from ..reference.pointwise import INDEX, POINTWISE, Pointwise
from ._library import define, op
from .activations import chosen

__all__ = ["bias_act", "bias_act_dropout", "dropout", "dropout_add"]

_IDENTITY = Pointwise()


def _fake_backward(
    grad: Tensor, saved: Tensor, bias: Any, seed: Any, dim: int, *rest: Any
) -> tuple[Tensor, Tensor]:
    shape = (1, saved.shape[dim] if dim >= 0 else 1) if rest[-1] else (0,)
    return torch.empty_like(saved), grad.new_empty(shape, dtype=wide_of(grad))


define("bias_act", reference.bias_act, lambda input, *_: torch.empty_like(input))
define("bias_act_backward", reference.bias_act_backward, _fake_backward)
_bias_act, _bias_act_backward = op("bias_act"), op("bias_act_backward")

# Their output tells by a comparison with a bound where the slope is 0: not after a multiplication.
BOUNDED = {INDEX[name] for name in ("relu6", "hardtanh", "hardsigmoid")}


def _differentiable_bias_act(
    grad: Tensor, saved: Tensor, bias: Tensor | None, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    gradient = reference.bias_act_gradient(grad, saved, bias, seed, *rest[:-1])
    sums = gradient
    if rest[-1]:
        sums = channel_sums(gradient, 1, rest[0])
    return gradient.to(grad.dtype), sums


class BiasAct(torch.autograd.Function):
    """Saves the output where the derivative is a function of it, else the input."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, bias: Tensor | None, seed: Tensor | None,
        residual: Tensor | None, rest: tuple[Any, ...], by_output: bool,
    ) -> Tensor:  # fmt: skip
        output: Tensor = _bias_act(input, bias, seed, residual, *rest)
        activation, clamp = rest[1], rest[5]
        # Without an activation the derivative is that of a clamp, or constant.
        needs = by_output or activation >= 0 or clamp >= 0
        ctx.save_for_backward((output if by_output else input) if needs else None, bias, seed)
        ctx.rest, ctx.strides = rest, output.stride()
        scope = _recompute.scope()
        if scope is not None:
            dropped = (residual, None if needs and not by_output else input)
            scope.tag(output, _bias_act, (input, bias, seed, residual), rest, dropped)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        op = _differentiable_bias_act if plain_backward(grad) else _bias_act_backward
        needs_bias = ctx.needs_input_grad[1]
        input, sums, residual = _gradients(
            op, grad, *ctx.saved_tensors, *ctx.rest, needs_bias, ctx.strides
        )
        return input, sums, None, residual if ctx.needs_input_grad[3] else None, None, None


_apply_bias_act = apply_of(BiasAct)


def _gradients(
    op: Callable[..., tuple[Tensor, Tensor]], grad: Tensor, saved: Tensor | None,
    bias: Tensor | None, seed: Tensor | None, *others: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients of input, bias and residual."""
    *rest, needs_bias, strides = others
    of_residual = grad
    if seed is not None:  # the mask goes by the order of the output's memory
        grad = laid_out(grad, strides)
        saved = None if saved is None else laid_out(saved, strides)
    needs_bias = bias is not None and needs_bias
    gradient, sums = op(grad, grad if saved is None else saved, bias, seed, *rest, needs_bias)
    of_bias = sums.view(-1).to(bias.dtype) if bias is not None and needs_bias else None
    return gradient, of_bias, of_residual


_cpp = _backends.autograd()
if _cpp is not None:
    formula = functools.partial(_gradients, _differentiable_bias_act)
    _cpp.prepare_bias_act(formula, bytes(i in BOUNDED for i in range(len(POINTWISE))))


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
    if activation.op in BOUNDED and (gain * keep != 1 or clamp >= 0):
        input = run_bias_act(input, bias, dim, activation)
        bias, activation = None, Pointwise()
    if clamp >= 0:
        clamp = _rounded(clamp, input.dtype)
    if _cpp is not None and not _is_dynamo_compiling():
        result: Any = _cpp.bias_act(input, bias, None, dim, activation, float(gain), clamp, p)
        if result is not NotImplemented:
            return result
    seed = new_seed(input) if p > 0 else None
    rest = (dim, *activation, gain, clamp, p)
    if needs_grad(input, bias):
        return _apply_bias_act(input, bias, seed, None, rest, activation.saves_output)
    return _bias_act(input, bias, seed, None, *rest)


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


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _check_bias(bias: Tensor, input: Tensor, dim: int) -> None:
    if not -input.dim() <= dim < input.dim():
        raise IndexError(f"dim: {dim} is not a dimension of an input of {input.dim()}")
    if bias.dim() != 1 or bias.numel() != input.size(dim):
        fitting = [d for d, size in enumerate(input.shape) if tuple(bias.shape) == (size,)]
        hint = f"; dim={fitting[0]} would fit" if fitting else ""
        raise ValueError(
            f"bias: expected one value for each of {input.size(dim)} channels (dim={dim}), got "
            f"shape {tuple(bias.shape)}{hint}"
        )


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes each element with probability `p`, and multiplies the others by ``1 / (1 - p)``.

    Saves 16 bytes: the mask is computed again in backward, from two random numbers that are drawn
    from the generator of the input's device (so it follows torch.manual_seed, but is not the mask
    that torch would draw). For the same numbers it is the same on every device and with every
    backend. Dropped elements are 0 also where the input is infinite or NaN. ``p=1`` and `inplace`
    are torch's own. See :func:`torch.nn.functional.dropout`.

    Raises:
        ValueError: `p` is not from 0 to 1.

    Example:
        >>> dropout(torch.ones(1000), 0.25).unique()
        tensor([0.0000, 1.3333])
    """
    if _scripting():
        return torch_functional.dropout(input, p, training, inplace)
    if _has_any((input,)):
        return _handle(dropout, (input,), input, p=p, training=training, inplace=inplace)
    _check_probability(p)
    if isinstance(input, Tensor) and (not training or p == 0.0):
        return input
    if _cpp is not None and not inplace and not _is_dynamo_compiling():
        result: Any = _cpp.bias_act(input, None, None, -1, _IDENTITY, 1.0, -1.0, p)
        if result is not NotImplemented:
            return result
    if not isinstance(input, Tensor) or inplace or p == 1.0 or not fits(input):
        return torch_functional.dropout(input, p, training, inplace)
    return run_bias_act(input, None, -1, _IDENTITY, p=p)


def dropout_add(input: Tensor, residual: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """``residual + dropout(input, p, training)`` in one pass: the end of a transformer's branch.

    Saves 16 bytes, and draws the mask that :func:`dropout` draws. In 16 bits the sum is rounded
    once. One pass takes tensors of one shape, dtype and layout; others are added by torch, with its
    broadcasting and promotion.

    Args:
        input: any shape.
        residual: of the input's shape, or one that can be added to it.
        p: probability of an element of the input to become 0, in training.
        training: False for ``residual + input``.

    Raises:
        ValueError: `p` is not from 0 to 1.
        RuntimeError: shapes that cannot be added.

    Example:
        >>> dropout_add(torch.ones(1000), torch.ones(1000), 0.25).unique()
        tensor([1.0000, 2.3333])
    """
    if _scripting():
        return residual + torch_functional.dropout(input, p, training)
    if _has_any((input, residual)):
        return _handle(
            dropout_add, (input, residual), input, residual, p=p, training=training
        )  # fmt: skip
    _check_probability(p)
    if not (
        training
        and 0.0 < p < 1.0
        and isinstance(input, Tensor)
        and isinstance(residual, Tensor)
        and input.shape == residual.shape
    ):
        return residual + dropout(input, p, training)
    if _cpp is not None and not _is_dynamo_compiling():
        result: Any = _cpp.bias_act(input, None, residual, -1, _IDENTITY, 1.0, -1.0, p)
        if result is not NotImplemented:
            return result
    # The sum has the residual's layout in torch.
    if not fits(input, residual) or input.stride() != residual.stride():
        return residual + dropout(input, p, training)
    seed, rest = new_seed(input), (-1, *_IDENTITY, 1.0, -1.0, p)
    if needs_grad(input, residual):
        return _apply_bias_act(input, None, seed, residual, rest, False)
    return _bias_act(input, None, seed, residual, *rest)


def bias_act_dropout(
    input: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "gelu",
    p: float = 0.0,
    training: bool = True,
    dim: int = -1,
    **parameters: float,
) -> Tensor:
    """``dropout(activation(input + bias), p)`` in one pass.

    Saves the output where the derivative of the activation is a function of it, else the input, and
    16 bytes for the mask (see :func:`dropout`).

    Args:
        input: any shape.
        bias: one value for each index of dimension `dim`.
        activation: the name of a function of :mod:`fusedtrain.functional`, or "identity".
        p: probability of an element to become 0, in training.
        dim: of the bias.
        parameters: of the activation, as the function names them.

    Raises:
        ValueError: an unknown activation, a bias of another size, or `p` not from 0 to 1.
        TypeError: a parameter that the activation does not have.

    Example:
        >>> bias_act_dropout(torch.tensor([[1.0, -1.0]]), torch.tensor([1.0, -1.0]), "relu")
        tensor([[2., 0.]])
    """
    if _has_any((input, bias)):
        return _handle(
            bias_act_dropout, (input, bias), input, bias, activation=activation, p=p,
            training=training, dim=dim, **parameters,
        )  # fmt: skip
    fused, function = chosen(activation, parameters)
    _check_probability(p)
    if _cpp is not None and fused is not None and not _is_dynamo_compiling():
        drop = p if training else 0.0
        result: Any = _cpp.bias_act(input, bias, None, dim, fused, 1.0, -1.0, drop)
        if result is not NotImplemented:
            return result
    if bias is not None:
        _check_bias(bias, input, dim)
    p = p if training else 0.0
    axis = dim % input.dim() if bias is not None else -1
    if fused is not None and p < 1 and fits(input, bias):
        return run_bias_act(input, bias, axis, fused, p=p)
    y = function(biased(input, bias, axis))
    return dropout(y, p, True) if p > 0 else y


# StyleGAN's names -> ours, and the gains that it gives them.
_STYLEGAN = {
    "linear": ("identity", 1.0),
    "relu": ("relu", math.sqrt(2)),
    "lrelu": ("leaky_relu", math.sqrt(2)),
    "tanh": ("tanh", 1.0),
    "sigmoid": ("sigmoid", 1.0),
    "elu": ("elu", 1.0),
    "selu": ("selu", 1.0),
    "softplus": ("softplus", 1.0),
    "swish": ("silu", math.sqrt(2)),
}


def _by_position(positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of `bias_act` that has them by position, as StyleGAN's calls do."""
    first = positional[0]
    if isinstance(first, str):
        raise TypeError(f"dim: expected an integer, got {first!r}; pass act={first!r} by keyword")
    if len(positional) > len(named):
        raise TypeError(
            f"bias_act() takes at most {2 + len(named)} arguments, got {2 + len(positional)}"
        )
    warnings.warn(
        f"bias_act: pass {', '.join(list(named)[: len(positional)])} by keyword",
        DeprecationWarning,
        stacklevel=3,
    )
    return named | dict(zip(named, positional))


def bias_act(
    input: Tensor,
    bias: Tensor | None = None,
    *positional: Any,
    dim: int = -1,
    act: str = "linear",
    alpha: float | None = None,
    gain: float | None = None,
    clamp: float | None = None,
) -> Tensor:
    """``clamp(gain * act(input + bias))``: StyleGAN's op (arXiv:2106.12423), with its arguments.

    All but the first two are keywords (by position they are deprecated), and `dim` is -1 by
    default, as in :func:`bias_act_dropout`; for images [N, C, H, W], StyleGAN's, pass ``dim=1``.

    Differentiable to any order. Saves one tensor: the output where the derivative of `act` is a
    function of it, else the input.

    Args:
        input: any shape and number of elements.
        bias: one value for each index of dimension `dim`.
        dim: of the bias.
        act: linear, relu, lrelu, tanh, sigmoid, elu, selu, softplus or swish.
        alpha: slope of lrelu, 0.2 if None.
        gain: sqrt(2) for relu, lrelu and swish if None, else 1.
        clamp: the result is limited to [-clamp, clamp]; None for no limit. The gradient is 0 where
            the limit is reached.

    Raises:
        ValueError: an unknown `act`, a bias of another size, or a negative clamp.
        TypeError: a `dim` that is no integer, as where `act` comes third.

    Example:
        >>> bias_act(torch.tensor([[1.0, -5.0]]), torch.tensor([1.0, 0.0]), act="lrelu", gain=1)
        tensor([[ 2., -1.]])
    """
    if positional:
        named = {"dim": dim, "act": act, "alpha": alpha, "gain": gain, "clamp": clamp}
        return bias_act(input, bias, **_by_position(positional, named))
    if _has_any((input, bias)):
        return _handle(
            bias_act, (input, bias), input, bias, dim=dim, act=act, alpha=alpha, gain=gain,
            clamp=clamp,
        )  # fmt: skip
    if act not in _STYLEGAN:
        raise ValueError(f"act: {act!r} is none of {', '.join(_STYLEGAN)}")
    if clamp is not None and not clamp >= 0:
        raise ValueError(f"clamp: must be at least 0, not {clamp}")
    if bias is not None:
        _check_bias(bias, input, dim)
    name, standard = _STYLEGAN[act]
    parameters = {"negative_slope": 0.2 if alpha is None else alpha} if act == "lrelu" else {}
    fused, function = chosen(name, parameters)
    factor = standard if gain is None else gain
    bound = -1.0 if clamp is None else float(clamp)
    axis = dim % input.dim() if bias is not None else -1
    if fused is not None and usable(factor, input.dtype) and fits(input, bias):
        return run_bias_act(input, bias, axis, fused, factor, bound)
    y = function(biased(input, bias, axis)) * factor
    return y if clamp is None else y.clamp(-bound, bound)
