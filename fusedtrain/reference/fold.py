"""The weight and bias of a convolution that includes the batch norm after it.

With s = gamma / sqrt(var + eps), one number per output channel:
W' = s W and b' = beta + s (b - mean) (Jacob et al. 2018, section 3.2; You et al. 2023, "Efficient
ConvBN Blocks"). `weight` belongs to a convolution or linear layer, with shape [out, ...], or, if
`transposed`, to a transposed convolution in `groups` groups, with shape [in, out / groups, ...].
"""

from __future__ import annotations

import torch
from torch import Tensor


def _per_channel(values: Tensor, weight: Tensor, transposed: bool, groups: int) -> Tensor:
    """One value per output channel, in a shape that broadcasts over the weight."""
    ones = [1] * (weight.dim() - 2)
    if not transposed:
        return values.view(-1, 1, *ones)
    rows = values.view(groups, 1, -1).expand(-1, weight.size(0) // groups, -1)
    return rows.reshape(weight.size(0), -1, *ones)


def _sum_per_channel(x: Tensor, transposed: bool, groups: int) -> Tensor:
    """The sum over each output channel of a tensor shaped like the weight."""
    if not transposed:
        return x.flatten(1).sum(1)
    return (
        x.unflatten(0, (groups, -1)).flatten(3).sum((1, 3)).flatten() if x.dim() > 2 else x.sum(0)
    )


def _wide(*tensors: Tensor | None) -> torch.dtype:
    dtypes = {t.dtype for t in tensors if t is not None}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _terms(
    weight: Tensor, bias: Tensor | None, gamma: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[torch.dtype, Tensor, Tensor, Tensor]:
    """The dtype of the math, invstd = 1 / sqrt(var + eps), gamma invstd, and bias - mean."""
    wide = _wide(weight, bias, gamma, mean, var)
    invstd = (var.to(wide) + eps).rsqrt()
    scale = invstd if gamma is None else gamma.to(wide) * invstd
    centre = -mean.to(wide) if bias is None else bias.to(wide) - mean.to(wide)
    return wide, invstd, scale, centre


def fold_weight(
    weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    running_mean: Tensor, running_var: Tensor, eps: float, transposed: bool, groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The folded weight and bias, in the dtype of `weight`."""
    wide, _, scale, centre = _terms(weight, bias, gamma, running_mean, running_var, eps)
    folded = weight.to(wide) * _per_channel(scale, weight, transposed, groups)
    shift = centre * scale
    if beta is not None:
        shift = shift + beta.to(wide)
    return folded.to(weight.dtype), shift.to(weight.dtype)


def fold_weight_backward(
    grad_weight: Tensor, grad_bias: Tensor, weight: Tensor, bias: Tensor | None,
    gamma: Tensor | None, running_mean: Tensor, running_var: Tensor, eps: float, transposed: bool,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of weight, bias, gamma and beta; the last two in the dtype of `running_mean`.

    dW = s dW', db = s db', dbeta = db', and dgamma = (sum of dW' W + (b - mean) db') /
    sqrt(var + eps): no activation is needed. Absent arguments get gradients, too.
    """
    wide, invstd, scale, centre = _terms(weight, bias, gamma, running_mean, running_var, eps)
    grad, grad_shift = grad_weight.to(wide), grad_bias.to(wide)
    grad_scale = _sum_per_channel(grad * weight.to(wide), transposed, groups) + centre * grad_shift
    dtype = running_mean.dtype
    return (
        (grad * _per_channel(scale, weight, transposed, groups)).to(weight.dtype),
        (grad_shift * scale).to(weight.dtype),
        (grad_scale * invstd).to(dtype),
        grad_shift.to(dtype),
    )


def fold_weight_before(
    weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    running_mean: Tensor, running_var: Tensor, eps: float, groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Folds a norm before the convolution, by input channel: W' = W s, b' = b + W (beta - s mean).

    Wrong for a transposed convolution and for zero padding: at the borders fewer weights multiply
    the shift.
    """
    wide, _, scale, centre = _terms(weight, None, gamma, running_mean, running_var, eps)
    shift = centre * scale if beta is None else centre * scale + beta.to(wide)
    grouped = weight.to(wide).unflatten(0, (groups, -1))  # [groups, out / groups, in / groups, ...]
    ones = [1] * (weight.dim() - 2)
    sums = (grouped * shift.view(groups, 1, -1, *ones)).flatten(2).sum(2).flatten()
    folded = (grouped * scale.view(groups, 1, -1, *ones)).flatten(0, 1)
    if bias is not None:
        sums = sums + bias.to(wide)
    return folded.to(weight.dtype), sums.to(weight.dtype)
