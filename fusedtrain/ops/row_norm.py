"""Norms of rows: the ops, autograd around them, layer norm and RMS norm.

The ops normalise the dimensions ``start_dim`` to ``end_dim`` of a dense input, which lie one in
another in memory. Statistics have the input's shape, in which these dimensions have size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.jit import is_scripting as _scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function as _has_any

from .. import _recompute
from .._calls import (
    apply_of,
    autocasts,
    fits,
    has_torch_layout,
    in_torch_layout,
    needs_grad,
    plain_backward,
)
from .._graph.fx import handle as _handle
from ..reference import row_norm as reference
from ..reference.dtypes import laid_out, wide_of
from ._library import define, op

__all__ = ["layer_norm", "layer_norm_channels", "rms_norm", "rms_norm_channels"]


def _fake(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    start_dim: int, end_dim: int, eps: float, centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rstd = reference.new_statistics(input, start_dim, end_dim)
    mean = torch.empty_like(rstd) if centered else rstd.new_empty(0)
    total = input.new_empty(0) if residual is None else torch.empty_like(input)
    return torch.empty_like(input), mean, rstd, total


def _fake_backward(
    grad: Tensor, grad_sum: Tensor | None, input: Tensor, weight: Tensor | None, mean: Tensor,
    rstd: Tensor, start_dim: int, end_dim: int, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n = input.shape[start_dim : end_dim + 1].numel()
    of_weight, of_bias = rstd.new_empty(n * needs_weight), rstd.new_empty(n * needs_bias)
    return torch.empty_like(input), of_weight, of_bias


define("row_norm", reference.row_norm, _fake)
define("row_norm_backward", reference.row_norm_backward, _fake_backward)
_row_norm, _row_norm_backward = op("row_norm"), op("row_norm_backward")

# start_dim, end_dim, eps, centered
Settings = tuple[int, int, float, bool]


def _norm_of(input: Tensor, weight: Tensor | None, bias: Tensor | None, *settings: Any) -> Tensor:
    output: Tensor = _row_norm(input, None, weight, bias, *settings)[0]
    return output


class RowNorm(torch.autograd.Function):
    """Saves the input, or its sum with the residual, which is the second output."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, settings: Settings,
    ) -> Any:  # fmt: skip
        output, mean, rstd, total = _row_norm(input, residual, weight, bias, *settings)
        x = input if residual is None else total
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.settings, ctx.layouts = settings, (x.stride(), mean.stride(), rstd.stride())
        ctx.set_materialize_grads(False)
        scope = _recompute.scope()
        if scope is not None and residual is None:
            scope.tag(output, _norm_of, (input, weight, bias), settings)
        return output if residual is None else (output, total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None = None) -> Any:
        input, weight, bias, mean, rstd = ctx.saved_tensors
        needs_input, needs_residual, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if grad is None:  # the sum alone has a gradient
            of_input = grad_sum
            of_weight = of_bias = None
        else:
            start, end, *_ = ctx.settings
            if plain_backward(grad):
                of_input, of_weight, of_bias = reference.differentiable_backward(
                    grad, grad_sum, input, weight, *ctx.settings
                )
                of_input = of_input.to(input.dtype)
            else:
                x, *statistics = map(laid_out, (input, mean, rstd), ctx.layouts)
                of_input, of_weight, of_bias = _row_norm_backward(
                    grad, grad_sum, x, weight, *statistics, start, end, needs_weight, needs_bias
                )
            shape = input.shape[start : end + 1]
            of_weight = of_weight.view(shape).to(weight.dtype) if needs_weight else None
            of_bias = of_bias.view(shape).to(bias.dtype) if needs_bias else None
        return (
            of_input if needs_input else None,
            of_input if needs_residual else None,
            of_weight,
            of_bias,
            None,
        )


_apply = apply_of(RowNorm)


# Elements from which the kernels are taken, of 16 bits and of more, by type of device; 0 elsewhere.
# On a CPU torch's layer norm is as fast in float32 (0.71 ms both for [1024, 768], one thread of an
# AMD EPYC with AVX2, forward + backward, torch 2.13.0, 2026-11-29). In 16 bits it adds up the
# gradients of 16-bit weights in 16 bits: 5 % off for 3,136 rows. GPUs were not timed.
_NEVER = 2**62
_LEAST = {
    ("cpu", "layer_norm"): (0, _NEVER),
    ("cpu", "layer_norm, residual"): (0, 2**19),
    ("cpu", "layer_norm_channels"): (0, 2**15),
    ("cuda", "layer_norm"): (_NEVER, _NEVER),
    ("cuda", "rms_norm"): (_NEVER, _NEVER),
}


