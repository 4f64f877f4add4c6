"""Activations: fusedtrain's call with its example parameters, and the gate."""

from __future__ import annotations

from torch import Tensor

from .. import functional
from ..reference import ACTIVATIONS
from ..timing import CHAIN, FORWARD, GRADIENT, Function, agrees, first_call

# Tensors that the cheapest exact scheme reads and writes. Backward reads the gradient and the one
# saved tensor and writes the gradient of the input.
TENSORS = {"forward": 2, "forward+backward": 5}


def ours(name: str) -> Function:
    """The activation with its example parameters."""
    if name == "gelu_tanh":
        return lambda x: functional.gelu(x, approximate="tanh")
    function, row = getattr(functional, name), ACTIVATIONS[name]
    return lambda x: function(x, *row.arguments_for(x))


def check(op: str, who: str, function: Function, x: Tensor, gradient: Tensor) -> None:
    """Raise NotTheJob unless forward and gradient match eager torch in float64.

    Eager torch itself may be several operators, each of which rounds.
    """
    exact = first_call(ACTIVATIONS[op].eager, [x.double()], gradient.double())
    results = first_call(function, [x], gradient)
    tolerances = (FORWARD, GRADIENT) if who == "fusedtrain" else (CHAIN, CHAIN)
    for what, actual, expected, allowed in zip(("forward", "gradient"), results, exact, tolerances):
        agrees(what, actual, expected, allowed[x.dtype])
