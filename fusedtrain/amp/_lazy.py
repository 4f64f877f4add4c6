"""Parameters whose gradients are unscaled when somebody looks at them."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._raw import raw_grad, set_raw_grad

if TYPE_CHECKING:
    from ._gradients import ScaledGradients

_ZEROING = inspect.unwrap(torch.nn.Module.zero_grad).__code__


def _drops(frame: Any) -> bool:
    """Whether it is Module.zero_grad, asking what there is to drop: no reason to unscale it."""
    return frame.f_code is _ZEROING and bool(frame.f_locals.get("set_to_none", False))


class LazyParameter(torch.nn.Parameter):
    """A parameter whose gradient is unscaled when somebody looks at it.

    Each optimizer has a subclass of its own, which its parameters are of while their gradients are
    scaled: reading any attribute of a subclass takes torch three times as long. What is pickled is
    a plain parameter.
    """

    _gradients: ScaledGradients

    @property
    def grad(self) -> Tensor | None:
        """As of every tensor."""
        gradients = self._gradients
        scaled = gradients.scaled_by is not None and not gradients.running
        if scaled and not _drops(sys._getframe(1)):
            gradients.unscale()
        return raw_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        gradients = self._gradients
        if value is not None and gradients.scaled_by is not None and not gradients.running:
            gradients.unscale()
        set_raw_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_raw_grad(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A parameter of no optimizer, as that of a copied model is."""
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(data, self.requires_grad)
        copied: torch.nn.Parameter = memo[id(self)]
        return copied
