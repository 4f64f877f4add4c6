"""A loss scale by Apex's rule, over the package's GradScaler; the host does not read it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...amp import GradScaler
from ...amp.host_copy import HostCopy

_LEAST = 2.0**-126  # the smallest scale whose inverse is finite


class LossScaler(GradScaler):
    """Static, or dynamic: halved after an overflow, doubled after 2000 passes without one.

    Args:
        loss_scale: a number, or "dynamic".
        min_loss_scale, max_loss_scale: bounds of a dynamic scale; None: no lower bound.

    Raises:
        ValueError: for bounds that contradict each other.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        low = _LEAST if min_loss_scale is None else float(min_loss_scale)
        if self.dynamic and not 0 < low <= max_loss_scale:
            raise ValueError(
                "expected 0 < min_loss_scale <= max_loss_scale, got "
                f"min_loss_scale={min_loss_scale}, max_loss_scale={max_loss_scale}"
            )
        if not self.dynamic:
            init_scale, low, max_loss_scale = float(loss_scale), 0.0, float("inf")
        super().__init__(
            "cpu", init_scale, float(scale_factor), 1 / scale_factor, int(scale_window),
            min_scale=low, max_scale=float(max_loss_scale),
        )  # fmt: skip

    def scale_on(self, device: torch.device) -> Tensor:
        """The scale: a 0-dim float32 tensor, which `update_after` replaces, not writes to."""
        if self._scale is None or self._scale.device != device:
            self.restart(self.get_scale(), self._get_growth_tracker())
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return self._scale

    def update_after(self, overflow: Tensor) -> None:
        """Halves or doubles the scale after a backward pass.

        Args:
            overflow: 0-dim float32, 0 if all gradients were finite. A static scale ignores it.
        """
        self._scale = self.scale_on(overflow.device).clone()
        if not self.dynamic:
            self._check_scale_growth_tracker("update")[1].add_(1)
            return
        self._per_optimizer_states[0]["found_inf_per_device"] = {overflow.device: overflow}
        self.update()

    def restart(self, scale: float, unskipped: int) -> None:
        """Sets the scale, and the number of passes since it was last changed."""
        self._init_scale, self._init_growth_tracker = scale, unskipped
        self._scale = self._growth_tracker = self._hysteresis_tracker = None

    # The names of Apex, which scripts read and write.

    def loss_scale(self) -> float:
        """The scale, as a number; waits for the device."""
        return float(self.get_scale())

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        self.restart(float(value), self._unskipped)

    @property
    def _unskipped(self) -> int:
        return int(self._get_growth_tracker())

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        self.restart(self.loss_scale(), int(value))


class Notices:
    """Prints overflows once their copies to the host have arrived; nothing waits for them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[HostCopy, int]] = []

    def add(self, overflow: Tensor, scale: Tensor, loss_id: int) -> None:
        """Notes whether a backward pass overflowed, and the new scale."""
        self._waiting.append((HostCopy(torch.stack([overflow, scale])), loss_id))

    def tell(self) -> None:
        """Prints the overflows that have arrived."""
        while self._waiting:
            copy, loss_id = self._waiting[0]
            numbers = copy.numbers()
            if numbers is None:
                return
            del self._waiting[0]
            overflow, scale = numbers
            if overflow:
                print(
                    f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss "
                    f"scale to {scale}"
                )
