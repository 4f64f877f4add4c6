"""``Tensor.grad`` as it is stored, whatever a subclass makes of the attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

_grad = cast(Any, Tensor.grad)

raw_grad: Callable[[Tensor], Tensor | None] = _grad.__get__
set_raw_grad: Callable[[Tensor, Tensor | None], None] = _grad.__set__
