"""The work of the plugin and the callback, for both names of Lightning's package.

`lightning.pytorch` and `pytorch_lightning` have equal classes that do not accept each other's. So
`lightning.py` and `pytorch_lightning.py` each join the classes of this file with those of one
package. Nothing in this file imports Lightning.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch

from .._graph.forward import is_changed
from ..amp import GradScaler
from ..conversion import ConversionReport, convert, revert
from ..optim import FusedOptimizer

_STOCK_KEY = "MixedPrecision"  # of Lightning's plugin in a checkpoint


def missing(error: ImportError, package: str) -> ImportError:
    """The error for a package of Lightning that is not installed, or `error` if it is another."""
    if (error.name or "").split(".")[0] != package:
        return error
    remedy = package.replace("_", "-")
    module = "lightning" if package == "lightning" else package
    return ImportError(
        f"fusedtrain.integrations.{module} needs {package}, which is not installed: "
        f"pip install {remedy}",
        name=package,
    )


def raw(optimizer: Any) -> Any:
    """The optimizer itself: of Lightning's wrapper, a copy of its attributes, what that wraps."""
    return getattr(optimizer, "optimizer", optimizer)


class PrecisionMixin:
    """`FusedMixedPrecision` before Lightning's MixedPrecision."""

    scaler: torch.amp.GradScaler | None

    def __init__(
        self, precision: Any, device: str | None = None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if scaler is None and precision == "16-mixed":
            scaler = GradScaler(device)
        super().__init__(precision, device, scaler)  # type: ignore[call-arg]
        # Optimizer -> its own max_grad_norm, while a step clips to Lightning's.
        self._own_limits: dict[FusedOptimizer, float | None] = {}

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clips by norm within the next update, and by value at once, on unscaled gradients."""
        optimizer = raw(optimizer)
        if not isinstance(optimizer, FusedOptimizer):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)  # type: ignore[misc]
        elif clip_val > 0 and gradient_clip_algorithm == "value":
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)  # type: ignore[attr-defined]
        elif clip_val > 0:
            limit = self._own_limits.setdefault(optimizer, optimizer.max_grad_norm)
            # Clipping to one norm and then to another is clipping to the smaller one.
            optimizer.max_grad_norm = float(clip_val if limit is None else min(limit, clip_val))

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        finally:
            fused = raw(optimizer)
            if fused in self._own_limits:
                fused.max_grad_norm = self._own_limits.pop(fused)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the scaler under the name of Lightning's plugin, which then resumes from it too."""
        state = checkpoint.pop(type(self).__qualname__, None)
        if state is not None:
            checkpoint[_STOCK_KEY] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if _STOCK_KEY in checkpoint:
            self.load_state_dict(checkpoint[_STOCK_KEY])  # type: ignore[attr-defined]


class CallbackMixin:
    """`FusedCallback` before Lightning's Callback."""

    def __init__(
        self,
        example_inputs: Any = None,
        *,
        submodule: str = "",
        exclude: Iterable[type | str] = (),
        memory: str = "store",
        dropout: str = "torch",
        averages: bool = False,
        log: bool = True,
    ) -> None:
        super().__init__()
        self.example_inputs, self.submodule = example_inputs, submodule
        self.exclude, self.memory, self.dropout = tuple(exclude), memory, dropout
        # Not `log`: Lightning gives every callback a method of this name.
        self.averages, self._logs = averages, log
        self.report: ConversionReport | None = None
        self._converted: torch.nn.Module | None = None
        self._swapped = ExitStack()
        self._steps = 0

    # --- conversion ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Converts before the strategy wraps the model and before `configure_optimizers`."""
        if stage == "fit" and not _builds_later(pl_module):
            self._convert(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if _builds_later(pl_module):
            self._convert(pl_module)
        if self.averages and not any(_averaging(trainer)):
            raise ValueError("averages=True needs an optimizer of fusedtrain.optim with ema_decay")

    def _convert(self, pl_module: Any) -> None:
        model = pl_module.get_submodule(self.submodule)
        if any(map(is_changed, model.modules())):
            return  # the user converted it: what to revert is not known here
        self.report = convert(
            model, self.example_inputs, exclude=self.exclude, memory=self.memory,
            dropout=self.dropout,
        )  # fmt: skip
        self._converted = model

    def _leave(self) -> None:
        self._swapped.close()
        model, self._converted = self._converted, None
        if model is not None:
            revert(model)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave()

    # --- averages ---

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.averages:
            for optimizer in _averaging(trainer):
                self._swapped.enter_context(optimizer.swap_averages())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._swapped.close()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint within validation holds the weights, too, or resumed runs had averages."""
        weights: dict[int, torch.Tensor] = {}
        for optimizer in _averaging(trainer):
            weights.update(optimizer._swapped)
        for name, p in pl_module.named_parameters(remove_duplicate=False):
            if id(p) in weights and name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = weights[id(p)]

    # --- what is logged ---

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs tensors of the device: the host waits for none, but where Lightning writes logs."""
        if not self._logs or trainer.global_step == self._steps:
            return  # this batch's gradients are accumulated
        several = len(trainer.optimizers) > 1
        for number, optimizer in enumerate(map(raw, trainer.optimizers)):
            if isinstance(optimizer, FusedOptimizer):
                end = f"/{number}" if several else ""
                pl_module.log(f"skipped_steps{end}", optimizer.skipped_steps.float())
                norm = optimizer.grad_norm
                if norm is not None:
                    pl_module.log(f"grad_norm{end}", norm)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            # `get_scale` would wait for the device.
            pl_module.log("loss_scale", scaler.scale(torch.ones((), device=pl_module.device)))


def _builds_later(pl_module: Any) -> bool:
    """Whether hooks of the module, which run after those of callbacks, may make layers."""
    stock = [cls for cls in type(pl_module).__mro__ if cls.__name__ == "LightningModule"][-1]
    return any(
        getattr(type(pl_module), hook) is not getattr(stock, hook)
        for hook in ("setup", "configure_model")
    )


def _averaging(trainer: Any) -> list[FusedOptimizer]:
    optimizers = map(raw, trainer.optimizers)
    return [o for o in optimizers if isinstance(o, FusedOptimizer) and o.ema_decay is not None]
