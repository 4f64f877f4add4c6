"""A loss scale that follows Apex's rule on the device; the host does not read it."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 2000  # backward passes in a row without overflow, after which the scale doubles
INITIAL = 2.0**16
_LEAST = 2.0**-126


class LossScaler:
    """Static, or dynamic: halved after an overflow, doubled after `WINDOW` passes without one.

    Args:
        loss_scale: a number, or "dynamic".
        min_loss_scale, max_loss_scale: bounds of a dynamic scale; None: no lower bound.

    Raises:
        ValueError: for bounds that contradict each other.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = INITIAL,
        scale_factor: float = 2.0,
        scale_window: int = WINDOW,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        # By default the lower bound is the smallest scale whose inverse is finite.
        low = _LEAST if min_loss_scale is None else float(min_loss_scale)
        if self.dynamic and not 0 < low <= max_loss_scale:
            raise ValueError(
                "expected 0 < min_loss_scale <= max_loss_scale, got "
                f"min_loss_scale={min_loss_scale}, max_loss_scale={max_loss_scale}"
            )
        self._bounds = (low, float(max_loss_scale))
        self._factor = float(scale_factor)
        self._window = int(scale_window)
        start = min(max(init_scale, low), max_loss_scale) if self.dynamic else float(loss_scale)
        self._start = (start, 0)  # scale and passes without overflow, until there is a device
        self._scale: Tensor | None = None
        self._tracker: Tensor | None = None
        self._hysteresis: Tensor | None = None

    def scale_on(self, device: torch.device) -> Tensor:
        """The scale: a 0-dim float32 tensor, which `update` replaces, not writes to."""
        if self._scale is None or self._scale.device != device:
            scale, passes = self._start if self._scale is None else self._read()
            self._scale = torch.full((), scale, dtype=torch.float32, device=device)
            self._tracker = torch.full((), passes, dtype=torch.int32, device=device)
            self._hysteresis = torch.ones((), dtype=torch.int32, device=device)
        return self._scale

    def update(self, found_inf: Tensor) -> None:
        """Halves or doubles the scale after a backward pass.

        Args:
            found_inf: 0-dim float32, 0 if all gradients were finite.
        """
        if not self.dynamic:
            self._start = (self._start[0], self._start[1] + 1)
            return
        self._scale = self.scale_on(found_inf.device).clone()
        torch.ops.fusedtrain.update_scale(
            self._scale, self._tracker, self._hysteresis, found_inf, self._factor,
            1 / self._factor, self._window, 1, *self._bounds,
        )  # fmt: skip

    def _read(self) -> tuple[float, int]:
        if self._scale is None or self._tracker is None or not self.dynamic:
            return self._start
        return float(self._scale.item()), int(self._tracker.item())

    def loss_scale(self) -> float:
        """The scale, as a number; waits for the device."""
        return self._read()[0]

    @property
    def _loss_scale(self) -> float:
        return self._read()[0]

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self._restart(float(value), self._read()[1])

    @property
    def _unskipped(self) -> int:
        return self._read()[1]

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self._restart(self._read()[0], int(value))

    def _restart(self, scale: float, passes: int) -> None:
        self._start = (scale, passes)
        self._scale = None
