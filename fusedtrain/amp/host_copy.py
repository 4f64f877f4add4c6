"""Numbers of the device that the host reads once they have arrived."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor on the host, which nothing waits for."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._event = tensor.to("cpu", non_blocking=True), None
        if self._copy is not tensor:
            self._event = torch.Event(tensor.device)
            self._event.record(torch.accelerator.current_stream(tensor.device))

    def numbers(self) -> Any:
        """The tensor as lists of numbers; None if it has not arrived."""
        return self._copy.tolist() if self._event is None or self._event.query() else None
