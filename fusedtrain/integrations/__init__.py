"""Registers optimizers with timm; for Lightning, and for Accelerate and transformers' Trainer.

The modules `lightning`, `pytorch_lightning` and `accelerate` import their libraries: import each by
its whole name.
"""

from . import timm

__all__ = ["timm"]
