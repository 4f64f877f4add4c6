"""Messages about overflows, printed without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...amp.host_copy import HostCopy


class Notices:
    """Prints overflows once their copies to the host have arrived."""

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
