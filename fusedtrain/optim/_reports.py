"""An optimizer's reports of its last step, and its averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from ..reference.optimizers import CONTROLS, Control
from ._distributed import local
from ._masters import MASTER, is_correction
from ._options import Options, of_itself
from ._plan import UpdatePlan


def _refuse_step() -> None:
    raise RuntimeError(
        "step within swap_averages(): the parameters hold their averages there, and get their "
        "values back at the end of the context. Leave the context first"
    )


class Reports(Options):
    """The part of `FusedOptimizer` that a user reads between steps."""

    _last: list[UpdatePlan]  # of the last step
    _measured: bool  # whether the last step measured the gradients
    # The parameters themselves, by id, while `swap_averages` has averages in their place.
    _swapped: Mapping[int, Tensor] = MappingProxyType({})

    def _follow_parameters(self) -> None:
        """Masters take what others have written to their parameters, before they are read."""
        for store in self._stores.values():
            for p in store.params:
                low, master = self._low_precision.get(id(p)), self.state.get(p, {}).get(MASTER)
                if low is not None:
                    store.versions.follow(low, local(low), local(p))
                elif is_correction(master):
                    store.versions.drop_stale(p, local(p), local(master))
                elif master is not None and id(p) not in self._swapped:
                    store.versions.follow_whole(p, local(p), local(master))

    def __repr__(self) -> str:
        options = sorted(getattr(self, "_fused_options", {}).items())
        lines = "".join(f"    {name}: {value}\n" for name, value in options)
        return f"{super().__repr__().removesuffix(')')}All groups\n{lines})"

    def _last_control(self) -> Control:
        """Views of the last step's control values, which the next step changes."""
        if self._last:
            return self._last[0].store.last_step
        for control in self._controls.values():
            return Control.of(control)
        return Control.of(torch.zeros(CONTROLS, dtype=torch.float32))

    @property
    def last_step_skipped(self) -> Tensor:
        """Whether the last step was skipped, for gradients that were not finite.

        A 0-dim bool tensor on the parameters' device; nothing waits for it.
        """
        return self._last_control().skipped != 0

    @property
    def skipped_steps(self) -> Tensor:
        """Number of skipped steps: a 0-dim int64 tensor on the device."""
        return self._last_control().skipped_steps.long()

    @property
    def applied_steps(self) -> Tensor:
        """Number of steps that were not skipped: a 0-dim int64 tensor on the device."""
        return self._last_control().applied_steps.long()

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients at the last step, unscaled and before clipping.

        A 0-dim float32 tensor on the device. None if the step did not measure the norm: without
        loss scaling, clipping or a rule that needs norms.
        """
        return self._last_control().grad_norm.clone() if self._measured else None

    def nonfinite_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter of the last step, and the number of its gradient's non-finite values.

        The counts are 0-dim float64 tensors on the device.

        Raises:
            RuntimeError: the last step did not look at the gradients (see `grad_norm`), or there
                was none.
        """
        if not self._measured:
            raise RuntimeError(
                "nonfinite_gradients: the last step did not look at the gradients, or there was no "
                "step. Steps look with max_grad_norm (float('inf') clips nothing), agc or "
                "fusedtrain.amp.GradScaler"
            )
        return [
            (p, count)
            for plan in self._last
            if plan.sums is not None
            for p, count in zip(plan.params, plan.sums[:, 0].unbind(), strict=True)
        ]

    def _squares(self) -> Tensor | None:
        """Sums of squares of unscaled gradients at the last step, one a parameter; None if they
        were not measured, or are on several devices."""
        sums = [plan.sums for plan in self._last if plan.sums is not None]
        return torch.cat(sums)[:, 1] if len({one.device for one in sums}) == 1 else None

    def _found_inf(self) -> dict[torch.device, Tensor]:
        """Flags by device for GradScaler.update: 1 if the last step was skipped."""
        skipped = [plan.store.last_step.skipped for plan in self._last[:1]]
        return {flag.device: flag.clone() for flag in skipped}

    # --- averages ---

    def averaged_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter, and its moving average by ``ema_decay``.

        Averages of 16-bit parameters are float32. Before the first step a parameter is its average.

        Raises:
            RuntimeError: ``ema_decay`` is None, and no parameter has an average of earlier steps.
        """
        averages = [(p, self.state.get(p, {}).get("ema")) for p in self._all_params()]
        if self.ema_decay is None and all(average is None for _, average in averages):
            raise RuntimeError(
                f"{type(self).__name__} has no averages: pass ema_decay=0.999 to it, or another "
                "decay. Averages start at the parameters of the next step"
            )
        return [(p, p if average is None else average) for p, average in averages]

    @of_itself
    @contextmanager
    def swap_averages(self) -> Iterator[None]:
        """Context in which the parameters hold their averages: evaluate, or save the model.

        A step within raises RuntimeError: it would update the averages, and be undone at the end.
        """
        pairs = [(p, average) for p, average in self.averaged_parameters() if average is not p]
        self._follow_parameters()
        every = [store.versions for store in self._stores.values()]
        known = [(p, versions) for p, _ in pairs for versions in every if versions.forget(p)]
        with torch.no_grad():
            kept = [p.detach().clone() for p, _ in pairs]
            for p, average in pairs:
                self._write(p, average)
        outer, outer_swapped = vars(self).get("_step"), self._swapped
        self._swapped = {**{id(p): k for (p, _), k in zip(pairs, kept)}, **outer_swapped}
        vars(self)["_step"] = _refuse_step  # so that a step outside has nothing to check
        try:
            yield
        finally:
            if outer is None:
                del vars(self)["_step"]
            self._swapped = outer_swapped
            with torch.no_grad():
                for (p, _), value in zip(pairs, kept, strict=True):
                    self._write(p, value)
            for p, versions in known:  # corrections belong to these values
                versions.note(p, local(p))

    def _write(self, p: Tensor, value: Tensor) -> None:
        p.copy_(value)
        low = self._low_precision.get(id(p))
        if low is not None:
            low.copy_(value)
