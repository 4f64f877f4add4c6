"""Messages about overflows, printed without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Notices:
    """Prints overflows once their copies to the host have arrived."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Tensor, int]] = []

    def add(self, overflow: Tensor, scale: Tensor, loss_id: int) -> None:
        """Notes whether a backward pass overflowed, and the new scale."""
        both = torch.stack([overflow, scale])
        copy, event = both.to("cpu", non_blocking=True), None
        if copy is not both:
            event = torch.Event(both.device)
            event.record(torch.accelerator.current_stream(both.device))
        self._waiting.append((event, copy, loss_id))

    def tell(self) -> None:
        """Prints the overflows that have arrived."""
        while self._waiting:
            event, copy, loss_id = self._waiting[0]
            if event is not None and not event.query():
                return
            del self._waiting[0]
            overflow, scale = copy.tolist()
            if overflow:
                print(
                    f"Gradient overflow.  Skipping step, loss scaler {loss_id} reducing loss "
                    f"scale to {scale}"
                )
