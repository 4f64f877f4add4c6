"""Batch norm with what follows it as one op: which way a call takes, and the public function.

A usual call takes :func:`quick`, which costs a third of the host time of :func:`run`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as _is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import has_torch_function as _has_any

from .. import _backends, _calls
from .._calls import KERNEL_DTYPES
from .._graph.fx import handle as _handle
from .._torch_private import is_exporting, transformed, verify_batch_size
from ..reference.batch_norm import Norm, eager
from ..reference.dtypes import wide_of
from ..reference.pointwise import INDEX, POINTWISE, Pointwise
from . import activations as _activations, batch_norm_in_place as in_place
from ._library import op
from .batch_norm_autograd import apply as _apply

__all__ = ["batch_norm_act"]

_forward = op("batch_norm_act")
_cpp = _backends.autograd()
_SOFTPLUS = INDEX["softplus"]
# A global is found faster than an attribute of torch.
_STRIDED, _FLOAT32, _FLOAT64 = torch.strided, torch.float32, torch.float64


def _compiled(input: Tensor, residual: Tensor | None, norm: Norm, activation: Pointwise) -> Tensor:
    """The op as torch.compile is to see it."""
    output: Tensor
    output, mean, variance, _ = torch.ops.fusedtrain.batch_norm_act_functional(
        input, residual, *norm[:6], norm.eps, *activation
    )
    running_mean, running_var = norm.running_mean, norm.running_var
    if norm.training and running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        running_mean.lerp_(mean.to(running_mean.dtype), norm.momentum)
        unbiased = variance * (count / (count - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), norm.momentum)
    return output


def _fits(input: Tensor, norm: Norm) -> bool:
    training, running_mean, running_var = norm.training, norm.running_mean, norm.running_var
    if not (norm.eps > 0 or (norm.eps == 0 and not training)):
        return False  # torch's error
    if not _calls.is_plain(input) or input.dim() < 2 or input.numel() == 0:
        return False
    size, dtype, device = input.shape[1:2], wide_of(input), input.device
    if training and input.numel() == size[0]:
        return False  # torch's error
    if (running_mean is None) != (running_var is None) or (running_mean is None and not training):
        return False
    for vector in norm[1:5]:  # one value for each channel
        if vector is not None and not (
            _calls.is_plain(vector)
            and vector.dtype is dtype
            and vector.shape == size
            and vector.device == device
        ):
            return False
    for vector in (running_mean, running_var):
        if vector is not None and (vector.requires_grad or not vector.is_contiguous()):
            return False
    return True


def _has_gaps(norm: Norm) -> bool:
    """Whether running statistics have gaps between their elements, which the op cannot take."""
    for vector in (norm.running_mean, norm.running_var):
        if vector is not None and _calls.is_plain(vector) and not vector.is_contiguous():
            return vector.stride(0) != 0
    return False


def _is_narrow(input: Tensor, norm: Norm) -> bool:
    """Whether input and some of the vectors have one dtype of 16 bits, the others float32."""
    if not _calls.is_plain(input) or input.dtype.itemsize != 2:
        return False
    dtypes = {t.dtype for t in norm[1:5] if t is not None}
    return input.dtype in dtypes and dtypes <= {input.dtype, torch.float32}


def _widened(norm: Norm) -> Norm:
    weight, bias, mean, var = [None if t is None else t.float() for t in norm[1:5]]
    return Norm(norm.branch_scale, weight, bias, mean, var, *norm[5:])


def _dense(norm: Norm) -> Norm:
    """With running statistics that are contiguous."""
    mean, var = [None if t is None else t.contiguous() for t in norm[3:5]]
    return norm._replace(running_mean=mean, running_var=var)


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


def _matches(residual: Tensor, input: Tensor) -> bool:
    return (
        _calls.is_plain(residual)
        and residual.shape == input.shape
        and residual.dtype is input.dtype
        and residual.device == input.device
    )


def quick(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: Pointwise,
) -> Tensor | None:
    """The op for a usual call. For any other it returns None, and has computed, modified and raised
    nothing: :func:`run` takes those.

    A usual call has tensors of torch's own classes in the dtypes of the op, no transform around it,
    and a gradient that autograd can record. The caller has seen that neither torch.compile nor
    torch.export traces the call.
    """
    if _cpp is not None:
        result: Any = _cpp.batch_norm_act(
            input, residual, None, weight, bias, running_mean, running_var, training, momentum, eps,
            *activation,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    kind, dtype = type(input), input.dtype
    if (
        (kind is not Tensor and kind is not Parameter)
        or dtype not in KERNEL_DTYPES
        or input.layout is not _STRIDED
        or input.is_nested
        or activation.op == _SOFTPLUS  # autocast may want it in float32
        or transformed()
    ):
        return None
    shape, device = input.shape, input.device
    if len(shape) < 2:
        return None
    channels, numel = shape[1], input.numel()
    if numel == 0 or not eps > 0:
        return None
    if training:
        if numel == channels:
            return None
    elif running_mean is None:
        return None
    wide = _FLOAT64 if dtype is _FLOAT64 else _FLOAT32
    if running_mean is not None:
        if running_var is None:
            return None
        for vector in (running_mean, running_var):
            if (
                type(vector) is not Tensor
                or vector.dtype is not wide
                or vector.dim() != 1
                or vector.numel() != channels
                or vector.requires_grad
                or vector.layout is not _STRIDED
                or not vector.is_contiguous()
                or vector.device != device
            ):
                return None
    elif running_var is not None:
        return None
    for parameter in (weight, bias):
        if parameter is not None and (
            (type(parameter) is not Parameter and type(parameter) is not Tensor)
            or parameter.dtype is not wide
            or parameter.dim() != 1
            or parameter.numel() != channels
            or parameter.layout is not _STRIDED
            or parameter.device != device
        ):
            return None
    if residual is not None and not (
        (type(residual) is Tensor or type(residual) is Parameter)
        and residual.dtype is dtype
        and residual.layout is _STRIDED
        and not residual.is_nested
        and residual.shape == shape
        and residual.device == device
    ):
        return None
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        if torch.is_inference_mode_enabled() or input.is_inference():
            return None
        settings = (running_mean, running_var, training, momentum, eps)
        return _apply(input, residual, None, weight, bias, settings, activation)
    output: Tensor = _forward(
        input, residual, None, weight, bias, running_mean, running_var, training, momentum, eps,
        *activation,
    )[0]  # fmt: skip
    return output


def run(
    input: Tensor,
    residual: Tensor | None,
    norm: Norm,
    activation: Pointwise,
    overwrite_input: bool = False,
) -> Tensor:
    """The op where it fits; else eager torch, with its results and its errors."""
    if _cpp is not None and not overwrite_input and not _is_dynamo_compiling():
        output: Any = _cpp.batch_norm_act(input, residual, *norm, *activation)
        if output is not NotImplemented:
            return output
    if activation.op == _SOFTPLUS and _calls.autocasts(input, "cuda"):
        # Autocast computes softplus of 16 bits in float32, and returns that.
        z = run(input, residual, norm, Pointwise())
        return _activations.KERNELS["softplus"](z.float(), False, activation.a, activation.b)
    if residual is not None and not _matches(residual, input):
        _check_residual(residual, input)
        # Another shape or dtype: torch knows what that adds up to.
        z = _run(input, None, norm, Pointwise(), overwrite_input=False)
        return activated(z + residual, activation)
    return _run(input, residual, norm, activation, overwrite_input)


def activated(z: Tensor, activation: Pointwise) -> Tensor:
    if activation.op < 0:
        return z
    row = POINTWISE[activation.op]
    values = (activation.a, activation.b)[: len(row.parameters)]
    return _activations.KERNELS[row.name](z, False, *values)


def _run(
    input: Tensor,
    residual: Tensor | None,
    norm: Norm,
    activation: Pointwise,
    overwrite_input: bool,
) -> Tensor:
    """As :func:`run`, with a residual that is like the input."""
    compiled = (
        torch.compiler.is_compiling()
        and not is_exporting()
        and not _calls.transformed()
        and _backends.is_opaque_to_compile(input.device)
    )
    if _calls.traced() and not compiled:
        return eager(input, residual, norm, activation)
    # A model that was cast to 16 bits as a whole: the vectors are widened for the op.
    original = norm
    narrow = _is_narrow(input, norm)
    if narrow:
        norm = _widened(norm)
    gaps = _has_gaps(norm)
    if gaps:
        norm = _dense(norm)
    if not _fits(input, norm):
        return eager(input, residual, original, activation)
    copied = narrow or gaps  # torch 2.10 cannot compile `norm is not original`
    if norm.branch_scale is not None:
        rows = norm.branch_scale.detach().to(input.device, wide_of(input)).contiguous()
        norm = Norm(rows, *norm[1:])
    affine = (norm.weight, norm.bias)
    if compiled:
        output = _compiled(input, residual, norm, activation)
    elif _calls.needs_grad(input, residual, *affine):
        if torch.is_inference_mode_enabled() or input.is_inference():
            return eager(input, residual, original, activation)
        keeps_input = norm.training or _calls.needs_grad(*affine)
        alone = residual is None and norm.branch_scale is None
        if overwrite_input and alone and keeps_input and in_place.applies(input, activation):
            output = in_place.apply(input, *norm[1:], activation)
        else:
            output = _apply(input, residual, *norm[:3], norm[3:], activation)
    else:
        output = _forward(input, residual, *norm, *activation)[0]
    if copied and norm.training:
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
        input: [N, C, ...] of float32, float64, float16 or bfloat16, any dense layout, which the
            output has too. 16-bit input is computed in float32 and rounded once.
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
        result: Tensor = _handle(
            batch_norm_act, tensors, input, running_mean, running_var, weight, bias, training,
            momentum, eps, activation=activation, residual=residual, branch_scale=branch_scale,
            overwrite_input=overwrite_input, **parameters,
        )  # fmt: skip
        return result
    fused, function = _activations.chosen(activation, parameters)
    if branch_scale is not None and branch_scale.shape != input.shape[:1]:
        raise ValueError(
            f"branch_scale: expected one value for each of {input.shape[0]} samples, got shape "
            f"{tuple(branch_scale.shape)}"
        )
    if training:
        verify_batch_size(input.size())
    if (
        fused is not None
        and branch_scale is None
        and not overwrite_input
        and type(momentum) is float
        and not torch.compiler.is_compiling()
    ):
        output = quick(
            input, residual, weight, bias, running_mean, running_var, training, momentum, eps, fused
        )
        if output is not None:
            return output
    norm = Norm(branch_scale, weight, bias, running_mean, running_var, training, momentum, eps)
    if fused is None:
        function(input.new_zeros(1))  # raises before running statistics have moved
        return function(run(input, residual, norm, Pointwise(), overwrite_input))
    return run(input, residual, norm, fused, overwrite_input)
