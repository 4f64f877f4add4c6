"""Hugging Face's Accelerate, and with it the Trainer of transformers: fusedtrain's GradScaler."""

from __future__ import annotations

from typing import Any

import torch

from ..amp import GradScaler
from ..optim import FusedOptimizer

try:
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    if (error.name or "").split(".")[0] != "accelerate":
        raise
    raise ImportError(
        "fusedtrain.integrations.accelerate needs accelerate, which is not installed: "
        "pip install accelerate",
        name="accelerate",
    ) from error

__all__ = ["FusedAcceleratedOptimizer", "use_fused_scaler"]


class FusedAcceleratedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper of an optimizer of `fusedtrain.optim`: knows which steps were skipped.

    Accelerate takes a step for skipped when the scaler did not call ``optimizer.step``. Optimizers
    that skip on the device, as fusedtrain's and torch's fused ones do, are always called.
    """

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, for gradients that were not finite; waits for it."""
        if self.scaler is None:
            return False
        return super().step_was_skipped or bool(self.optimizer.last_step_skipped)


def use_fused_scaler(accelerator: Any, scaler: torch.amp.GradScaler | None = None) -> None:
    """Puts fusedtrain's GradScaler into an Accelerator, and makes `step_was_skipped` right.

    Call it before ``accelerator.prepare``; of a Trainer of transformers, with
    ``trainer.accelerator`` before ``trainer.train()``. Optimizers of `fusedtrain.optim` that are
    prepared afterwards become :class:`FusedAcceleratedOptimizer`. Learning rate schedulers of
    Accelerate read `step_was_skipped` at each step, and so wait for the device.

    Args:
        accelerator: an `accelerate.Accelerator`.
        scaler: replaces the accelerator's scaler; None: a :class:`fusedtrain.amp.GradScaler` with
            the settings of the accelerator's scaler, if there is one.

    Raises:
        RuntimeError: an optimizer is prepared already.
        ValueError: the accelerator shards with FSDP or DeepSpeed, which have scalers of their own.

    Example: examples/integrations/accelerate_loop.py.
    """
    if accelerator._optimizers:
        raise RuntimeError("use_fused_scaler: call it before accelerator.prepare")
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(f"use_fused_scaler: {kind} has a scaler of its own; leave the call out")
    old = accelerator.scaler
    if scaler is None and old is not None:
        scaler = GradScaler(
            accelerator.device.type, old.get_scale(), old.get_growth_factor(),
            old.get_backoff_factor(), old.get_growth_interval(), old.is_enabled(),
        )  # fmt: skip
    accelerator.scaler = scaler
    prepare = accelerator.prepare_optimizer

    def prepare_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(optimizer, *args, **kwargs)
        if isinstance(prepared.optimizer, FusedOptimizer):
            prepared.__class__ = FusedAcceleratedOptimizer
        return prepared

    accelerator.prepare_optimizer = prepare_optimizer
