"""The backward pass of a scaled loss, with Apex's calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._functions import without_autocast
from ._gradients import ScaledGradients
from ._loss_scaler import Notices
from ._state import _amp_state


def gradients_of(optimizer: Any) -> ScaledGradients:
    """The stash that `initialize` added to the optimizer."""
    gradients: ScaledGradients | None = getattr(optimizer, "_amp_stash", None)
    if gradients is None:
        raise RuntimeError(
            f"{type(optimizer).__name__} has not been through amp.initialize: call model, "
            "optimizer = amp.initialize(model, optimizer, opt_level=...) first, and use the "
            "results. Today's form is torch.autocast with fusedtrain.amp.GradScaler."
        )
    return gradients


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: torch.nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Yields the loss in float32, times the loss scale; run its backward pass inside.

    On exit the gradients of the optimizers' parameters (`master_params`) are divided by the scale
    and added to those of earlier passes. They are searched for infs and NaNs, and the scale is
    updated. After an overflow the next step of each optimizer does nothing.

    Args:
        loss: of any shape and floating-point dtype.
        optimizers: the optimizer, or a list of them, whose parameters get this loss's gradients.
        loss_id: which scale to use, from 0 to ``num_losses`` - 1.
        model: not used.
        delay_unscale: adds up scaled gradients. A later backward pass of the same optimizers,
            without `delay_unscale`, must come before a step. Passes under ``no_sync`` of
            DistributedDataParallel need `delay_unscale`: without it their gradients are stashed,
            and the last pass does not sum them over the ranks.
        delay_overflow_check: leaves the scale as it is, and steps whatever the gradients are.

    Raises:
        RuntimeError: before `initialize`, for optimizers that `initialize` did not return, for
            sparse gradients.
        IndexError: for a `loss_id` out of range.

    Example:
        >>> import torch, fusedtrain
        >>> from fusedtrain.apex import amp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = fusedtrain.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        >>> loss = model(torch.ones(4, 2)).square().mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()
    """
    if not _amp_state.initialized:
        raise RuntimeError(
            "Invoked 'with amp.scale_loss', but amp has not been initialized: model, optimizer = "
            "amp.initialize(model, optimizer, opt_level=...) comes first. Today's form is "
            "torch.autocast with fusedtrain.amp.GradScaler."
        )
    if not _amp_state.opt_properties.enabled:
        yield loss
        return
    several = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    stashes = [gradients_of(optimizer) for optimizer in several]
    if not 0 <= loss_id < len(_amp_state.loss_scalers):
        raise IndexError(
            f"loss_id must be from 0 to {len(_amp_state.loss_scalers) - 1}, got {loss_id}: "
            "amp.initialize takes num_losses"
        )
    _check_devices(stashes)
    scaler = _amp_state.loss_scalers[loss_id]
    if not scaler.dynamic and scaler.loss_scale() == 1 and not any(s.with_masters for s in stashes):
        with without_autocast():
            yield loss.float()
        return
    _notices.tell()
    scale = scaler.scale_on(loss.device)
    overflow = torch.zeros_like(scale)
    begun: list[ScaledGradients] = []
    try:
        for stash in stashes:
            stash.prepare(scale)
            begun.append(stash)
        with without_autocast():
            yield loss.float() * scale
        for stash in stashes:
            if delay_unscale:
                stash.delay(scale)
            else:
                overflow = torch.maximum(overflow, stash.finish(scale))
    except BaseException:
        for stash in begun:
            stash.abort()
        raise
    if delay_unscale or (scaler.dynamic and delay_overflow_check):
        return
    scaler.update_after(overflow)
    if not scaler.dynamic:
        return
    for stash in stashes:
        stash.add_overflow(overflow)
    if _amp_state.verbosity > 0:
        _notices.add(overflow, scaler.scale_on(loss.device), loss_id)


def _check_devices(stashes: list[ScaledGradients]) -> None:
    """Raises for a model on another device than O1 casts on: it would silently run in float32."""
    if not _amp_state.devices:
        return
    for stash in stashes:
        for p in stash.plain_params[:1]:
            if p.device.type not in _amp_state.devices:
                raise RuntimeError(
                    f"the model is on {p.device}, but was on {', '.join(_amp_state.devices)} when "
                    "amp.initialize switched autocast on: move the model before that"
                )


_notices = Notices()
tell_overflows = _notices.tell
