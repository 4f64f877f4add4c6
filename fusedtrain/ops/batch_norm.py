"""Batch norm with what follows it as one op: which way a call takes, and the public function."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as _is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import has_torch_function as _has_any

from .. import _backends, _calls, _recompute
from .._calls import KERNEL_DTYPES
from .._graph.fx import handle as _handle
from .._torch_private import (
    is_exporting,
    transformed,
    verify_batch_size,
    without_torch_function,
)
from ..reference.batch_norm import Norm, eager, move
from ..reference.dtypes import wide_of
from ..reference.pointwise import INDEX, POINTWISE, Pointwise
from . import activations as _activations, batch_norm_in_place as in_place
from ._library import op
from .batch_norm_autograd import apply as _apply

__all__ = ["batch_norm_act"]

_forward = op("batch_norm_act")
_cpp = _backends.autograd()
_SOFTPLUS, _LOGSIGMOID = INDEX["softplus"], INDEX["logsigmoid"]
# A global is found faster than an attribute of torch.
_STRIDED, _FLOAT32, _FLOAT64 = torch.strided, torch.float32, torch.float64


def _compiled(input: Tensor, residual: Tensor | None, norm: Norm, activation: Pointwise) -> Tensor:
    """The op as torch.compile is to see it."""
    output, mean, variance, _ = torch.ops.fusedtrain.batch_norm_act_functional(
        input, residual, *norm[:6], norm.eps, *activation
    )
    if norm.training:
        count = input.numel() // input.shape[1]
        move(norm.running_mean, norm.running_var, norm.momentum, mean, variance, count)
    return output


def _matches(residual: Tensor, input: Tensor) -> bool:
    return (
        (type(residual) is Tensor or type(residual) is Parameter)
        and residual.dtype is input.dtype
        and residual.layout is _STRIDED
        and not residual.is_nested
        and residual.shape == input.shape
        and residual.device == input.device
    )


def _fits(
    input: Tensor, residual: Tensor | None, branch_scale: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, training: bool,
    momentum: float, eps: float,
) -> bool:  # fmt: skip
    """Whether the op takes these arguments as they are: the one test of all calls in Python.

    `fits` of csrc/autograd/batch_norm.h is the same test in C++. The loops call no function, which
    would take half of the time.
    """
    kind, dtype = type(input), input.dtype
    if (
        (kind is not Tensor and kind is not Parameter)
        or dtype not in KERNEL_DTYPES
        or input.layout is not _STRIDED
        or input.is_nested
    ):
        return False
    shape, device = input.shape, input.device
    if len(shape) < 2:
        return False
    channels, numel = shape[1], input.numel()
    if numel == 0 or not (eps > 0 or (eps == 0 and not training)):
        return False
    if numel == channels if training else running_mean is None:
        return False
    if (running_mean is None) != (running_var is None):
        return False
    wide = _FLOAT64 if dtype is _FLOAT64 else _FLOAT32
    for vector, size in (
        (running_mean, channels), (running_var, channels), (weight, channels), (bias, channels),
        (branch_scale, shape[0]),
    ):  # fmt: skip
        if vector is not None and (
            (type(vector) is not Tensor and type(vector) is not Parameter)
            or vector.dtype is not wide
            or vector.dim() != 1
            or vector.numel() != size
            or vector.layout is not _STRIDED
            or vector.device != device
        ):
            return False
    for vector in (running_mean, running_var, branch_scale):
        if vector is not None and (vector.requires_grad or not vector.is_contiguous()):
            return False
    return residual is None or _matches(residual, input)


def _converted(input: Tensor, norm: Norm) -> Norm:
    """The norm, its vectors copied to the dtype and the density of the op where they differ.

    A model that was cast to 16 bits as a whole has vectors of 16 bits. Elements that share memory
    are left as they are: the op could not write to them.
    """
    rows, vectors = norm.branch_scale, [*norm[1:5]]
    if rows is not None:
        rows = rows.detach().to(input.device, wide_of(input)).contiguous()
    for i, vector in enumerate(vectors):
        if vector is None or not _calls.is_plain(vector):
            continue
        if vector.dtype is input.dtype and vector.dtype.itemsize == 2:
            vectors[i] = vector = vector.float()
        if i > 1 and not vector.is_contiguous() and vector.stride(0) != 0:
            vectors[i] = vector.contiguous()
    weight, bias, mean, var = vectors
    return Norm(rows, weight, bias, mean, var, *norm[5:])


def _copy_back(original: Norm, copied: Norm) -> None:
    """Copies the running statistics of the op to the original ones."""
    for mine, other in zip(original[3:5], copied[3:5], strict=True):
        if mine is not None and other is not None and mine is not other:
            mine.copy_(other)


def _check_residual(residual: Tensor, input: Tensor) -> None:
    """Raises what adding it would raise, before running statistics have moved."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"residual: must be a Tensor, not {type(residual).__name__}")
    try:
        torch.broadcast_shapes(input.shape, residual.shape)
    except RuntimeError:
        raise RuntimeError(
            f"residual: {tuple(residual.shape)} cannot be added to an input of {tuple(input.shape)}"
        ) from None
    if residual.device != input.device and residual.dim() > 0:
        raise RuntimeError(f"residual: is on {residual.device}, the input on {input.device}")


