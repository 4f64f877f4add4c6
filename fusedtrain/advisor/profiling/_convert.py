"""Converts the models of a script that knows nothing of it, at the first step of each optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from ..._graph.hooks import Observation
from ...conversion import convert
from .._views import OutermostCalls, parameters_of, without_parts


class Conversion:
    """Watches which modules are called from outside of all modules: the roots.

    At the first step of each optimizer the roots that have parameters of this optimizer are
    converted by ``fusedtrain.convert``, on the last batch that they were called with, so that
    `convert` compares them with the stock model. Optimizer, loader and precision stay as they are.
    """

    def __init__(self) -> None:
        self.report: list[str] = []
        self._outermost = OutermostCalls()
        self._calls: dict[nn.Module, tuple[Any, Any]] = {}
        self._observation: Observation | None = None
        self._optimizers: list[Optimizer] = []
        self._converted: set[nn.Module] = set()

    def begin(self) -> None:
        self._observation = Observation(self._enter, self._leave)

    def end(self) -> None:
        """Stops watching."""
        self._unhook()
        self._calls.clear()
        self._optimizers.clear()
        self._converted.clear()
        if not self.report:
            self.report.append("no module with the optimizer's parameters was called")

    def _unhook(self) -> None:
        if self._observation is not None:
            self._observation.remove()

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._outermost.enter(module)

    def _leave(self, module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        if self._outermost.leave(module):
            self._calls[module] = (arguments, named)

    def apply(self, optimizer: Optimizer) -> None:
        """Converts what an optimizer trains, once."""
        if any(optimizer is other for other in self._optimizers):
            return
        self._optimizers.append(optimizer)
        self._unhook()  # `convert` calls the modules
        trained = set(map(id, parameters_of(optimizer)))
        for module in without_parts(self._calls):
            if module in self._converted or trained.isdisjoint(map(id, module.parameters())):
                continue
            self._converted.add(module)
            self._convert(module, *self._calls[module])
        self.begin()

    def _convert(self, module: nn.Module, arguments: Any, named: Any) -> None:
        name = type(module).__name__
        # `convert` takes arguments in their order, or by name, not both.
        example: Any = named if named and not arguments else arguments
        try:
            report = convert(module, example if not (named and arguments) else None)
        except Exception as error:
            self.report.append(f"{name} was not converted: {type(error).__name__}: {error}")
        else:
            counted = f"{len(report.norms)} norms, {len(report.converted)} activations"
            self.report.append(f"{name}: {counted} converted")
