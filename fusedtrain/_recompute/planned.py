"""The scope of a forward that follows a memory plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._torch_private import without_torch_function
from .plan import MemoryPlan, op_name
from .recipes import Observer, Saved, Scope, Use, lasting
from .torch_calls import TorchCall

# Recipes in a row: a chain is computed by recursion, three Python frames a recipe of 1000.
LONGEST_PLANNED = 100


class Planned(Scope):
    """Follows the plan's steps in the order of the forward.

    Whatever this forward does, its gradients are right: a recipe is exact whoever asks for it. A
    call that the plan does not know only ends the plan for this forward: everything is kept then.
    """

    longest = LONGEST_PLANNED
    sees_torch = True

    def __init__(self, plan: MemoryPlan, observer: Observer | None = None) -> None:
        super().__init__(observer)
        self._steps = plan.steps
        self._next = 0

    def wants(self, function: Callable[..., Any]) -> bool:
        """Whether the output of the call that is about to run is to be recomputed."""
        place = self._place(op_name(function))
        return place >= 0 and self._steps[place].recompute

    def _place(self, name: str) -> int:
        """The number of the plan's next step, if it is of this function, else -1. In eval mode a
        dropout returns its input, and has no step."""
        steps, place = self._steps, self._next
        while place < len(steps) and steps[place].op == "dropout" != name:
            place += 1
        return place if place < len(steps) and steps[place].op == name else -1

    def tag(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        constants: tuple[Any, ...] = (),
        dropped: Sequence[Tensor | None] = (),
    ) -> None:
        place = self._place(op_name(function))
        if place < 0:
            self._depart(function)
            return
        self._next = place + 1
        if not self._steps[place].recompute:
            return
        with without_torch_function():
            kept = lasting(tensors, output, self._plain) if type(function) is TorchCall else tensors
            if kept is not None:
                super().tag(output, function, kept, constants)

    def pack(self, tensor: Tensor) -> Saved | Use:
        # TorchCalls would be handed each attribute that this asks for, in 7 us.
        with without_torch_function():
            return super().pack(tensor)

    def _depart(self, function: Callable[..., Any]) -> None:
        if self._steps:
            expected = self._steps[self._next].op if self._next < len(self._steps) else "its end"
            warnings.warn(
                f"the memory plan expects {expected} as step {self._next} of the forward, which "
                f"calls {op_name(function)}: the rest of this forward keeps its outputs. Plan once "
                "more with fusedtrain.plan_memory for a forward like this one",
                stacklevel=4 if isinstance(function, TorchCall) else 3,
            )
            self._steps = []
