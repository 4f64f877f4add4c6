"""Loss scaling whose unscaling, check and clipping happen inside the optimizer's two sweeps."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from .._capture import refuse_capture
from .._torch_private import disable_dynamo
from ..optim import FusedOptimizer
from ..optim._release_checks import check_loss
from .scaled_clipping import ScaledClipping


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for fusedtrain's optimizers: no gradient is read more than twice.

    For an optimizer of `fusedtrain.optim`, `step` makes two sweeps over memory. The first reads
    every gradient, for values that are not finite and for norms. The second unscales, clips and
    updates at once, or does nothing after a value that is not finite. The host waits for neither.
    Gradients may be float16. For other optimizers, and after `unscale_`, torch's code runs.

    Args:
        device: "cuda", "cpu", or another device type.
        init_scale: first scale, brought within `min_scale` and `max_scale`.
        growth_factor: multiplies the scale after `growth_interval` good steps in a row.
        backoff_factor: multiplies the scale after a step with infs or NaNs.
        growth_interval: see `growth_factor`.
        enabled: False makes every method do nothing but the step itself.
        hysteresis: number of bad steps, with no good one between, before the scale backs off.
        min_scale: the scale goes no lower.
        max_scale: the scale goes no higher.

    Raises:
        ValueError: for a hysteresis below 1, or min_scale above max_scale.

    Example:
        >>> import torch, fusedtrain
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = fusedtrain.optim.AdamW(model.parameters(), max_grad_norm=1.0)
        >>> scaler = fusedtrain.amp.GradScaler("cpu")
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     loss = model(torch.ones(4, 2)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> optimizer.last_step_skipped
        tensor(False)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
    ) -> None:
        if hysteresis < 1:
            raise ValueError(f"hysteresis must be at least 1, got {hysteresis}")
        low, high = min_scale or 0.0, float("inf") if max_scale is None else max_scale
        if not 0 <= low <= high:
            raise ValueError(
                f"expected 0 <= min_scale <= max_scale, got min_scale={min_scale}, "
                f"max_scale={max_scale}"
            )
        init_scale = min(max(init_scale, low), high)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._hysteresis = hysteresis
        self._min_scale, self._max_scale = low, high
        self._hysteresis_tracker: Tensor | None = None
        self._init_hysteresis = hysteresis
        self._clipping = ScaledClipping()

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        refuse_capture("the loss scale")
        super()._lazy_init_scale_growth_tracker(dev)

    def scale(self, outputs: Any) -> Any:
        """Multiplies a loss, or each of several, by the scale.

        Raises:
            RuntimeError: the loss has gradients that backward would release (see
                `FusedOptimizer.release_gradients`).
        """
        if self._enabled:
            check_loss(outputs)
        return super().scale(outputs)

    @disable_dynamo  # as the optimizer's step
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer, unless its gradients hold infs or NaNs.

        Args:
            optimizer: any torch optimizer; one of `fusedtrain.optim` is not waited for.
            args, kwargs: for ``optimizer.step``.

        Raises:
            RuntimeError: for a closure, and for a second step before `update`.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if "closure" in kwargs or state["stage"] is OptState.STEPPED:
            return super().step(optimizer, *args, **kwargs)  # raises
        scales = getattr(optimizer, "_step_supports_amp_scaling", False)
        if scales and not isinstance(optimizer, torch.optim.Optimizer):
            # A wrapper that hands on what it lacks. The scale would stay with it.
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            state["stage"] = OptState.STEPPED
            return self._maybe_opt_step(optimizer, state, *args, **kwargs)
        is_ready = state["stage"] is OptState.READY
        if isinstance(optimizer, FusedOptimizer) and not scales and optimizer._itself is optimizer:
            # Hooks are to see unscaled gradients, and reports what the step saw.
            if is_ready:
                self.unscale_(optimizer)
            optimizer._shown_unscaled = optimizer._checks_gradients = True  # type: ignore[attr-defined]
            try:
                return super().step(optimizer, *args, **kwargs)
            finally:
                del optimizer._shown_unscaled, optimizer._checks_gradients  # type: ignore[attr-defined]
        if not isinstance(optimizer, FusedOptimizer) or not scales or not is_ready:
            return super().step(optimizer, *args, **kwargs)
        if any(arg is not None for arg in args):  # Accelerate passes `None`
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        # With a scale set by the user: the product, as in torch.
        user_scale = getattr(optimizer, "grad_scale", None)
        scale = scale if user_scale is None else scale * user_scale
        optimizer.grad_scale = scale
        optimizer._checks_gradients = True  # type: ignore[attr-defined]
        try:
            result = optimizer.step(**kwargs)
        finally:
            del optimizer._checks_gradients  # type: ignore[attr-defined]
            vars(optimizer).pop("grad_scale", None)  # unless the step has failed
        self._clipping.look(optimizer, scale)
        state["found_inf_per_device"] = optimizer._found_inf()
        state["stage"] = OptState.STEPPED
        return cast("float | None", result)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        allow_fp16 = allow_fp16 or isinstance(optimizer, FusedOptimizer)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Grows or backs off the scale, by the overflows of the steps since the last update.

        Args:
            new_scale: replaces the scale instead.
        """
        plain = self._hysteresis == 1 and self._min_scale == 0 and self._max_scale == float("inf")
        if not self._enabled or new_scale is not None or plain:
            return super().update(new_scale)
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        overflows = [
            found_inf.to(scale.device, non_blocking=True).reshape(())
            for state in self._per_optimizer_states.values()
            for found_inf in state["found_inf_per_device"].values()
        ]
        if not overflows:
            raise AssertionError("No inf checks were recorded prior to update.")
        if self._hysteresis_tracker is None:
            refuse_capture("the hysteresis of the loss scale")
            self._hysteresis_tracker = torch.full_like(growth_tracker, self._init_hysteresis)
        torch.ops.fusedtrain.update_scale(
            scale, growth_tracker, self._hysteresis_tracker, torch.stack(overflows).sum(),
            self._growth_factor, self._backoff_factor, self._growth_interval, self._hysteresis,
            self._min_scale, self._max_scale,
        )  # fmt: skip
        self._per_optimizer_states.clear()

    def state_dict(self) -> dict[str, Any]:
        """As torch's; with hysteresis above 1, ``_hysteresis_tracker`` is added."""
        state = super().state_dict()
        if state and self._hysteresis > 1:
            tracker = self._hysteresis_tracker
            state["_hysteresis_tracker"] = (
                self._init_hysteresis if tracker is None else int(tracker.item())
            )
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads torch's state too; without a saved tracker hysteresis starts anew."""
        super().load_state_dict(state_dict)
        self._init_hysteresis = state_dict.get("_hysteresis_tracker", self._hysteresis)
        if self._hysteresis_tracker is not None:
            self._hysteresis_tracker.fill_(self._init_hysteresis)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        if state["_hysteresis_tracker"] is not None:
            state["_init_hysteresis"] = int(state["_hysteresis_tracker"].item())
            state["_hysteresis_tracker"] = None
        return state
