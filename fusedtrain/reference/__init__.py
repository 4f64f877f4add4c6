"""The plain-torch truth of every op: oracle of the tests, TorchScript fallback, last resort."""

from .activations import ACTIVATIONS, Activation

__all__ = ["ACTIVATIONS", "Activation"]
