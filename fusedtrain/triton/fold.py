"""A batch norm folded into the weight before it, and the gradients of both: one launch each way."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.dtypes import wide_of
from ._layout import cdiv, check_same, dense_like, is_dense, unit_of
from .launch import Launcher, check_dtype
from .vecmath import widen

_SIZES = ["numel", "outputs", "channels", "inner", "rows_per_group"]


@triton.jit
# equal (other=): elements beyond the data are not stored
def channel_of(at, mask, bias_ptr, gamma_ptr, mean_ptr, var_ptr, eps, BIAS: tl.constexpr,
               GAMMA: tl.constexpr):  # fmt: skip
    """invstd = 1 / sqrt(var + eps), gamma invstd, and bias - mean, of output channels."""
    var = tl.load(var_ptr + at, mask=mask, other=1.0)
    invstd = 1.0 / tl.sqrt(var + tl.full((), eps, var.dtype))
    scale = invstd
    if GAMMA:
        scale = tl.load(gamma_ptr + at, mask=mask, other=0.0) * invstd
    centre = -tl.load(mean_ptr + at, mask=mask, other=0.0)
    if BIAS:
        centre += tl.load(bias_ptr + at, mask=mask, other=0.0)
    return invstd, scale, centre


@triton.jit(do_not_specialize=_SIZES)
def fold_kernel(  # equal (other=): elements beyond the data are not stored
    weight_ptr, folded_ptr, folded_bias_ptr, bias_ptr, gamma_ptr, beta_ptr, mean_ptr, var_ptr,
    numel: tl.int64, outputs: tl.int64, channels: tl.int64, inner: tl.int64,
    rows_per_group: tl.int64, eps: tl.float64,
    BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < numel
    run = at // inner
    row = run // channels
    output = row // rows_per_group * channels + run % channels
    _, scale, _ = channel_of(
        output, inside, bias_ptr, gamma_ptr, mean_ptr, var_ptr, eps, BIAS, GAMMA
    )
    # equal (< for <=): a whole last block is masked: slower, same result
    whole = start + BLOCK <= numel  # then without a mask: any numel has 16-byte accesses
    if whole:
        w = tl.load(weight_ptr + at)
    else:
        w = tl.load(weight_ptr + at, mask=inside, other=0.0)
    folded = (scale * widen(w)).to(folded_ptr.dtype.element_ty)
    if whole:
        tl.store(folded_ptr + at, folded)
    else:
        tl.store(folded_ptr + at, folded, mask=inside)
    first = at < outputs
    _, scale, centre = channel_of(
        at, first, bias_ptr, gamma_ptr, mean_ptr, var_ptr, eps, BIAS, GAMMA
    )
    shift = scale * centre
    if BETA:
        shift += tl.load(beta_ptr + at, mask=first, other=0.0)
    tl.store(folded_bias_ptr + at, shift, mask=first)


@triton.jit(do_not_specialize=_SIZES)
def fold_backward_kernel(  # equal (other=): sums are of products: the other factor is 0
    weight_ptr, grad_ptr, grad_weight_ptr, grad_folded_bias_ptr, grad_bias_ptr, grad_gamma_ptr,
    bias_ptr, gamma_ptr, mean_ptr, var_ptr,
    numel: tl.int64, outputs: tl.int64, channels: tl.int64, inner: tl.int64,
    rows_per_group: tl.int64, eps: tl.float64,
    BIAS: tl.constexpr, GAMMA: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per output channel, which fixes the order of the sum. ROWS: a channel's weight is
    one row of `inner` elements; their divisor UNIT shows Triton whether rows start on 16 bytes."""
    output = tl.program_id(0).to(tl.int64)
    group = output // channels
    channel = output % channels
    invstd, scale, centre = channel_of(
        output, True, bias_ptr, gamma_ptr, mean_ptr, var_ptr, eps, BIAS, GAMMA
    )
    if ROWS:
        count = inner // UNIT * UNIT
    else:
        count = rows_per_group * inner
    if numel == 0:  # then `inner` is 1
        count *= 0
    sums = tl.zeros((BLOCK,), var_ptr.dtype.element_ty)
    for i in range(tl.cdiv(count, BLOCK)):
        e = i * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        inside = e < count
        if ROWS:
            at = output * count + e
        else:
            row = group * rows_per_group + e // inner
            at = (row * channels + channel) * inner + e % inner
        g = widen(tl.load(grad_ptr + at, mask=inside, other=0.0))
        sums += g * widen(tl.load(weight_ptr + at, mask=inside, other=0.0))
        tl.store(
            grad_weight_ptr + at, (scale * g).to(grad_weight_ptr.dtype.element_ty), mask=inside
        )
    g = tl.load(grad_folded_bias_ptr + output)
    tl.store(grad_bias_ptr + output, scale * g)
    tl.store(grad_gamma_ptr + output, invstd * (tl.sum(sums) + centre * g))


