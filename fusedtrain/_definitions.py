"""What the definitions of all ops share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def fallback(function: Callable[..., Any], warn: Callable[[torch.device], None]) -> Any:
    """A plain-torch formula as the kernel of last resort; `warn` is told of the device."""

    def run(first: Tensor, *rest: Any) -> Any:
        warn(first.device)
        return function(first, *rest)

    return run