def run(
    input: Tensor, residual: Tensor | None, branch_scale: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, training: bool,
    momentum: float, eps: float, activation: Pointwise, overwrite_input: bool = False,
) -> Tensor:  # fmt: skip
    """The op where it fits; else eager torch, with its results and its errors.

    A usual call costs a third of the host time of another one. It has tensors of torch's own
    classes in the dtypes of the op, no transform around it, and a gradient that autograd can
    record.
    """
    if overwrite_input or _is_dynamo_compiling():
        norm = Norm(branch_scale, weight, bias, running_mean, running_var, training, momentum, eps)
        return _unusual(input, residual, norm, activation, overwrite_input)
    planned = _recompute.planned()
    if _cpp is not None and not planned:
        if input.layout is _STRIDED and not (input.is_contiguous() or transformed()):
            input = laid_out(input, activation)
        result: Any = _cpp.batch_norm_act(
            input, residual, branch_scale, weight, bias, running_mean, running_var, training,
            momentum, eps, *activation,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    norm = Norm(branch_scale, weight, bias, running_mean, running_var, training, momentum, eps)
    output = None
    if activation.op == _SOFTPLUS or transformed():
        pass  # Autocast may want softplus in float32.
    elif planned:  # each attribute of a tensor would take 7 us
        with without_torch_function():
            output = _fitting(input, residual, norm, activation)
    else:
        output = _fitting(input, residual, norm, activation)
    if output is None:
        output = _unusual(input, residual, norm, activation, overwrite_input=False)
    return output


def laid_out(input: Tensor, activation: Pointwise) -> Tensor:
    """The input in the layout of torch's output."""
    if activation.op == _LOGSIGMOID:
        input = _calls.for_logsigmoid(input)
    return _calls.in_torch_layout(input)


def adds_alike(input: Tensor, residual: Tensor) -> bool:
    """Whether the normalised input plus a residual has one layout in either order."""
    with without_torch_function() if _recompute.planned() else nullcontext():
        if input.is_contiguous() and residual.is_contiguous():
            return True
        return input.stride() == residual.stride() and _calls.has_torch_layout(input)


def _fitting(
    input: Tensor, residual: Tensor | None, norm: Norm, activation: Pointwise,
    overwrite_input: bool = False,
) -> Tensor | None:  # fmt: skip
    """The op's output where it takes the arguments as they are, else None."""
    if not _fits(input, residual, *norm):
        return None
    input = laid_out(input, activation)
    if not _calls.needs_grad(input, residual, norm.weight, norm.bias):
        return _forward(input, residual, *norm, *activation)[0]
    if torch.is_inference_mode_enabled() or input.is_inference():
        return None
    if overwrite_input and residual is None and norm.branch_scale is None:
        keeps_input = norm.training or _calls.needs_grad(norm.weight, norm.bias)
        if keeps_input and in_place.applies(input, activation):
            return in_place.apply(input, *norm[1:], activation)
    return _apply(input, residual, *norm[:3], norm[3:], activation)


def activated(z: Tensor, activation: Pointwise) -> Tensor:
    if activation.op < 0:
        return z
    row = POINTWISE[activation.op]
    values = (activation.a, activation.b)[: len(row.parameters)]
    return _activations.KERNELS[row.name](z, False, *values)


def _unusual(
    input: Tensor,
    residual: Tensor | None,
    norm: Norm,
    activation: Pointwise,
    overwrite_input: bool,
) -> Tensor:
    """Any call that is not usual, and one that may be compiled or overwrite its input."""
    if norm.training:
        verify_batch_size(input.size())
    if activation.op == _SOFTPLUS and _calls.autocasts(input, "cuda"):
        # Autocast computes softplus of 16 bits in float32, and returns that.
        z = run(input, residual, *norm, Pointwise())
        return _activations.KERNELS["softplus"](z.float(), False, activation.a, activation.b)
    if residual is not None and not _matches(residual, input):
        _check_residual(residual, input)
        # Another shape or dtype: torch knows what that adds up to.
        z = run(input, None, *norm, Pointwise())
        return activated(z + residual, activation)
    compiled = (
        torch.compiler.is_compiling()
        and not is_exporting()
        and not _calls.transformed()
        and _backends.is_opaque_to_compile(input.device)
    )
    if _calls.traced() and not compiled:
        return eager(input, residual, norm, activation)
    original, norm = norm, _converted(input, norm)
    output: Tensor | None = None
    if not compiled:
        output = _fitting(input, residual, norm, activation, overwrite_input)
    elif _fits(input, residual, *norm):
        output = _compiled(laid_out(input, activation), residual, norm, activation)
    if output is None:
        return eager(input, residual, original, activation)
    if norm.training:
        _copy_back(original, norm)
    return output


def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | None = "relu",
    residual: Tensor | None = None,
    branch_scale: Tensor | None = None,
    overwrite_input: bool = False,
    **parameters: float,
) -> Tensor:
    """``activation(batch_norm(input) * branch_scale + residual)`` as one op, forward and backward.

    The first arguments are those of :func:`torch.nn.functional.batch_norm` (arXiv:1502.03167), and
    so are statistics, running statistics and errors. Saved for backward: the input and two vectors;
    with a residual, also the output or the residual, whichever the activation's derivative is a
    function of; with fixed statistics and weight and bias that need no gradient, the input only
    for activations whose derivative is no function of the output.

    Args:
        input: [N, C, ...] of float32, float64, float16 or bfloat16. The output is contiguous or
            channels_last, as torch's; an input in another layout is copied first. 16-bit input is
            computed in float32 and rounded once.
        running_mean, running_var, weight, bias: [C], of float32 (float64 for float64 input; 16-bit
            ones of 16-bit input are accepted).
        activation: the name of a function of :mod:`fusedtrain.functional` with no tensors for
            parameters, or "identity".
        residual: of the input's shape; is added before the activation.
        branch_scale: [N], what the normalised input of each sample is multiplied by (stochastic
            depth, arXiv:1603.09382: 0 or 1 / keep_prob). It gets no gradient.
        overwrite_input: the output takes the place of the input, which must not be used again, and
            backward computes the input from it (In-Place ABN, arXiv:1712.02616): one tensor is kept
            where there are two. Holds for no activation and leaky_relu with a positive
            `negative_slope`, without residual and branch_scale, where autograd records, for a dense
            input that some op made; else, and where torch.utils.checkpoint runs the forward again
            or a CUDA graph is captured, it is without effect. The normalised input comes back with
            an error of about u (abs(itself) + abs(bias / weight)), u being half of the dtype's eps.
            Channels with abs(weight) below 1/64 or abs(bias) / 4 keep their input, apart; to know
            them, a GPU is waited for. There is no second derivative.
        parameters: of the activation, as the function names them.

    Raises:
        ValueError: an unknown activation, one value a channel in training, or a `branch_scale` that
            is not [N].
        TypeError: a parameter that the activation does not have.
        RuntimeError: what torch raises for the same mistake. Nothing is modified then. Backward
            raises it where another op needs the input that was overwritten.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> batch_norm_act(x, None, None, training=True, activation="relu")
        tensor([[0.0000],
                [1.0000]])
    """
    tensors = (input, running_mean, running_var, weight, bias, residual, branch_scale)
    if _has_any(tensors):
        return _handle(
            batch_norm_act, tensors, input, running_mean, running_var, weight, bias, training,
            momentum, eps, activation=activation, residual=residual, branch_scale=branch_scale,
            overwrite_input=overwrite_input, **parameters,
        )  # fmt: skip
    fused, after = None if parameters else _activations.BY_NAME.get(activation), None
    if fused is None:
        fused, function = _activations.chosen(activation, parameters)
        after = function if fused is None else None
    if branch_scale is not None and branch_scale.shape != input.shape[:1]:
        raise ValueError(
            f"branch_scale: expected one value for each of {input.shape[0]} samples, got shape "
            f"{tuple(branch_scale.shape)}"
        )
    if after is not None:
        after(input.new_zeros(1))  # raises before running statistics have moved
    output = run(
        input, residual, branch_scale, weight, bias, running_mean, running_var, training, momentum,
        eps, Pointwise() if fused is None else fused, overwrite_input,
    )  # fmt: skip
    return output if after is None else after(output)
