"""Batch norm, add and activation, with statistics over all ranks of torch.distributed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import _calls
from .._torch_private import BatchNormBase, is_exporting
from ..ops._library import op
from ..ops.batch_norm import laid_out, run
from ..ops.batch_norm_autograd import save_for_backward
from ..reference.batch_norm import Norm, Statistics, move
from ..reference.dtypes import wide_of
from ..reference.pointwise import Pointwise
from .norm import (
    OURS,
    BatchNormAct1d,
    BatchNormAct2d,
    BatchNormAct3d,
    BatchNormActBase,
    BatchNormAddAct,
)

_stats = op("batch_norm_stats")
_apply = op("batch_norm_act_apply")
_reduce = op("batch_norm_act_backward_reduce")
_backward_apply = op("batch_norm_act_backward_apply")


def _merge(input: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance [C] and number of elements a channel [1], over all ranks: float64.

    Chan et al., 1979: means and variances are weighted by their counts, so batch sizes may differ.
    A rank without elements has no weight.
    """
    channels = input.shape[1]
    if input.numel():
        mean, variance = _stats(input)
    else:
        mean = variance = input.new_zeros(channels, dtype=torch.float64)
    count = mean.new_full((1,), input.numel() // max(channels, 1))
    mine = torch.cat([mean, variance, count])
    of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, mine, group=group)
    means, variances, counts = torch.stack(of_all).split([channels, channels, 1], dim=1)
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(0) / total
    return mean, variance, total