def _gains(kind: str, input: Tensor) -> bool:
    narrow, other = _LEAST.get((input.device.type, kind), (0, 0))
    return input.numel() >= (narrow if input.itemsize == 2 else other)


# Types of device on which torch's layer norm takes weights in float32 beside 16-bit numbers.
_MIXED = frozenset({"cpu"})


def _is_inference(*tensors: Tensor | None) -> bool:
    """Whether autograd refuses to save one of these."""
    return any(t is not None and t.is_inference() for t in tensors)


def _takes(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    shape: Sequence[int], centered: bool,
) -> bool:  # fmt: skip
    """Whether the kernels take these tensors now; `shape` is that of weight and bias."""
    if residual is not None and residual.shape != input.shape:
        return False
    for t in (weight, bias):
        if t is not None and t.shape != shape:
            return False
    if input.numel() == 0:
        return False
    if fits(input, residual, weight, bias):
        return True
    one = bias if weight is None else weight
    return (
        one is not None
        and fits(input, residual)
        and fits(one, bias)
        and one.dtype is wide_of(input)
        and one.device == input.device
        and not (needs_grad(one, bias) and _is_inference(input, residual))
        and (not centered or input.device.type in _MIXED)
    )


def _run(
    input: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    *settings: Any,
) -> Any:  # fmt: skip
    if needs_grad(input, residual, weight, bias):
        return _apply(input, residual, weight, bias, settings)
    output, _, _, total = _row_norm(input, residual, weight, bias, *settings)
    return output if residual is None else (output, total)


def _is_shape(shape: Any, input: Tensor) -> bool:
    """Whether these are the last sizes of the input."""
    kind = type(shape)
    dims = len(shape) if kind is tuple or kind is list or kind is torch.Size else 0
    return (
        isinstance(input, Tensor)
        and 0 < dims <= input.dim()
        and input.shape[-dims:] == tuple(shape)
    )


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer norm (arXiv:1607.06450), and with `residual` that of ``input + residual``, in one pass.

    As :func:`torch.nn.functional.layer_norm`: same arguments, errors, and dtypes under autocast.
    Mean and variance are in float32 (float64 for float64), the second from distances to the first.
    Saves the input, or the sum.

    Args:
        input: [*, *normalized_shape].
        normalized_shape: the last dimensions.
        weight, bias: of that shape, in the input's dtype, or float32 beside 16 bits on a CPU.
        residual: of the input's shape and dtype; others run in plain torch.

    Returns the norm, contiguous; with `residual` the norm and the sum.

    Example:
        >>> layer_norm(torch.tensor([1.0, 3.0]), [2], residual=torch.tensor([1.0, 1.0]))
        (tensor([-1.0000,  1.0000]), tensor([2., 4.]))
    """
    if _scripting():
        if residual is None:
            return torch_functional.layer_norm(input, normalized_shape, weight, bias, eps)
        total = input + residual
        return torch_functional.layer_norm(total, normalized_shape, weight, bias, eps), total
    tensors = (input, weight, bias, residual)
    if _has_any(tensors):
        return _handle(
            layer_norm, tensors, input, normalized_shape, weight, bias, eps, residual=residual
        )
    return _last_dims(input, residual, normalized_shape, weight, bias, eps, True)


def rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm (arXiv:1910.07467), and with `residual` that of ``input + residual``, in one pass.

    As :func:`torch.nn.functional.rms_norm`: same arguments, errors, and dtypes under autocast.
    Saves the input, or the sum.

    Args:
        input: [*, *normalized_shape].
        normalized_shape: the last dimensions.
        weight: of that shape, in the input's dtype, or float32 beside 16 bits.
        eps: None is torch's default: the eps of the dtype; for 16 bits of float32, or of the dtype,
            as torch's release has it.
        residual: of the input's shape and dtype; others run in plain torch.

    Returns the norm, contiguous; with `residual` the norm and the sum.

    Example:
        >>> rms_norm(torch.tensor([1.0, 7.0]), [2])
        tensor([0.2000, 1.4000])
    """
    if _scripting():
        if residual is None:
            return torch.rms_norm(input, normalized_shape, weight, eps)
        total = input + residual
        return torch.rms_norm(total, normalized_shape, weight, eps), total
    tensors = (input, weight, residual)
    if _has_any(tensors):
        return _handle(rms_norm, tensors, input, normalized_shape, weight, eps, residual=residual)
    return _last_dims(input, residual, normalized_shape, weight, None, eps, False)


@cache
def _default_eps(dtype: torch.dtype) -> float:
    """torch's own, which is that of the dtype, or of float32 for 16 bits: by the release."""
    if dtype.itemsize == 2:
        probe = torch_functional.rms_norm(torch.full((1,), 0.01, dtype=dtype, device="cpu"), (1,))
        dtype = torch.float32 if probe.item() > 0.9 else dtype
    return torch.finfo(dtype).eps


