"""Group norm, modulation and activation: the ops, autograd around them, the function.

The kernels go through tensors as batch norm's do, with a mean, invstd, factor and offset of each
sample and channel: the `vectors` [4, N, C]. All samples of a contiguous input are gone through at
once; those of a channels_last one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function as _has_any

from .. import _calls, _recompute
from .._graph.fx import handle as _handle
from .._recompute import OP_NAMES
from .._torch_private import without_torch_function
from ..reference import group_norm as reference
from ..reference.dtypes import wide_of
from ..reference.group_norm import Affine, differentiable_backward, eager, modulated, scaled
from ..reference.pointwise import Pointwise
from . import activations as _activations
from ._library import define, op
from .batch_norm import activated, laid_out

__all__ = ["group_norm_act"]


def _fake(input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    vectors = input.new_empty((4, *input.shape[:2]), dtype=wide_of(input))
    return torch.empty_like(input), vectors


def _fake_apply(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input)


def _fake_backward(grad: Tensor, input: Tensor, _: int, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format if i else torch.preserve_format)
        if t is not None and needed
        else input.new_empty(0)
        for i, (t, needed) in enumerate(zip((input, *rest[:4]), rest[-5:]))
    )


define("group_norm_act", reference.group_norm_act, _fake)
define("group_norm_act_apply", reference.group_norm_act_apply, _fake_apply)
define("group_norm_act_backward", reference.group_norm_act_backward, _fake_backward)
_forward, _backward = op("group_norm_act"), op("group_norm_act_backward")
_apply = op("group_norm_act_apply")
OP_NAMES[_apply] = "group_norm_act"  # in its place, where an output is recomputed

# Least elements of an input that gains, of a sample and of a plane of it, by what the call is: an
# AMD EPYC with AVX-512, one thread, SiLU, forward and backward, against torch's norm on a
# contiguous input and then our activation. channels_last: 8 x 64 x 8 x 8 1.2x in float32 and 1.1x
# in bfloat16, 8 x 64 x 4 x 4 1.0x, 512 x 32 x 4 x 4 0.9x. Modulated: 2 x 64 x 4 x 4 1.2x,
# contiguous 64 x 512 x 4 x 4 in float32 0.6x. Contiguous: 4 x 256 x 32 x 32 1.1x and 2 x 128 x
# 128 x 128 1.2x in float32; 2 x 128 x 32 x 32 and 64 x 256 x 8 x 8 0.9x, as all sizes in bfloat16.
# Torch keeps the normalised input, too: the op also runs where outputs are recomputed. Instance
# norm with leaky ReLU: 2 x 16 x 8 x 8 1.3x, 8 x 64 x 4 x 4 1.1x. Other types of device have not
# been measured.
_LEAST = {
    "cpu": {
        "channels_last": (1 << 15, 1 << 10, 1),
        "modulated": (0, 0, 64),
        "recomputed": (1 << 15, 0, 64),
        "contiguous": (1 << 20, 0, 256),
        "instance": (0, 1 << 10, 32),
    }
}
_MOST_SAMPLES = 32  # of a channels_last input on such a device
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class GroupNormAct(torch.autograd.Function):
    """Saves the input and the vectors."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None,
        scale: Tensor | None, shift: Tensor | None, eps: float, activation: Pointwise,
    ) -> Tensor:  # fmt: skip
        output: Tensor
        output, vectors = _forward(input, groups, weight, bias, scale, shift, eps, *activation)
        ctx.save_for_backward(input, weight, bias, scale, shift, vectors)
        ctx.groups, ctx.eps, ctx.activation = groups, eps, activation
        scope = _recompute.scope()
        if scope is not None:
            scope.tag(output, _apply, (input, vectors), tuple(activation))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, *affine, vectors = ctx.saved_tensors
        needs_input, _, *needs = ctx.needs_input_grad[:6]
        if _calls.plain_backward(grad):
            grad_input, of_vectors = differentiable_backward(
                grad, input, ctx.groups, Affine(*affine), ctx.eps, ctx.activation, needs
            )
        else:
            grad_input, *of_vectors = _backward(
                grad, input, ctx.groups, *affine, vectors, *ctx.activation, needs_input, *needs
            )
        of_vectors = [t if needed else None for t, needed in zip(of_vectors, needs)]
        return grad_input if needs_input else None, None, *of_vectors, None, None


_function = _calls.apply_of(GroupNormAct)


def _fits(input: Tensor, groups: int, affine: Affine, eps: float) -> bool:
    """Whether the op takes the arguments."""
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


def _gains(input: Tensor, activates: bool, modulates: bool, instance: bool = False) -> bool:
    """Whether the op is faster than torch's own, or is to keep less for backward."""
    samples, channels = input.shape[:2]
    least = _LEAST.get(input.device.type)
    last = _calls.suggests_channels_last(input)
    keeps_less = activates and _recompute.scope() is not None
    if least is None:
        return keeps_less and not (last and samples > _MOST_SAMPLES)
    size = input.numel()
    for kind, applies in (
        ("channels_last", last), ("modulated", modulates), ("recomputed", keeps_less),
        ("contiguous", activates and not last and input.itemsize > 2), ("instance", instance),
    ):  # fmt: skip
        if applies:
            all_samples, sample, plane = least[kind]
            if size >= max(all_samples, samples * sample, samples * channels * plane):
                return True
    return False


def _fused(
    input: Tensor, groups: int, affine: Affine, eps: float, activation: Pointwise,
    instance: bool = False,
) -> Any:  # fmt: skip
    """The output of the op; None where it takes no such call, or gains nothing."""
    if not _calls.takes(input) or input.dim() < 2 or input.numel() == 0:
        return None
    modulates = affine.scale is not None or affine.shift is not None
    gains = _gains(input, activation.op >= 0, modulates, instance)
    if not (gains and _fits(input, groups, affine, eps)):
        return None
    if not _calls.suggests_channels_last(input):
        input = input.contiguous()
    input = laid_out(input, activation)
    if _calls.needs_grad(input, *affine):
        return _function(input, groups, *affine, eps, activation)
    return _forward(input, groups, *affine, eps, *activation)[0]


def run(input: Tensor, groups: int, affine: Affine, eps: float, activation: Pointwise) -> Tensor:
    """The op where it takes the call and gains, else torch's, with its errors."""
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


def run_instances(
    input: Tensor, affine: Affine, eps: float, activation: Pointwise, stock: Callable[[], Tensor]
) -> Tensor:
    """Instance norm, which is group norm with a channel a group: the op where it takes the call and
    gains, else `stock`'s norm."""
    if _calls.traced():
        return activation.forward(scaled(stock(), affine))
    with without_torch_function() if _recompute.planned() else nullcontext():
        output: Tensor | None = _fused(input, input.size(1), affine, eps, activation, True)
    return activated(scaled(stock(), affine), activation) if output is None else output


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
    are too small to gain, and contiguous ones without modulation that are of 16 bits or have no
    activation, run torch's group norm.

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