class SyncBatchNormActFunction(torch.autograd.Function):
    """As BatchNormAct (ops/batch_norm_autograd.py), with one collective in each pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, residual: Tensor | None, *rest: Any) -> Tensor:
        norm, (activation, group) = Norm(*rest[:-2]), rest[-2:]
        mean, variance, total = _merge(input, group)
        move(norm.running_mean, norm.running_var, norm.momentum, mean, variance, total)
        wide = wide_of(input)
        invstd = (variance + norm.eps).rsqrt().to(wide)
        statistics = Statistics(norm.branch_scale, norm.weight, norm.bias, mean.to(wide), invstd)
        output: Tensor = _apply(input, residual, *statistics, *activation)
        save_for_backward(ctx, input, residual, output, statistics, True, activation, affine=True)
        ctx.total, ctx.activation, ctx.group = total, activation, group
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, saved, *shared = ctx.saved_tensors
        needs_input, needs_residual, _, needs_weight, needs_bias = ctx.needs_input_grad[:5]
        mean = shared[3]
        sums, grad_residual = _reduce(grad, input, saved, *shared, *ctx.activation, needs_residual)
        # A copy, before the all-reduce: weight and bias get the gradients of this rank's elements.
        grad_bias, grad_weight = sums.to(mean.dtype, copy=True)
        grad_input = None
        if needs_input:
            dist.all_reduce(sums, group=ctx.group)
            grad_input, _ = _backward_apply(
                grad, input, saved, *shared, sums / ctx.total, *ctx.activation, False
            )
        return (
            grad_input,
            grad_residual if needs_residual else None,
            None,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *(None,) * 7,
        )


class SyncBatchNormAct(BatchNormActBase):
    """:class:`torch.nn.SyncBatchNorm` and an activation in one op.

    In training with several ranks, mean and variance are those of all ranks' batches, each weighted
    by its size, which may differ and be 0; forward and backward have one collective each. Otherwise
    the module is :class:`fusedtrain.nn.BatchNormAct2d`, for inputs of any rank from [N, C]. It runs
    on every device for which the process group has collectives, also on the CPU with gloo. It is
    not a subclass of torch.nn.SyncBatchNorm, which DistributedDataParallel refuses on the CPU.

    Args:
        process_group: the ranks, by default all.
        others: as in :class:`fusedtrain.nn.BatchNormAct2d`.

    Raises:
        ValueError: an input of fewer than 2 dimensions.
        RuntimeError: double backward, and torch's errors for the same mistakes.

    Example:
        >>> SyncBatchNormAct(2)(torch.ones(4, 2, 3, 3)).sum().item()  # no process group: one rank
        0.0
    """

    process_group: Any = None

    def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _as_function(self, input: Any) -> Any:
        raise RuntimeError(
            "torch.fx cannot trace a synchronised batch norm by itself, or with hooks: trace the "
            "module around it, and remove its hooks"
        )

    def _run(self, input: Tensor, residual: Tensor | None, *arguments: Any) -> Tensor:
        ranks = 1
        if self.training and dist.is_available() and dist.is_initialized():
            ranks = dist.get_world_size(self.process_group)
        if ranks == 1:
            return run(input, residual, *arguments)
        if is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            raise RuntimeError(
                "SyncBatchNormAct: an exported or traced graph cannot exchange statistics between "
                "ranks: call model.eval() before the export"
            )
        *norm, activation, _ = arguments
        synchronise = SyncBatchNormAct._synchronise  # of nn.SyncBatchNorm, too
        if torch.compiler.is_compiling():
            # A decorator would import torch._dynamo at once, which takes a second.
            synchronise = torch.compiler.disable(synchronise)
        return synchronise(self, input, residual, Norm(*norm), activation)

    def _synchronise(
        self, input: Tensor, residual: Tensor | None, norm: Norm, activation: Pointwise
    ) -> Tensor:
        wide = wide_of(input)
        if not _calls.takes(input) or input.shape[1] != self.num_features:
            raise RuntimeError(
                f"SyncBatchNormAct: expected a dense floating point tensor with "
                f"{self.num_features} channels, got {input.dtype} of shape {tuple(input.shape)}"
            )
        if residual is not None and (
            residual.shape != input.shape or residual.dtype is not input.dtype
        ):
            raise RuntimeError(
                f"SyncBatchNormAct: the residual must be like the input, {input.dtype} of shape "
                f"{tuple(input.shape)}, not {residual.dtype} of shape {tuple(residual.shape)}"
            )
        rows, weight, bias = norm[:3]
        norm = norm._replace(
            branch_scale=None if rows is None else rows.detach().to(wide),
            weight=None if weight is None else weight.to(wide),
            bias=None if bias is None else bias.to(wide),
        )
        return SyncBatchNormActFunction.apply(
            laid_out(input, activation), residual, *norm, activation, self.process_group
        )


OURS[nn.SyncBatchNorm] = SyncBatchNormAct

_KNOWN = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    BatchNormAct1d, BatchNormAct2d, BatchNormAct3d, BatchNormAddAct,
)  # fmt: skip
_TIMM = ("BatchNormAct2d", "SyncBatchNormAct")


def convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Turns every batch norm of a model into :class:`SyncBatchNormAct`, in place.

    Converts norms of torch.nn, of this package and timm's BatchNormAct2d; activations stay.
    Parameters, buffers, hooks and names are the same objects as before. A subclass with its own
    forward stays, with a warning.

    Args:
        module: the model, or one batch norm.
        process_group: the ranks, by default all.

    Returns:
        the module.

    Example:
        >>> model = torch.nn.Sequential(BatchNormAct2d(3, act_layer=torch.nn.SiLU))
        >>> convert_sync_batchnorm(model)[0].act
        SiLU(inplace=True)
    """
    for name, part in module.named_modules():
        cls = type(part)
        timm = cls.__module__.startswith("timm.layers.") and cls.__name__ in _TIMM
        if isinstance(part, SyncBatchNormAct):
            part.process_group = process_group
        elif cls in _KNOWN or timm:
            part.__class__ = SyncBatchNormAct
            vars(part)["process_group"] = process_group
            for child in ("act", "drop"):
                # In __dict__, not a child: the model's modules and their names do not change.
                if not hasattr(part, child):
                    vars(part)[child] = nn.Identity()
        elif isinstance(part, BatchNormBase):
            warnings.warn(
                f"{name or 'module'}: {cls.__module__}.{cls.__qualname__} has a forward of its "
                "own, and was not converted",
                stacklevel=2,
            )
    return module
