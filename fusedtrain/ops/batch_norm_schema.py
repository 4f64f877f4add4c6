"""The ops of batch norm with activation: fake kernels, fallbacks.

Shared by all: ``input``, ``residual``, ``grad`` and ``saved`` have one shape [N, C, ...] and dtype;
``weight``, ``bias``, ``mean``, ``invstd`` and the running statistics [C] and ``branch_scale`` [N]
have the dtype that is computed in: float64 for float64 input, else float32. ``activation`` counts
the lines of ``FT_POINTWISE`` (csrc/formulas.h), -1 is none; ``a`` and ``b`` are its parameters.
``saved`` is the output where `saves_output` of the activation (reference/pointwise.py), else the
residual; without either, backward computes from the input what it needs. Outputs that were not
requested have no elements. `batch_norm_autograd.py` puts autograd in front.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference import batch_norm as reference
from ..reference.dtypes import wide_of
from ._library import define


def _fake_stats(input: Tensor) -> tuple[Tensor, Tensor]:
    mean = input.new_empty(input.shape[1], dtype=torch.float64)
    return mean, torch.empty_like(mean)


def _fake_forward(input: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean = input.new_empty(input.shape[1], dtype=wide_of(input))
    return torch.empty_like(input), mean, torch.empty_like(mean)


def _fake_in_place(input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    mean = input.new_empty(input.shape[1], dtype=wide_of(input))
    return mean, torch.empty_like(mean)


def _fake_functional(input: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean = input.new_empty(input.shape[1], dtype=torch.float64)
    invstd = torch.empty_like(mean, dtype=wide_of(input))
    return torch.empty_like(input), mean, torch.empty_like(mean), invstd


def _functional(
    input: Tensor, residual: Tensor | None, branch_scale: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, training: bool,
    eps: float, activation: int, a: float, b: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Made of the other ops, on whatever device."""
    ops = torch.ops.fusedtrain
    if training:
        mean, variance = ops.batch_norm_stats(input)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean = running_mean.to(torch.float64, copy=True)
        variance = running_var.to(torch.float64, copy=True)
    wide = wide_of(input)
    invstd = (variance + eps).rsqrt().to(wide)
    output = ops.batch_norm_act_apply(
        input, residual, branch_scale, weight, bias, mean.to(wide), invstd, activation, a, b
    )
    return output, mean, variance, invstd


def _fake_apply(input: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(input)


def _fake_backward(grad: Tensor, input: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    needs_input, needs_residual, needs_affine = rest[-3:]
    training = rest[6]
    model = grad if input is None else input
    vector = grad.new_empty(grad.shape[1] if training or needs_affine else 0, dtype=wide_of(grad))
    return (
        torch.empty_like(model) if needs_input else grad.new_empty(0),
        torch.empty_like(model) if needs_residual else grad.new_empty(0),
        vector,
        torch.empty_like(vector),
    )


def _fake_reduce(grad: Tensor, input: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    sums = grad.new_empty((2, grad.shape[1]), dtype=torch.float64)
    return sums, torch.empty_like(input) if rest[-1] else grad.new_empty(0)


def _fake_backward_apply(grad: Tensor, input: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    model = grad if input is None else input
    return torch.empty_like(model), torch.empty_like(model) if rest[-1] else grad.new_empty(0)


_RUNNING = ("running_mean", "running_var")
# -> mean, biased variance; float64
define("batch_norm_stats", reference.batch_norm_stats, _fake_stats)
# -> output, mean, invstd
define("batch_norm_act", reference.batch_norm_act, _fake_forward, _RUNNING)
# The same in the place of the input -> mean, invstd
define("batch_norm_act_", reference.batch_norm_act_, _fake_in_place, ("input", *_RUNNING))
# The input that was there; the activation is `s` from 0 on and `slope * s` below -> input
define("batch_norm_act_restore", reference.batch_norm_act_restore, _fake_apply)
# batch_norm_act for torch.compile, which wants no mutation: -> output, mean, variance (both
# float64), invstd
define("batch_norm_act_functional", _functional, _fake_functional)
# The same with given statistics -> output
define("batch_norm_act_apply", reference.batch_norm_act_apply, _fake_apply)
# -> gradients of input, residual, weight, bias
define("batch_norm_act_backward", reference.batch_norm_act_backward, _fake_backward)
# The two halves of it. -> float64 [2, C]: gradients of bias and weight; gradient of residual
_reduce, _apply = reference.batch_norm_act_backward_reduce, reference.batch_norm_act_backward_apply
define("batch_norm_act_backward_reduce", _reduce, _fake_reduce)
# `averages`: these sums / number of elements of a channel; none for fixed statistics.
# -> gradients of input, residual
define("batch_norm_act_backward_apply", _apply, _fake_backward_apply)
