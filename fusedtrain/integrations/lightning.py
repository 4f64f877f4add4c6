"""Lightning's Trainer: a precision plugin and a callback, for the package ``lightning``."""

from __future__ import annotations

from ._lightning import CallbackMixin, PrecisionMixin, missing

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.precision import MixedPrecision
except ImportError as error:
    raise missing(error, "lightning") from error

__all__ = ["FusedCallback", "FusedMixedPrecision"]


class FusedMixedPrecision(PrecisionMixin, MixedPrecision):
    """Mixed precision that clips within the update: ``Trainer(plugins=FusedMixedPrecision(...))``.

    Lightning's own plugin refuses ``gradient_clip_val`` for optimizers that unscale gradients in
    their step. This one hands it to the optimizers of `fusedtrain.optim` as `max_grad_norm` of that
    one step; of two limits the smaller counts. Clipping by value unscales and clips before the
    update. Other optimizers get Lightning's code. Checkpoints are those of Lightning's plugin, in
    both directions.

    Args:
        precision: "16-mixed" or "bf16-mixed".
        device: device type of autocast; None: "cuda" where there is one, else "cpu".
        scaler: None: :class:`fusedtrain.amp.GradScaler` with its defaults, for "16-mixed".

    Raises:
        ValueError: another precision; at the step, clipping by norm together with ``agc``.

    Example: examples/integrations/lightning_amp.py.
    """


class FusedCallback(CallbackMixin, Callback):
    """Converts the model for `fit`, reverts it at the end, and logs what the steps did.

    The conversion runs in the callback's `setup`, before the strategy wraps the model and before
    `configure_optimizers`; of a module that overrides `setup` or `configure_model`, and so may make
    its layers there, in `on_fit_start`. An exception in `fit` reverts it, too. A model that was
    converted before stays as it is.

    After each step it logs ``skipped_steps``, ``grad_norm`` (if the step measured the norm) and
    ``loss_scale`` (with a scaler); with several optimizers the first two end in ``/0``, ``/1``.

    Args:
        example_inputs: see :func:`fusedtrain.convert`.
        submodule: name of the part to convert, as in `get_submodule`; "": all.
        exclude: see :func:`fusedtrain.convert`.
        memory: see :func:`fusedtrain.convert`, as for `dropout`.
        dropout: "torch" or "fused".
        averages: validates on the averages of optimizers with ``ema_decay``.
        log: False logs nothing.

    Attributes:
        report: the :class:`fusedtrain.ConversionReport` of the last `fit`.

    Raises:
        ValueError: `averages`, and no optimizer has ``ema_decay``; and what `convert` raises.

    Example: examples/integrations/lightning_amp.py.
    """