_BLOCK = 1024

_launch_fold = Launcher(fold_kernel)
_launch_backward = Launcher(fold_backward_kernel)


class _Shape(NamedTuple):
    """csrc/ops/fold.h has the words for it."""

    op: str
    weight: Tensor
    wide: torch.dtype
    numel: int
    outputs: int
    channels: int
    inner: int
    rows_per_group: int

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        return self.numel, self.outputs, self.channels, self.inner, self.rows_per_group

    def vectors(self, **arguments: Tensor | None) -> Iterator[Tensor]:
        """The vectors as kernels take them; without one any tensor, which no kernel reads."""
        for name, t in arguments.items():
            if t is None:
                yield self.weight.new_empty(1, dtype=self.wide)
                continue
            if t.dim() != 1 or t.numel() != self.outputs:
                raise RuntimeError(
                    f"fusedtrain::{self.op}: {name} must have one element for each of the "
                    f"{self.outputs} output channels"
                )
            if t.device != self.weight.device:
                raise RuntimeError(f"fusedtrain::{self.op}: {name} must be on the device of weight")
            check_dtype(self.op, t, name)
            yield t.detach().to(self.wide).contiguous()

    def new_vector(self) -> Tensor:
        return self.weight.new_empty(self.outputs, dtype=self.wide)


def _shape_of(name: str, weight: Tensor, transposed: bool, groups: int) -> _Shape:
    check_dtype(name, weight, "weight")
    if weight.dim() < 2:
        raise RuntimeError(f"fusedtrain::{name}: weight must have 2 dimensions")
    weight = weight.detach()
    numel, size = weight.numel(), weight.size(0)
    rows = size == 1 or weight.stride(0) * size == numel
    if not (rows and is_dense(weight)):
        weight = weight.contiguous()
    wide = wide_of(weight)
    if not transposed:
        return _Shape(name, weight, wide, numel, size, size, numel // size if numel else 1, 1)
    if groups <= 0 or size % groups:
        raise RuntimeError(f"fusedtrain::{name}: groups must divide the input channels")
    channels = weight.size(1)
    plain = channels < 2 or not numel
    inner = weight[0, 0].numel() if plain else weight.stride(1)
    per_group = numel // (channels * inner * groups) if numel else 1
    return _Shape(name, weight, wide, numel, groups * channels, channels, max(inner, 1), per_group)


def fold_weight(
    weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    running_mean: Tensor, running_var: Tensor, eps: float, transposed: bool, groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = _shape_of("fold_weight", weight, transposed, groups)
    vectors = tuple(
        shape.vectors(
            bias=bias, gamma=gamma, beta=beta, running_mean=running_mean, running_var=running_var
        )
    )
    folded, folded_bias = torch.empty_like(shape.weight), shape.new_vector()
    threads = max(shape.numel, shape.outputs)
    if threads:
        has = (bias is not None, gamma is not None, beta is not None)
        _launch_fold(
            has,
            cdiv(threads, _BLOCK),
            (shape.weight, folded, folded_bias, *vectors),
            (*shape.numbers, eps),
            (*has, _BLOCK),
        )
    return folded, folded_bias.to(weight.dtype)


def fold_weight_backward(
    grad_weight: Tensor, grad_bias: Tensor, weight: Tensor, bias: Tensor | None,
    gamma: Tensor | None, running_mean: Tensor, running_var: Tensor, eps: float, transposed: bool,
    groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    name = "fold_weight_backward"
    check_same(name, grad_weight, weight, "grad_weight", "weight")
    shape = _shape_of(name, weight, transposed, groups)
    out = torch.empty_like(shape.weight)
    out_bias, out_gamma = shape.new_vector(), shape.new_vector()
    if shape.outputs:
        constants = (
            bias is not None, gamma is not None, not transposed, unit_of(shape.inner), _BLOCK
        )  # fmt: skip
        tensors = (
            shape.weight,
            dense_like(grad_weight.detach(), shape.weight),
            out,
            *shape.vectors(grad_bias=grad_bias),
            out_bias,
            out_gamma,
            *shape.vectors(
                bias=bias, gamma=gamma, running_mean=running_mean, running_var=running_var
            ),
        )
        _launch_backward(constants, shape.outputs, tensors, (*shape.numbers, eps), constants)
    dtype = running_mean.dtype
    return (
        out,
        out_bias.to(weight.dtype),
        out_gamma.to(dtype),
        grad_bias.detach().to(dtype, copy=True),
    )
