"""The gradients of one optimizer between a scaled backward pass and its step.

Apex unscaled gradients after each backward pass: one more pass over memory. For an optimizer of
fusedtrain gradients stay scaled, and the step's second sweep divides. Reading ``.grad`` before the
step, to clip or to log, unscales all gradients (`LazyParameter`). Other optimizers' gradients are
unscaled at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import is_view
from ._gradient_state import GradientState
from ._raw import NotedGradients, raw_grad, set_raw_grad

_MOST_TRIES = 300  # halvings from the largest float32 to the smallest are 277


class ScaledGradients(GradientState):
    """The stash that `initialize` adds to an optimizer.

    A backward pass runs between `prepare` and `finish` (or `delay`, `abort`). Any number of passes
    may come before a step.
    """

    # --- around a backward pass

    def prepare(self, scale: Tensor) -> None:
        """Stashes unscaled gradients before a backward pass of a loss times `scale`."""
        if self.retired:
            raise RuntimeError(
                f"the parameters of this {type(self.optimizer).__name__} have been given to "
                "another optimizer by a later amp.initialize"
            )
        if self.running:
            raise RuntimeError(
                f"amp.scale_loss within another of the same {type(self.optimizer).__name__}: its "
                "gradients would have two scales"
            )
        self.masters.check_devices()
        self.masters.begin()
        if self.scaled_by is not None and not self.checked:
            self._rescale(scale)
            self.running = True
            return
        if self.scaled_by is not None:
            self._refuse_foreign()
        self.unscale()
        self.running = True
        # Gradients may be views of DistributedDataParallel's buckets, which backward writes to
        # whatever .grad is.
        self._places = [raw_grad(p) for p in self.plain_params]
        self._before = [g.clone() if g is not None and is_view(g) else g for g in self._places]
        self._zeros_before = []
        for i, p in enumerate(self.plain_params) if self._zeros else ():
            grad = self._before[i]
            if grad is not None and self._zeros.has(p, grad, unchanged=True):
                self._before[i] = None  # nothing to add
                self._zeros_before.append((p, grad))
        self._drop([*self.plain_params, *self.masters.params])

    def abort(self) -> None:
        """Drops the gradients of a backward pass that raised."""
        self.running = False
        if self._before is not None and self.scaled_by is None:
            self._drop([*self.plain_params, *self.masters.params])
            for p, old, place in zip(self.plain_params, self._before, self._places, strict=True):
                if old is not None and place is not None:
                    if place is not old:  # memory that the pass may have written to
                        place.copy_(old)
                    set_raw_grad(p, place)
            self._restore_zeros()
            self._before = None

    def delay(self, scale: Tensor) -> None:
        """Ends a backward pass whose gradients stay scaled."""
        self.scaled_by, self.checked, self.stepped = scale, False, False
        self.running = False
        self._note_left()

    def finish(self, scale: Tensor, check: bool) -> Tensor | None:
        """Ends a backward pass. Returns not 0 if it left infs or NaNs; None without `check`.

        Raises:
            RuntimeError: for sparse gradients.
        """
        raw = self._raw()
        self._refuse_sparse(raw)
        self._restore_zeros()
        before = self._before or []
        self._before, self.stepped, self.running = None, False, False
        if self._may_stay_scaled(before, raw):
            self._scaled_by, self.checked = scale, True  # without `_watch`: `_measure` reads first
            try:
                overflow = self.optimizer._measure(scale) if check else None
            finally:
                self._watch(True)
            self._note_left()
            return overflow
        self.scaled_by = None
        self._note_left()
        new = [raw_grad(p) for p in self.plain_params]
        overflow = self._unscale(scale)
        for p, old, place, g in zip(self.plain_params, before, self._places, new):
            if old is None or place is None:
                continue
            if g is not None and is_view(g):  # stays a view of its bucket
                g.add_(old)
                continue
            if place is not old:  # the script's own memory, or an unused part of a bucket
                place.copy_(old)
            if g is not None:
                place.add_(g)
            set_raw_grad(p, place)
        self._places = []
        return overflow if check else None

    def _may_stay_scaled(self, before: list[Tensor | None], raw: list[Tensor]) -> bool:
        if not self.lazy or any(g is not None for g in before) or self.masters.have_grads():
            return False
        # After its first backward pass DistributedDataParallel makes other buckets, once.
        return not (self.unborn and any(map(is_view, raw)))

    # --- the step

    def step(self, original: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Makes the optimizer's step, or skips it after infs and NaNs.

        Raises:
            RuntimeError: for an unsupported closure, and for gradients that are still scaled.
        """
        if self.running:
            raise RuntimeError(
                "optimizer.step() within amp.scale_loss, where the gradients are still scaled: "
                "call step() after the with statement"
            )
        self.unborn = False
        if closure is not None:
            return self._step_with_closure(original, closure)
        if self.scaled_by is not None and not self.checked and not self.stepped:
            raise RuntimeError(
                "the gradients are still scaled: the last backward pass before optimizer.step() "
                "must be under amp.scale_loss without delay_unscale"
            )
        if self.scaled_by is not None:
            self._refuse_foreign()
        found_inf, self.found_inf = self.found_inf, None
        try:
            if self.lazy:
                return self._step_in_two_sweeps(original, found_inf)
            if _overflowed(found_inf):
                return None
            self.masters.follow_parameters()
            result = original()
            self.masters.write_parameters()
            return result
        finally:
            self.stepped = True
            if not self.accumulates:
                self._drop(self.masters.masters)

    def _step_with_closure(self, original: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        if self.with_masters or (not self.lazy and _overflowed(self.found_inf)):
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
        if self.lazy:  # a fused optimizer calls a closure once, before anything else
            with torch.enable_grad():
                loss = closure()
            self.step(original, None)
            return loss

        def close() -> Any:
            for _ in range(_MOST_TRIES):
                self.found_inf = None
                loss = closure()
                if not _overflowed(self.found_inf):
                    return loss
            raise RuntimeError("the closure's gradients are not finite at any loss scale")

        try:
            return original(close)
        finally:
            self.stepped, self.found_inf = True, None

    def _step_in_two_sweeps(self, original: Callable[..., Any], found_inf: Tensor | None) -> Any:
        optimizer = self.optimizer
        if self.stepped:
            self.unscale()  # for a second step without a backward pass between
        attributes: dict[str, Any] = {}  # none that a GradScaler sets itself
        if self.scaled_by is not None:
            attributes = {
                "grad_scale": self.scaled_by,
                "_checks_gradients": found_inf is not None,
                # With masters, reading unscales only the masters' gradients, and a step drops them.
                "_unscaled_by_reading": not self.with_masters,
            }
        if found_inf is not None:
            attributes["found_inf"] = found_inf
        vars(optimizer).update(attributes)
        try:
            result = original()
            if optimizer._writeback() != "none":
                self.scaled_by = None
            return result
        finally:
            for name in attributes:
                vars(optimizer).pop(name, None)

    @contextmanager
    def zeroing(self) -> Iterator[None]:
        """Around ``zero_grad`` of the optimizer."""
        self._drop([*self.masters.params, *self.masters.masters])
        self.scaled_by = None  # zeroed gradients need no unscaling
        if self.lazy:
            self.optimizer._ahead = None  # it refers to the gradients
        if self.accumulates:
            self.found_inf = None  # FP16_Optimizer forgets earlier passes; amp, like Apex, does not
        if self._before is not None:
            self._before = [None] * len(self._before)
        yield
        self._zeros = NotedGradients(*self._with_grads(self.plain_params))


def _overflowed(found_inf: Tensor | None) -> bool:
    return found_inf is not None and bool(found_inf.item() != 0)
