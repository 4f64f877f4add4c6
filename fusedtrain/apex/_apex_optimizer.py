"""The base of Apex's optimizers, and a helper of optimizers around others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..optim import FusedOptimizer


def attribute_of(inner: str, name: str, doc: str) -> Any:
    """A property that reads and writes an attribute of the optimizer under the name `inner`."""

    def write(optimizer: Any, value: Any) -> None:
        setattr(getattr(optimizer, inner), name, value)

    return property(lambda optimizer: getattr(getattr(optimizer, inner), name), write, doc=doc)


class ApexOptimizer(FusedOptimizer):
    """The attributes and defaults that Apex's optimizers share."""

    set_grad_none: bool
    _attributes: ClassVar[tuple[str, ...]]  # names of the options of the whole optimizer
    _counts: ClassVar[bool] = False  # whether Apex's groups have a step count

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Makes gradients None, or 0. ``set_grad_none`` is the default of `set_to_none`."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _set_options(self, options: Mapping[str, Any]) -> None:
        # As in Apex: after a step under a loss scale gradients are unscaled.
        super()._set_options({"gradient_writeback": "unscaled", **options})

    def _group_step(self, group: dict[str, Any], count: float) -> Any:
        return int(count) if self._counts else None

    def _start(self, arguments: dict[str, Any]) -> None:
        if arguments.get("amsgrad"):
            raise RuntimeError(f"{type(self).__name__} does not support the AMSGrad variant.")
        for name in self._attributes:
            value = arguments[name]
            setattr(self, name, int(bool(value)) if name.endswith("_mode") else value)
        super()._start(arguments)

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: getattr(self, name) for name in self._attributes}
        return {**super().__getstate__(), **attributes}
