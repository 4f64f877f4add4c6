"""Gradients that are clipped while they are multiplied by the loss scale: a warning, once."""

from __future__ import annotations

import math
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from .._capture import is_capturing
from .._graph.warning import level_outside
from ..optim import FusedOptimizer
from .host_copy import HostCopy

_STEPS, _WINDOWS = 4, 8  # consecutive steps that are judged, and how often at most
_ALIKE, _DIFFERENT = 1e-5, 1e-3
_LEAST_SCALE, _MOST_LIMIT = 1024.0, 100.0


class ScaledClipping:
    """Follows the first steps of one optimizer.

    Step by step the norm of all scaled gradients is the same, to rounding, while the first
    parameter's share of it varies: that is what clipping leaves. A small round number at a large
    scale, as 0.5 at 65536, is no limit that somebody has multiplied by the scale.
    """

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._rows: list[tuple[Tensor, Tensor]] = []  # squares by gradient, scale
        self._copy: HostCopy | None = None
        self._windows = _WINDOWS

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def look(self, optimizer: FusedOptimizer, scale: Tensor) -> None:
        """Records a step that has unscaled the gradients itself; the caller has just made it."""
        if not self._windows or torch.compiler.is_compiling() or is_capturing():
            return
        self._optimizer = self._optimizer or weakref.ref(optimizer)
        if self._copy is None and self._optimizer() is optimizer:
            squares = optimizer._squares()
            if squares is not None and len(squares):
                self._rows.append((squares.clone(), scale.clone()))
            if len(self._rows) == _STEPS:
                numbers = [n for s, scale in self._rows for n in (s.sum(), s[0], scale.to(s))]
                kept = torch.stack([number.reshape(()) for number in numbers])
                self._copy, self._rows = HostCopy(kept.view(_STEPS, 3)), []
        if self._copy is not None and (rows := self._copy.numbers()) is not None:
            self._copy = None
            self._windows -= 1
            self._judge(*zip(*rows, strict=True))

    def _judge(self, squares: Any, firsts: Any, scales: Any) -> None:
        norms = [math.sqrt(one) * scale for one, scale in zip(squares, scales, strict=True)]
        limit, scale = norms[-1], scales[-1]
        if not all(map(math.isfinite, norms)) or not all(norms):
            return  # these steps say nothing
        shares = [math.sqrt(first / one) for first, one in zip(firsts, squares, strict=True)]
        if _alike(shares, _DIFFERENT):
            return
        self._windows = 0
        is_small = min(scales) >= _LEAST_SCALE and limit <= _MOST_LIMIT
        if is_small and _alike([*norms, float(f"{limit:.1e}")], _ALIKE):
            warnings.warn(
                f"GradScaler: the gradients were clipped to a norm of {limit:.3g} while they were "
                f"multiplied by the loss scale, {scale:g}, so that {limit / scale:.2g} is left of "
                "it: call scaler.unscale_(optimizer) before clip_grad_norm_, or let the optimizer "
                f"clip: max_grad_norm={limit:.3g}",
                stacklevel=level_outside(),
            )


def _alike(values: Any, tolerance: float) -> bool:
    return bool(max(values) - min(values) <= tolerance * max(values))
