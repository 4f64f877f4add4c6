"""Where other libraries look for optimizers and layers."""

from . import timm

__all__ = ["timm"]
