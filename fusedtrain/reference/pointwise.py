"""An activation as an argument of ops: its number, and the values of its parameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .activations import ACTIVATIONS, Activation

# In the order of csrc/formulas.h: an op gets the index, or -1 for no activation.
POINTWISE: tuple[Activation, ...] = tuple(r for r in ACTIVATIONS.values() if not r.tensors)
INDEX = {row.name: i for i, row in enumerate(POINTWISE)}
IDENTITY = -1
BY_OUTPUT = frozenset(i for i, row in enumerate(POINTWISE) if row.saves == "output")


class Pointwise(NamedTuple):
    """An activation with the values of its parameters, as an argument of ops."""

    op: int = IDENTITY
    a: float = 0.0
    b: float = 0.0

    @property
    def saves_output(self) -> bool:
        """Whether the derivative is computed from the output."""
        return self.op in BY_OUTPUT

    def forward(self, z: Tensor) -> Tensor:
        if self.op == IDENTITY:
            return z
        row = POINTWISE[self.op]
        return row.forward(z, *(self.a, self.b)[: len(row.parameters)])

    def backward(self, grad: Tensor, saved: Tensor) -> Tensor:
        if self.op == IDENTITY:
            return grad
        row = POINTWISE[self.op]
        result: Tensor = row.backward(grad, saved, *(self.a, self.b)[: len(row.parameters)])
        return result
