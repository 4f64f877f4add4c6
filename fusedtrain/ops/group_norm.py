"""Group norm, modulation and activation, made of batch norm's ops with a mean, invstd, weight and
bias for each sample and channel.

Statistics of each sample and channel are merged to those of its group. Of a contiguous input a
sample and channel is a channel of one long sample; batch norm's ops go through the samples of a
channels_last one.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function as _has_any

from .. import _calls, _recompute
from .._graph.fx import handle as _handle
from .._recompute import OP_NAMES
from .._torch_private import unsafe_view, without_torch_function
from ..reference.dtypes import wide_of
from ..reference.group_norm import (
    Affine,
    differentiable_backward,
    eager,
    gradients,
    joined,
    modulated,
)
from ..reference.pointwise import Pointwise
from . import activations as _activations
from ._library import op
from .batch_norm import activated, laid_out

__all__ = ["group_norm_act"]

_stats = op("batch_norm_stats")
_apply = op("batch_norm_act_apply")
_reduce = op("batch_norm_act_backward_reduce")
_backward_apply = op("batch_norm_act_backward_apply")

# Factors that are a smaller part of the largest of their group are replaced in backward's last
# pass, which divides by them: the gradient of the input is off by so small a part.
_LEAST_FACTOR = 2.0**-64
# Types of device on which backward's first pass leaves the gradient of the activation's input to
# the second one, which then computes no activation: SiLU's of 4 x 64 x 128 x 128 in float32 takes
# 9.3 ms, and 14.5 computed twice (an AMD EPYC with AVX2).
_LEAVES_GRADIENT = frozenset({"cpu"})
# Elements of an input that gains, and of a sample where each has calls of its own (channels_last),
# by bytes of an element. Below, 40 small ops around batch norm's take longer than what they save.
# An AMD EPYC with AVX2, SiLU, forward and backward, channels_last: 4 x 128 x 16 x 16 in bfloat16
# 1.3x of torch, 8 x 64 x 8 x 8 0.7x; 32 x 128 x 16 x 16 in float32 1.2x, 64 x 256 x 8 x 8 0.7x.
# Contiguous inputs gain where they are modulated: for 8 x 256 x 32 x 32 in float32 torch's norm and
# then our activation take 7.6 ms, and batch norm's ops 9.3. Torch keeps the normalised input, too:
# the ops also run where outputs are recomputed. Other types of device have not been measured: a GPU
# would launch the 40 small ops in the time of 2^26 elements.
_LEAST = {"cpu": {2: 1 << 16, 4: 1 << 18, 8: 1 << 18}}
_LEAST_SAMPLE = {2: 1 << 12, 4: 1 << 15, 8: 1 << 15}
_MOST_SAMPLES = 32  # of a channels_last input on such a device
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _planes(t: Tensor) -> Tensor:
    """A contiguous tensor as one sample with a channel for each sample and channel."""
    samples, channels = t.shape[:2]
    return t.view(1, samples * channels, -1) if t.is_contiguous() else t


def _statistics(input: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of the group of each sample and channel, [N * C]."""
    samples, channels = input.shape[:2]
    if input.is_contiguous():
        center, variance = _stats(input.view(1, samples * groups, -1))
    else:
        of_samples = [_stats(sample) for sample in input.split(1)]
        means, variances = (torch.stack(column) for column in zip(*of_samples))
        shape = (samples, groups, channels // groups)
        spread, center = torch.var_mean(means.view(shape), 2, correction=0)
        variance = variances.view(shape).mean(2).add_(spread)
    invstd = variance.add_(eps).rsqrt_()
    repeated = (samples * groups, channels // groups)
    both = torch.stack((center.view(-1), invstd.view(-1))).to(wide_of(input))
    mean, invstd = both.unsqueeze(2).expand(2, *repeated).reshape(2, -1).unbind()
    return mean, invstd


def _vectors(affine: Affine, input: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Factor and offset of each sample and channel, [N * C]."""
    factor, offset = joined(affine, wide_of(input))
    shape = input.shape[:2]
    return (
        None if factor is None else factor.expand(shape).reshape(-1),
        None if offset is None else offset.expand(shape).reshape(-1),
    )


def _normalised(
    input: Tensor, factor: Tensor | None, offset: Tensor | None, mean: Tensor, invstd: Tensor,
    *activation: Any,
) -> Tensor:  # fmt: skip
    """The output, with vectors [N * C]."""
    planes = _planes(input)
    output: Tensor = _apply(planes, None, None, factor, offset, mean, invstd, *activation)
    # A tensor of its own, which may be modified in place.
    return output if planes is input else unsafe_view(output, input.shape)


OP_NAMES[_normalised] = "group_norm_act"


class GroupNormAct(torch.autograd.Function):
    """Saves the input, the vectors, and the statistics of each sample and channel."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None,
        scale: Tensor | None, shift: Tensor | None, eps: float, activation: Pointwise,
    ) -> Tensor:  # fmt: skip
        affine = Affine(weight, bias, scale, shift)
        vectors = (*_vectors(affine, input), *_statistics(input, groups, eps))
        output = _normalised(input, *vectors, *activation)
        ctx.save_for_backward(input, *affine, *vectors)
        ctx.groups, ctx.eps, ctx.activation = groups, eps, activation
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, _normalised, (input, *vectors), tuple(activation))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, *vectors = ctx.saved_tensors
        affine, groups = Affine(*vectors[:4]), ctx.groups
        needs_input, _, *needs = ctx.needs_input_grad[:6]
        if _calls.plain_backward(grad):
            grad_input, sums, slopes = differentiable_backward(
                grad, input, groups, affine, ctx.eps, ctx.activation
            )
        else:
            grad_input, sums, slopes = _backward(
                grad, input, groups, vectors[4:], ctx.activation, needs_input
            )
        of_vectors = gradients(sums, slopes, affine, needs)
        return grad_input if needs_input else None, None, *of_vectors, None, None


_function = _calls.apply_of(GroupNormAct)


def _averages(
    sums: Tensor, factor: Tensor | None, order: int
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The averages over the channels of a group that batch norm's last pass takes for each channel,
    which multiplies them by the factors [N * C] of the channels; and those factors.

    sums: [2, N, G, C / G], or with ``order=1`` [N, 2, G, C / G].
    """
    if factor is None:
        return sums.mean(3, keepdim=True).expand_as(sums).contiguous(), None
    groups = [size for i, size in enumerate(sums.shape) if i != order]
    factors = factor.view(groups).double()
    averages = (sums * factors.unsqueeze(order)).mean(3, keepdim=True)
    size = factors.abs()
    least = size.max(2, keepdim=True)[0].mul_(_LEAST_FACTOR)
    factors = torch.where(size < least, least.copysign(factors), factors)
    # Where all factors of a group are 0, so are the averages.
    divisors = torch.where(factors == 0, 1.0, factors)
    return averages / divisors.unsqueeze(order), factors.to(factor.dtype).view(-1)


def _backward(
    grad: Tensor, input: Tensor, groups: int,
    vectors: list[Any], activation: Pointwise,
    needs_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradient of the input (that of the output, where it is not needed), and the two sums."""
    shape, planes = input.shape, _planes(input)
    folded = planes is not input
    grad_planes = _planes(grad.contiguous()) if folded else grad
    factor, offset, mean, invstd = vectors
    leaves = needs_input and activation.op >= 0 and input.device.type in _LEAVES_GRADIENT
    sums, d = _reduce(grad_planes, planes, None, None, *vectors, *activation, leaves)
    # The two sums of a sample follow each other in memory where samples have calls of their own.
    both, order = ((2, shape[0]), 0) if folded else ((shape[0], 2), 1)
    sums = sums.view(*both, groups, -1)
    if needs_input:
        averages, factor = _averages(sums, factor, order)
        rest = (-1, 0.0, 0.0) if leaves else activation
        grad_planes, _ = _backward_apply(
            d if leaves else grad_planes, planes, None, None, factor, offset, mean, invstd,
            averages.div_(input.numel() // mean.numel()).view(-1, planes.shape[1]), *rest, False,
        )  # fmt: skip
    halves = sums.view(*both, -1).unbind(order)
    return grad_planes.view(shape) if folded else grad_planes, halves[0], halves[1]


def _fits(input: Tensor, groups: int, affine: Affine, eps: float) -> bool:
    """Whether batch norm's ops take the arguments."""
    samples, channels = input.shape[:2]
    if type(groups) is not int or groups < 1 or channels % groups or not eps >= 0:
        return False
    if input.numel() <= samples * groups:
        return False
    dtype, wide = input.dtype, wide_of(input)
    for vector, size in zip(affine, ((channels,), (channels,), input.shape[:2], input.shape[:2])):
        if vector is not None and not (
            _calls.is_plain(vector) and vector.shape == size and vector.device == input.device
        ):
            return False
    weight, bias, *modulation = affine
    if any(t is not None and t.dtype is not dtype for t in modulation):
        return False
    of_norm = {t.dtype for t in (weight, bias) if t is not None}
    if len(of_norm) > 1 or not of_norm <= {dtype, wide}:
        return False
    tensors = [t for t in (input, *affine) if t is not None]
    inference = torch.is_inference_mode_enabled() or any(t.is_inference() for t in tensors)
    return not (inference and _calls.needs_grad(*tensors))


def _gains(input: Tensor, activates: bool, modulates: bool) -> bool:
    """Whether batch norm's ops are faster than torch's own, or are to keep less for backward."""
    size, samples, least = input.numel(), input.shape[0], _LEAST.get(input.device.type)
    if least is not None and size < least[input.itemsize]:
        return False
    last = _calls.suggests_channels_last(input)
    keeps_less = activates and _recompute.scope() is not None
    if least is None:
        return keeps_less and not (last and samples > _MOST_SAMPLES)
    return size >= samples * _LEAST_SAMPLE[input.itemsize] if last else modulates or keeps_less


def _fused(input: Tensor, groups: int, affine: Affine, eps: float, activation: Pointwise) -> Any:
    """The output of batch norm's ops; None where they take no such call, or gain nothing."""
    if not _calls.takes(input) or input.dim() < 2 or input.numel() == 0:
        return None
    modulates = affine.scale is not None or affine.shift is not None
    gains = _gains(input, activation.op >= 0, modulates)
    if not (gains and _fits(input, groups, affine, eps)):
        return None
    if not _calls.suggests_channels_last(input):
        input = input.contiguous()
    input = laid_out(input, activation)
    if _calls.needs_grad(input, *affine):
        return _function(input, groups, *affine, eps, activation)
    statistics = _statistics(input, groups, eps)
    return _normalised(input, *_vectors(affine, input), *statistics, *activation)


def run(input: Tensor, groups: int, affine: Affine, eps: float, activation: Pointwise) -> Tensor:
    """Batch norm's ops where they take the call and gain, else torch's, with its errors."""
    if _calls.traced():
        if _calls.transformed():  # torch cannot batch its group norm of channels_last
            input = input.contiguous()
        return eager(input, groups, affine, eps, activation)
    if _calls.autocasts(input, "cuda"):
        # Autocast computes group norm in float32, and returns that.
        input = input.float()
        affine = Affine(*(None if t is None else t.float() for t in affine))
    with without_torch_function() if _recompute.planned() else nullcontext():
        output: Tensor | None = _fused(input, groups, affine, eps, activation)
    if output is not None:
        return output
    # On a contiguous copy: in channels_last, backward of torch 2.13 crashes on a CPU where nobody
    # asks for the input's gradient, and 8 x 64 x 8 x 8 in bfloat16 takes 0.8 ms instead of 0.3.
    last = isinstance(input, Tensor) and _calls.suggests_channels_last(input)
    z = modulated(input.contiguous() if last else input, groups, affine, eps)
    output = activated(z, activation)
    return output.contiguous(memory_format=_LAST[input.dim()]) if last else output


def check_modulation(input: Tensor, scale: Tensor | None, shift: Tensor | None) -> None:
    for name, vector in (("scale", scale), ("shift", shift)):
        if vector is not None and vector.shape != input.shape[:2]:
            raise ValueError(
                f"{name}: expected one value for each sample and channel, "
                f"{tuple(input.shape[:2])}, got shape {tuple(vector.shape)}"
            )


def group_norm_act(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    **parameters: float,
) -> Tensor:
    """``activation(group_norm(input) * (1 + scale) + shift)``: group norm (arXiv:1803.08494), the
    modulation of AdaGN (arXiv:2105.05233) and DiT (arXiv:2212.09748), and an activation.

    The first arguments are those of :func:`torch.nn.functional.group_norm`. Saved for backward: the
    input, and vectors. Statistics are computed in float64. An input of 16 bits is computed in
    float32, and rounded once; under autocast on CUDA the result is float32, as torch's. Inputs that
    are too small to gain, and contiguous ones without activation and modulation, run torch's group
    norm.

    Args:
        input: [N, C, ...] of float32, float64, float16 or bfloat16. The output is contiguous or
            channels_last, as the input.
        num_groups: divides C.
        weight, bias: [C] of the input's dtype, or of float32.
        activation: the name of a function of :mod:`fusedtrain.functional` with no tensors for
            parameters; None for none.
        scale, shift: [N, C] of the input's dtype.
        parameters: of the activation, as the function names them.

    Raises:
        ValueError: an unknown activation, one value a group, a `scale` or `shift` that is not
            [N, C].
        TypeError: a parameter that the activation does not have.
        RuntimeError: torch's errors for the same mistakes.

    Example:
        >>> group_norm_act(torch.tensor([[[1.0, 3.0]]]), 1, activation="relu")
        tensor([[[0.0000, 1.0000]]])
    """
    tensors = (input, weight, bias, scale, shift)
    if _has_any(tensors):
        return _handle(
            group_norm_act, tensors, input, num_groups, weight, bias, eps=eps,
            activation=activation, scale=scale, shift=shift, **parameters,
        )  # fmt: skip
    fused = None if parameters else _activations.BY_NAME.get(activation)
    function: Any = None
    if fused is None:
        fused, function = _activations.chosen(activation, parameters)
    check_modulation(input, scale, shift)
    affine = Affine(weight, bias, scale, shift)
    if fused is not None:
        return run(input, num_groups, affine, eps, fused)
    result: Tensor = function(run(input, num_groups, affine, eps, Pointwise()))
    return result