def _last_dims(
    input: Tensor, residual: Tensor | None, shape: Any, weight: Tensor | None,
    bias: Tensor | None, eps: float | None, centered: bool,
) -> Any:  # fmt: skip
    casts = autocasts(input, "cuda") and input.dtype is not torch.float32
    if not casts and _is_shape(shape, input):
        dims, kind = input.dim(), "layer_norm" if centered else "rms_norm"
        kind = kind if residual is None else f"{kind}, residual"
        takes = _takes(input, residual, weight, bias, tuple(shape), centered)
        if takes and _gains(kind, input):
            x = input.contiguous()
            epsilon = _default_eps(x.dtype) if eps is None else eps
            return _run(x, residual, weight, bias, dims - len(shape), dims - 1, epsilon, centered)
    total = input if residual is None else input + residual
    if centered:
        output = torch_functional.layer_norm(total, shape, weight, bias, eps)  # type: ignore[arg-type]
    else:
        output = torch_functional.rms_norm(total, shape, weight, eps)
    return output if residual is None else (output, total)


def _torchs(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Tensor:
    shape, eps, widens = rest
    if widens:  # as autocast on CUDA does
        input, weight, bias = (None if t is None else t.float() for t in (input, weight, bias))  # type: ignore[assignment]
    return torch_functional.layer_norm(input, shape, weight, bias, eps)


def torch_layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Torch's layer norm, whose output backward computes again within fusedtrain.recompute."""
    output = torch_functional.layer_norm(input, normalized_shape, weight, bias, eps)
    if fits(input) and output.requires_grad and (scope := _recompute.scope()) is not None:
        widens = autocasts(input, "cuda")
        scope.tag(output, _torchs, (input, weight, bias), (tuple(normalized_shape), eps, widens))
    return output


def layer_norm_channels(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Layer norm over the channels at each place: LayerNorm2d of ConvNeXt (arXiv:2201.03545).

    The output has the layout of the input, contiguous or channels_last, and nothing is transposed.
    Numbers, dtypes and errors are those of :func:`torch.nn.functional.layer_norm` on the input with
    its channels last.

    Args:
        input: [N, C, ...].
        weight, bias: [C].

    Example:
        >>> layer_norm_channels(torch.tensor([[[1.0, 5.0], [3.0, 5.0]]]))
        tensor([[[-1.0000,  0.0000],
                 [ 1.0000,  0.0000]]])
    """
    if not _scripting():
        if _has_any((input, weight, bias)):
            return _handle(layer_norm_channels, (input, weight, bias), input, weight, bias, eps)
        fused = _over_channels(input, weight, bias, eps, True)
        if fused is not None:
            return fused
    # A constant, and dimensions from the left: the TorchScript exporter of ONNX knows no other.
    channels, last = int(input.size(1)), input.dim() - 1
    y = torch_functional.layer_norm(input.movedim(1, last), [channels], weight, bias, eps)
    y = y.movedim(last, 1)
    return y.contiguous() if input.is_contiguous() else y


def rms_norm_channels(input: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMS norm over the channels at each place: timm's RmsNorm2d.

    The output has the layout of the input, contiguous or channels_last, and nothing is transposed.
    Numbers, dtypes and errors are those of :func:`torch.nn.functional.rms_norm` on the input with
    its channels last.

    Args:
        input: [N, C, ...].
        weight: [C].

    Example:
        >>> rms_norm_channels(torch.tensor([[[1.0, 5.0], [7.0, 5.0]]]))
        tensor([[[0.2000, 1.0000],
                 [1.4000, 1.0000]]])
    """
    if not _scripting():
        if _has_any((input, weight)):
            return _handle(rms_norm_channels, (input, weight), input, weight, eps)
        fused = _over_channels(input, weight, None, eps, False)
        if fused is not None:
            return fused
    channels, last = int(input.size(1)), input.dim() - 1
    y = torch.rms_norm(input.movedim(1, last), [channels], weight, eps).movedim(last, 1)
    return y.contiguous() if input.is_contiguous() else y


def _over_channels(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> Tensor | None:
    """The norm by the kernels; None where they do not take the call, or gain nothing."""
    casts = autocasts(input, "cuda") and input.dtype is not torch.float32
    if casts or not _takes(input, None, weight, bias, (input.size(1),), centered):
        return None
    kind = "layer_norm" if centered else "rms_norm"
    if not _gains(kind if input.stride(1) == 1 else f"{kind}_channels", input):
        return None
    x = input if has_torch_layout(input) else in_torch_layout(input)
    output: Tensor = _run(x, None, weight, bias, 1, 1, eps, centered)
    return output
