"""The scope of a forward that follows a memory plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .._torch_private import without_torch_function
from .plan import MemoryPlan, op_name
from .recipes import Observer, Saved, Scope, Use
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
        return self._knows(op_name(function)) and self._steps[self._next].recompute

    def _knows(self, name: str) -> bool:
        """Whether the plan's next step is of this function. In eval mode a dropout gives its input,
        and has no step."""
        steps = self._steps
        while self._next < len(steps) and steps[self._next].op == "dropout" != name:
            self._next += 1
        return self._next < len(steps) and steps[self._next].op == name

    def tag(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        constants: tuple[Any, ...] = (),
        dropped: Sequence[Tensor | None] = (),
    ) -> None:
        if not self._knows(op_name(function)):
            self._depart(function)
            return
        chosen = self._steps[self._next].recompute
        self._next += 1
        if chosen:
            with without_torch_function():
                super().tag(output, function, tensors, constants)

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
