"""Batch norm with what follows it as one op: arguments, autograd, and the public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as _is_dynamo_compiling
from torch.overrides import has_torch_function as _has_any

from .. import _backends, _calls, _recompute
from .._graph.fx import handle as _handle
from .._torch_private import BatchNormBase, verify_batch_size
from ..reference.batch_norm import Norm, Statistics, differentiable_backward, eager
from ..reference.dtypes import wide_of
from ..reference.pointwise import INDEX, POINTWISE, Pointwise
from . import (
    activations as _activations,
    batch_norm_in_place as in_place,
    batch_norm_schema as batch_norm_schema,  # defines the ops
)
from ._library import library, op

__all__ = ["batch_norm_act"]

_forward = op("batch_norm_act")
_backward = op("batch_norm_act_backward")
_given_statistics = op("batch_norm_act_apply")
_cpp = _backends.autograd()


class BatchNormAct(torch.autograd.Function):
    """Saves the input and the two vectors of statistics; with a residual, also what the activation
    is differentiated by (the output, or the residual); the input only where it is needed."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor | None, *norm_and_activation: Any
    ) -> Tensor:
        *norm, activation = norm_and_activation
        branch_scale, weight, bias, _, _, training, _, eps = norm  # as Norm has them
        output: Tensor
        output, mean, invstd = _forward(input, residual, *norm, *activation)
        statistics = Statistics(branch_scale, weight, bias, mean, invstd)
        affine = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        keeps_input = save_for_backward(
            ctx, input, residual, output, statistics, training, activation, affine
        )
        scope = _recompute.scope()
        if scope is not None:
            keeps_residual = not activation.saves_output and activation.op >= 0
            scope.tag(
                output, _given_statistics, (input, residual, *statistics), tuple(activation),
                (None if keeps_input else input, None if keeps_residual else residual),
            )  # fmt: skip
        ctx.training, ctx.eps, ctx.activation = training, eps, activation
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def differentiable(*_: Any) -> tuple[Any, ...]:
            input, saved, *statistics = ctx.saved_tensors
            return differentiable_backward(
                grad, input, saved, Statistics(*statistics), ctx.training, ctx.eps, ctx.activation
            )

        op = differentiable if _calls.plain_backward(grad) else _backward
        return (*_gradients(ctx, grad, op), *(None,) * 6)


def _gradients(ctx: Any, grad: Tensor, op: Callable[..., tuple[Any, ...]]) -> Any:
    """The gradients of input, residual, branch_scale, weight and bias. A residual that is only
    added gets the output's gradient itself."""
    needs_input, needs_residual, _, needs_weight, needs_bias = ctx.needs_input_grad[:5]
    added = ctx.activation.op < 0
    gradients = op(
        grad, *ctx.saved_tensors, ctx.training, *ctx.activation, needs_input,
        needs_residual and not added, needs_weight or needs_bias,
    )  # fmt: skip
    return (
        gradients[0] if needs_input else None,
        (grad if added else gradients[1]) if needs_residual else None,
        None,
        gradients[2] if needs_weight else None,
        gradients[3] if needs_bias else None,
    )


def save_for_backward(
    ctx: Any,
    input: Tensor,
    residual: Tensor | None,
    output: Tensor,
    statistics: Statistics,
    training: bool,
    activation: Pointwise,
    affine: bool,
) -> bool:
    """Keeps what backward will need, and no other tensor of the input's size.

    With fixed statistics and no gradient for weight and bias, the input serves the activation's
    derivative only: nothing is kept for none, the output (which the next layer mostly keeps anyway)
    where the derivative is a function of it.

    Args:
        affine: whether weight or bias need a gradient.

    Returns whether it keeps the input.
    """
    identity, by_output = activation.op < 0, activation.saves_output
    needs_input = training or affine or not (identity or by_output)
    saved = None
    if by_output and (residual is not None or not needs_input):
        saved = output
    elif not by_output and not identity:
        saved = residual
    ctx.save_for_backward(input if needs_input else None, saved, *statistics)
    return needs_input


_apply = _calls.apply_of(BatchNormAct)


def _formula(grad: Tensor, input: Tensor | None, saved: Tensor | None, *others: Any) -> Any:
    """The differentiable backward, for the node in C++."""
    *statistics, training, eps, op, a, b = others
    return differentiable_backward(
        grad, input, saved, Statistics(*statistics), training, eps, Pointwise(op, a, b)
    )


