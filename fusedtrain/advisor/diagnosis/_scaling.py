"""Loss scales: which gradients are multiplied by one, and who steps an optimizer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import CLIP_GRADS
from .._views import Site, gradients_of, user_site
from ._facts import Event
from ._patches import Patches


class Scaling:
    """Calls `clipped(site, what, gradients)` if gradients are clipped while a loss scale multiplies
    them. `optimizers()` returns the known optimizers."""

    def __init__(
        self,
        optimizers: Callable[[], list[torch.optim.Optimizer]],
        clipped: Callable[[Site | None, str, list[Tensor]], None],
    ) -> None:
        self._optimizers, self._clipped = optimizers, clipped
        self._scales = 0  # losses that were scaled
        self._stepped = 0  # of these before the last step of a scaler
        self._seen: dict[int, int] = {}  # of these before an optimizer's last step without scaler
        self._unscaled: set[int] = set()  # optimizers, since the last step of a scaler
        self._by_scaler: set[int] = set()  # optimizers
        self._direct: Counter[tuple[int, Site | None]] = Counter()  # steps beside a scaler's
        self._inside = 0  # of a scaler's step
        self.by_apex = False  # amp.initialize scaled losses at a step

    def watch(self, patches: Patches) -> None:
        patches.after(torch.amp.GradScaler, "unscale_", self._unscale)
        for scaler in {torch.amp.GradScaler, *_subclasses(torch.amp.GradScaler)}:
            if "step" in vars(scaler):
                patches.wrap(scaler, "step", self._step)

    def watch_clipping(self, patches: Patches) -> None:
        patches.wrap(torch.nn.utils.clip_grad, CLIP_GRADS, self._clip)
        patches.wrap(torch.nn.utils, "clip_grads_with_norm_", self._clip)

    def scale(self) -> None:
        """A loss was scaled."""
        if self._stepped == self._scales:
            self._unscaled.clear()
        self._scales += 1

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps, whoever calls it."""
        self.by_apex = self.by_apex or _apex_scales()
        key = id(optimizer)
        if not self._inside and self._scales > self._seen.get(key, 0):
            self._seen[key] = self._scales
            if key in self._by_scaler or key not in self._unscaled:
                self._direct[key, user_site()] += 1

    def direct_steps(self, steps: int) -> list[Event]:
        """Steps without the scaler, of optimizers that it also steps; of all if it steps none."""
        return [
            Event(site, "scaler" if self._by_scaler else "", count / max(steps, 1))
            for (key, site), count in self._direct.items()
            if key in self._by_scaler or not self._by_scaler
        ]

    def clamped(self, tensors: list[Tensor]) -> None:
        """Tensors were clamped in place: `clip_grad_value_`, or by hand."""
        self._look(tensors, "clamped")

    def _look(self, gradients: list[Tensor], what: str) -> None:
        if self._inside or self._stepped == self._scales:
            return
        waiting = (o for o in self._optimizers() if id(o) not in self._unscaled)
        scaled = {gradient.data_ptr() for o in waiting for gradient in gradients_of(o)}
        clipped = [t for t in gradients if t.data_ptr() in scaled]
        if clipped:
            self._clipped(user_site(), what, clipped)

    def _clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._look([p.grad for p in parameters if p.grad is not None], "clip_grad_norm_")
            return original(parameters, *args, **kwargs)

        return clip

    def _unscale(self, scaler: Any, optimizer: Any) -> None:
        self._unscaled.add(id(optimizer))

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._inside -= 1
                if scaler.is_enabled():
                    self._by_scaler.add(id(optimizer))
                    self._stepped = self._scales

        return step


def _apex_scales() -> bool:
    """Whether `amp.initialize`, ours or Apex's, has made loss scales."""
    names = ("fusedtrain.apex.amp._state", "apex.amp._amp_state")
    states = (getattr(sys.modules.get(name), "_amp_state", None) for name in names)
    made = (s for s in states if getattr(s, "initialized", True))  # Apex has no such flag
    return any(getattr(state, "loss_scalers", ()) for state in made)


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    subclass: type[Any]
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
