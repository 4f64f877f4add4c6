"""What the optimizers of NVIDIA's Apex have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..optim import FusedOptimizer


class ApexOptimizer(FusedOptimizer):
    """What Apex's optimizers have in common."""

    set_grad_none: bool
    _attributes: ClassVar[tuple[str, ...]]  # that are options of the whole optimizer
    _counts: ClassVar[bool] = False  # whether Apex's has a step count, by group

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Makes gradients None, or 0: as ``set_grad_none`` says where `set_to_none` is None."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def _set_options(self, options: Mapping[str, Any]) -> None:
        # As after a step of Apex's own under a loss scale, or after torch's scaler has unscaled.
        super()._set_options({"gradient_writeback": "unscaled", **options})

    def _group_step(self, group: dict[str, Any], count: float) -> Any:
        return int(count) if self._counts else None

    def _refuse_amsgrad(self, amsgrad: bool) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} does not support the AMSGrad variant.")

    def __getstate__(self) -> dict[str, Any]:
        names = ("set_grad_none", *self._attributes)
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}