if _cpp is not None:
    _by_output = bytes(row.saves == "output" for row in POINTWISE)
    _cpp.prepare_batch_norm(_formula, _by_output, INDEX["softplus"])


def recomputed_as_torch(norm: BatchNormBase, input: Tensor, output: Tensor) -> None:
    """Notes how to compute again, with the same bits, what torch's batch norm has returned."""
    scope = _recompute.scope()
    if scope is None or output.grad_fn is None:
        return
    training = norm.training or (norm.running_mean is None and norm.running_var is None)
    statistics = (None, None) if training else (norm.running_mean, norm.running_var)
    tensors = (input, *statistics, norm.weight, norm.bias)
    scope.tag(output, torch.nn.functional.batch_norm, tensors, (training, 0.0, norm.eps))


def _setup_functional(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, residual, branch_scale, weight, bias, _, _, training, _, *activation = inputs
    ctx.training, ctx.activation = training, Pointwise(*activation)
    mean = output[1].to(wide_of(input))
    statistics = Statistics(branch_scale, weight, bias, mean, output[3])
    affine = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    save_for_backward(ctx, input, residual, output[0], statistics, training, ctx.activation, affine)
    ctx.mark_non_differentiable(*output[1:])


def _backward_functional(ctx: Any, grad: Tensor, *_: Any) -> Any:
    op = torch.ops.fusedtrain.batch_norm_act_backward
    return (*_gradients(ctx, grad, op), *(None,) * 7)


torch.library.register_autograd(
    "fusedtrain::batch_norm_act_functional",
    _backward_functional,
    setup_context=_setup_functional,
    lib=library,
)


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


def _is_narrow(input: Tensor, norm: Norm) -> bool:
    """Whether input and some of the vectors have one dtype of 16 bits, the others float32."""
    if not _calls.is_plain(input) or input.dtype.itemsize != 2:
        return False
    dtypes = {t.dtype for t in norm[1:5] if t is not None}
    return input.dtype in dtypes and dtypes <= {input.dtype, torch.float32}


def _widened(norm: Norm) -> Norm:
    weight, bias, mean, var = [None if t is None else t.float() for t in norm[1:5]]
    return Norm(norm.branch_scale, weight, bias, mean, var, *norm[5:])


def _copy_back(original: Norm, widened: Norm) -> None:
    """Copies the widened running statistics to the original ones."""
    for narrow, wide in zip(original[3:5], widened[3:5], strict=True):
        if narrow is not None and wide is not None:
            narrow.copy_(wide)


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
    if activation.op == INDEX["softplus"] and _calls.autocasts(input, "cuda"):
        # Which computes softplus of 16 bits in float32, and returns that.
        z = run(input, residual, norm, Pointwise())
        return _activations.KERNELS["softplus"](z.float(), False, activation.a, activation.b)
    if residual is not None and not _matches(residual, input):
        _check_residual(residual, input)
        # Of another shape or dtype: torch knows what that adds up to.
        z = _run(input, None, norm, Pointwise(), overwrite_input=False)
        return _activated(z + residual, activation)
    return _run(input, residual, norm, activation, overwrite_input)


def _activated(z: Tensor, activation: Pointwise) -> Tensor:
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
        and not torch.compiler.is_exporting()
        and not _calls.transformed()
        and _backends.is_opaque_to_compile(input.device)
    )
    if _calls.traced() and not compiled:
        return eager(input, residual, norm, activation)
    # A model that was cast to 16 bits as a whole: the vectors are widened for the op.
    narrow, original = _is_narrow(input, norm), norm
    if narrow:
        norm = _widened(norm)
    if not _fits(input, norm):
        return eager(input, residual, original, activation)
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
            output = _apply(input, residual, *norm, activation)
    else:
        output = _forward(input, residual, *norm, *activation)[0]
    if narrow and norm.training:
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
    fused = _activations.activation_of(activation, parameters)
    if branch_scale is not None and branch_scale.shape != input.shape[:1]:
        raise ValueError(
            f"branch_scale: expected one value for each of {input.shape[0]} samples, got shape "
            f"{tuple(branch_scale.shape)}"
        )
    if training:
        verify_batch_size(input.size())
    norm = Norm(branch_scale, weight, bias, running_mean, running_var, training, momentum, eps)
    if fused is None:
        function = _activations.as_function(str(activation), parameters)
        function(input.new_zeros(1))  # raises before running statistics have moved
        return function(run(input, residual, norm, Pointwise(), overwrite_input))
    return run(input, residual, norm, fused, overwrite_input)
