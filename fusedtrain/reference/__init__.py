"""The plain-torch truth of every op: oracle of the tests, TorchScript fallback, last resort."""

from .activations import ACTIVATIONS, Activation
from .optimizer_rules import RULES, Rule

__all__ = ["ACTIVATIONS", "RULES", "Activation", "Rule"]
