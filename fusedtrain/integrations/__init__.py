"""Registers optimizers and layers with other libraries."""

from . import timm

__all__ = ["timm"]
