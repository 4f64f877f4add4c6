"""SyncBatchNorm of ``apex.parallel``, over this package's, and its helper functions."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..nn.sync_norm import SyncBatchNormAct, convert_sync_batchnorm


class SyncBatchNorm(SyncBatchNormAct):
    """:class:`fusedtrain.nn.SyncBatchNormAct` with the arguments of ``apex.parallel``'s.

    ``forward(input, z=None)`` normalises the input [N, C, ...] over the batches of all ranks, adds
    z of the same shape and dtype, and applies ReLU with `fuse_relu`. Checkpoints of torch's batch
    norms load.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in
            :class:`torch.nn.BatchNorm2d`.
        process_group: the ranks, by default all.
        channel_last: whether inputs, z and outputs are [N, ..., C]. torch's memory format of that
            name needs no argument.
        fuse_relu: whether ReLU follows, in the same op.

    Raises:
        ValueError: an input of fewer than 2 dimensions.
        RuntimeError: double backward, and torch's errors for the same mistakes.

    Example:
        >>> import torch
        >>> norm = SyncBatchNorm(3, channel_last=True, fuse_relu=True)
        >>> norm.load_state_dict(torch.nn.BatchNorm2d(3).state_dict())
        <All keys matched successfully>
        >>> norm(torch.randn(2, 5, 5, 3), torch.zeros(2, 5, 5, 3)).shape
        torch.Size([2, 5, 5, 3])
    """

    channel_last: bool = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, apply_act=fuse_relu,
            process_group=process_group,
        )  # fmt: skip
        self.channel_last = channel_last

    @property
    def fuse_relu(self) -> bool:
        """Whether ReLU follows. After a conversion another activation may: see `act`."""
        return isinstance(self.act, nn.ReLU)

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalises the input, adds z and applies the activation."""
        return self._fused(input, z)

    def _run(self, input: Tensor, residual: Tensor | None, *arguments: Any) -> Tensor:
        if not self.channel_last:
            return super()._run(input, residual, *arguments)
        input = input.movedim(-1, 1)
        residual = None if residual is None else residual.movedim(-1, 1)
        return super()._run(input, residual, *arguments).movedim(1, -1).contiguous()

    def extra_repr(self) -> str:
        return super().extra_repr() + (", channel_last=True" if self.channel_last else "")


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Turns every batch norm of a model into :class:`SyncBatchNorm`, in place.

    Converts the norms that :func:`fusedtrain.nn.convert_sync_batchnorm` converts. Parameters,
    buffers, hooks and the activations of this package's norms stay. Instance norms do not change.

    Args:
        module: the model, or one batch norm.
        process_group: the ranks, by default all.
        channel_last: as in :class:`SyncBatchNorm`, for all norms.

    Returns:
        the module.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4))
        >>> type(convert_syncbn_model(model)[1]).__name__
        'SyncBatchNorm'
    """
    convert_sync_batchnorm(module, process_group)
    for part in module.modules():
        if type(part) in (SyncBatchNormAct, SyncBatchNorm):
            part.__class__ = SyncBatchNorm
            vars(part)["channel_last"] = channel_last
    return module


def create_syncbn_process_group(group_size: int) -> Any:
    """A process group of `group_size` neighbouring ranks that includes this rank.

    Every rank must call this function.

    Args:
        group_size: a divisor of the number of ranks; 0 means all of them.

    Returns:
        the group; None for 0: as `process_group` None means all ranks.

    Raises:
        ValueError: if `group_size` does not divide the number of ranks.

    Example:
        >>> create_syncbn_process_group(0) is None
        True
    """
    if group_size == 0:
        return None
    ranks = dist.get_world_size()
    if group_size < 0 or ranks % group_size:
        raise ValueError(f"group_size: {group_size} does not divide the number of ranks, {ranks}")
    firsts = range(0, ranks, group_size)
    groups = [dist.new_group(list(range(first, first + group_size))) for first in firsts]
    return groups[dist.get_rank() // group_size]
