"""Activations: fusedtrain's call with its example parameters, and the gate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from ... import functional
from ..._text import size_text
from ...reference import ACTIVATIONS
from ._match import COMPILE, Contest, Entry, Options, call_of, duel, match_of
from .clock import Function
from .gate import CHAIN, FORWARD, GRADIENT, agrees, first_call

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


# --- the command `bench` ---

# One of each kind: native and composed in eager torch, saving the input and saving the output,
# with exp and without.
CHOSEN = (
    "mish",
    "silu",
    "gelu",
    "quick_gelu",
    "leaky_relu",
    "hardswish",
    "elu",
    "softplus",
    "relu_squared",
)
GATE = 2**16  # elements that the gate looks at


def entries(options: Options) -> Iterator[Entry]:
    """The rows of the family."""
    numel = options.elements(2**22, 2**26, 2**16)
    for op in CHOSEN[:2] if options.quick else CHOSEN:
        for part in tuple(TENSORS)[options.quick :]:
            make = partial(match_of, part, contest, options, op, numel)
            yield Entry("activations", op, part, size_text(numel), make)


def contest(options: Options, op: str, numel: int) -> Contest:
    """The activation on so many elements."""
    x, gradient = options.random(numel), options.random(numel, seed=1)

    def gate(who: str, function: Function) -> None:
        few = None if who == COMPILE else GATE  # it compiles for one size
        check(op, who, function, x[:few], gradient[:few])

    call = partial(call_of, tensors=[x], gradient=gradient)
    functions = duel(options, ours(op), ACTIVATIONS[op].eager)
    return Contest(functions, gate, call, lambda part: TENSORS[part] * x.nbytes, x)
