"""Messages about overflows, for which nobody waits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Notices:
    """Tells of overflows when the device has come to know of them: nothing waits for it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Tensor, int]] = []

    def add(self, overflow: Tensor, scale: Tensor, loss_id: int) -> None:
        """After a backward pass: whether it overflowed, and the scale from here on."""
        both = torch.stack([overflow, scale])
        told, event = both.to("cpu", non_blocking=True), None
        if told is not both:
            event = torch.Event(both.device)
            event.record(torch.accelerator.current_stream(both.device))
        self._waiting.append((event, told, loss_id))

    def tell(self) -> None:
        """Prints what is known by now."""
        while self._waiting:
            event, told, loss_id = self._waiting[0]
            if event is not None and not event.query():
                return
            del self._waiting[0]
            overflow, scale = told.tolist()
            if overflow:
                print(
                    f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss "
                    f"scale to {scale}"
                )
