"""Lightning's Trainer: a precision plugin and a callback, for the package ``pytorch_lightning``."""

from __future__ import annotations

from ._lightning import CallbackMixin, PrecisionMixin, missing

try:
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.plugins.precision import MixedPrecision
except ImportError as error:
    raise missing(error, "pytorch_lightning") from error

__all__ = ["FusedCallback", "FusedMixedPrecision"]


class FusedMixedPrecision(PrecisionMixin, MixedPrecision):
    """As `fusedtrain.integrations.lightning.FusedMixedPrecision`."""


class FusedCallback(CallbackMixin, Callback):
    """As `fusedtrain.integrations.lightning.FusedCallback`."""
