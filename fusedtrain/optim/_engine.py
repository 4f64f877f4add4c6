"""The base of all optimizers: the step as one call.

A step collects the gradients, looks up the plan of exactly these parameters (or builds it, see
`_plan.py`), and calls ``torch.ops.fusedtrain.optimizer_step`` once per device. The host reads
nothing back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .. import ops as ops  # defines and loads the ops
from .._capture import refuse_capture
from .._torch_private import disable_dynamo, global_step_pre_hooks
from ..reference.optimizers import (
    CONTROLS,
    MEASURE_FINITE,
    MEASURE_GRADIENTS,
    MEASURE_PARAMETERS,
    Control,
    StepOptions,
)
from . import _distributed
from ._checkpoints import Checkpoints
from ._checks import check_parameter, check_written, is_supported
from ._options import WRITE_BACK
from ._plan import RULE_NUMBERS, Needs, Numbers, Store, UpdatePlan, on_device

_PLANS_KEPT = 8  # one plan for each set of parameters with gradients
# Read from hundreds of tensors several times a step: `map` takes a third of a loop's time.
_GRAD, _LAYOUT = attrgetter("grad"), attrgetter("layout")
_CAUTIOUS = attrgetter("cautious")


# Packages whose hooks and functions around a step read no gradients: schedulers and the like.
_READ_NONE = (__name__.partition(".")[0], "torch", "accelerate")


def _is_of_others(function: Any) -> bool:
    """Whether a function, or one that it wraps, is of none of these packages."""
    while function is not None:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] not in _READ_NONE:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


class FusedOptimizer(Checkpoints):
    """Base of the optimizers: the step in two sweeps over memory, for all groups in one call."""

    # The 16-bit parameter of each master in `param_groups`, by the id of the master, which the step
    # writes too. Scripts may write to such masters.
    _low_precision = MappingProxyType({})
    grad_scale: Tensor  # only during a step of a GradScaler
    _shown_unscaled = False  # True during a step of our GradScaler that has unscaled before

    # Each optimizer may define, besides what `Options` lists:
    _norms: ClassVar[int] = 0  # the norms of each tensor that the rule needs
    _tries: ClassVar[bool] = False  # whether the rule needs a trial of the update
    _norm_eps: ClassVar[float] = 1e-6  # as in clip_grad_norm_

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch's GradScaler leaves unscaling and skipping to the optimizer. It sets the
        scale on what it is given: if that is a wrapper, the scale would stay there."""
        return self._itself is self and (self._shown_unscaled or not self._is_watched())

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """torch's constructors set it for ``fused=True``."""

    @disable_dynamo
    def _is_watched(self) -> bool:
        """Whether others see the gradients between a GradScaler and the step: hooks before it, or
        another step, of a subclass or set on the optimizer. torch's plain optimizers show unscaled
        ones, as detectron2 needs for its clipping."""
        hooks = [*self._optimizer_step_pre_hooks.values(), *global_step_pre_hooks.values()]
        return any(map(_is_of_others, (type(self).step, vars(self).get("step"), *hooks)))

    # --- the step ---

    @disable_dynamo  # a compiled function calls the step in Python
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step for every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.

        Raises:
            RuntimeError: for sparse gradients and complex parameters. Nothing is modified.
        """
        loss = None
        try:
            if self._release is not None:
                self._release.check_step(closure)
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                self._step()
        except BaseException:
            # torch's GradScaler would leave its scale, and the next step would see the product.
            if "grad_scale" in vars(self):
                del self.grad_scale
                vars(self).pop("found_inf", None)
            raise
        return loss

    def _step(self) -> None:
        plans, grads = self._plans_and_gradients()
        self._last = plans
        if plans:
            self._update(plans, grads)
        else:
            self._measured = False
            for control in self._controls.values():
                Control.of(control).skipped.zero_()
        if self._release is not None:
            self._release.close(plans)
        self._average_parameters_without_gradients()

    def _update(self, plans: list[UpdatePlan], grads: list[list[Tensor]]) -> None:
        writeback = self._writeback()
        if writeback != "none":
            check_written(grads)
        groups = list(map(self._numbers, self.param_groups))
        trial = self._tries or any(map(_CAUTIOUS, groups))
        measures = self._measures()
        self._measured = measures != 0
        options = self._step_options(measures, writeback, trial)
        calls = self._calls(plans, grads, options, groups)
        if (measures or trial) and (len(plans) > 1 or plans[0].distributed):
            if self._fused_options["agc"] is not None:
                raise RuntimeError("agc is not supported for sharded parameters or several devices")
            _distributed.step(calls, trial)
        else:
            for plan, arguments in calls:
                plan.sums = torch.ops.fusedtrain.optimizer_step(*arguments, None, None)
        for plan, plan_grads in zip(plans, grads, strict=True):
            increment_version(plan.written)
            increment_version(plan.states)
            plan.note_versions()
            if writeback != "none":
                increment_version([g for g in plan_grads if not g.is_inference()])
                if not all(map(is_, map(_GRAD, plan.params), plan_grads)):
                    _distributed.give_back(plan.params, plan_grads)

    def _step_options(self, measures: int, writeback: str, trial: bool) -> StepOptions:
        options = self._fused_options
        decay = options["ema_decay"]
        return StepOptions(
            measures=float(measures),
            max_norm=self._clip_norm(),
            norm_eps=self._norm_eps,
            unit_factor=options["agc"] or 0.0,
            unit_eps=options["agc_eps"],
            average_weight=0.0 if decay is None else 1.0 - decay,
            write_back=WRITE_BACK[writeback],
            stochastic=float(options["stochastic_rounding"]),
            seed=float(self._rounding_seed % 2**32),
            trial=float(trial),
            seed_high=float(self._rounding_seed >> 32),
            masters_follow=float(not self._low_precision),
        )

    def _calls(
        self,
        plans: list[UpdatePlan],
        grads: list[list[Tensor]],
        options: StepOptions,
        groups: list[Numbers],
    ) -> list[tuple[UpdatePlan, list[Any]]]:
        """The arguments of each plan's call."""
        lrs: list[Tensor] = []
        rows = [options.row(), *(group.row(lrs) for group in groups)]
        table = torch.tensor(rows, dtype=torch.float64, device="cpu")
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        calls = []
        for plan, plan_grads in zip(plans, grads, strict=True):
            device = plan.store.control.device
            arguments: list[Any] = [
                RULE_NUMBERS[self._rule], plan.local_params, plan_grads, plan.states, plan.masters,
                plan.averages, [on_device(lr, device) for lr in lrs], plan.store.scalars,
                plan.store.control, table if len(plans) == 1 else table.clone(), plan.rows,
                on_device(scale, device), on_device(found_inf, device),
            ]  # fmt: skip
            calls.append((plan, arguments))
            plan.follow_parameters()
        return calls

    def _measures(self) -> int:
        measures = self._norms
        # torch's scaler checks scaled gradients, and so misses overflows of the unscaling.
        scaled = getattr(self, "grad_scale", None) is not None
        if getattr(self, "_checks_gradients", scaled):
            measures |= MEASURE_FINITE | MEASURE_GRADIENTS
        if self._clip_norm():
            measures |= MEASURE_GRADIENTS
        if self._fused_options["agc"] is not None:
            measures |= MEASURE_GRADIENTS | MEASURE_PARAMETERS
        return measures

    def _writeback(self) -> str:
        """The write-back of this step; "none" if the gradients already hold its values."""
        options = self._fused_options
        kind: str = options["gradient_writeback"]
        scaled = getattr(self, "grad_scale", None) is not None
        clips = self._clip_norm() != 0 or options["agc"] is not None
        return "none" if kind == "unscaled" and not scaled and not clips else kind

    def _clip_norm(self) -> float:
        return self._fused_options["max_grad_norm"] or 0.0

    def _plans_and_gradients(self) -> tuple[list[UpdatePlan], list[list[Tensor]]]:
        """The plans, one per device, of the parameters that have gradients; and the gradients."""
        params: list[Tensor] = []
        groups: list[int] = []
        for number, group in enumerate(self.param_groups):
            params += group["params"]
            groups += [number] * len(group["params"])
        all_grads = list(map(_GRAD, params))
        grads = [grad for grad in all_grads if grad is not None]
        if len(grads) != len(params):
            have = [grad is not None for grad in all_grads]
            params, groups = list(compress(params, have)), list(compress(groups, have))
        if not params:
            return [], []
        if list(map(_LAYOUT, grads)).count(torch.strided) != len(grads):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
        if any(map(Tensor.is_neg, grads)):
            grads = [grad.resolve_neg() for grad in grads]
        key = tuple(map(id, params))
        needs = self._state_needs()
        known_groups, plans = self._plans.get(key, ((), []))
        if known_groups != groups or not all(
            plan.needs == needs and plan.fits(self.state) for plan in plans
        ):
            plans = self._build(params, groups, needs)
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = (groups, plans)
        if len(plans) == 1 and not plans[0].distributed:
            return plans, [grads]
        by_id = dict(zip(map(id, params), grads, strict=True))
        return plans, [[_distributed.local_grad(by_id[id(p)], p) for p in x.params] for x in plans]

    def _average_parameters_without_gradients(self) -> None:
        """Updates these averages, as ModelEma would, unless the step was skipped."""
        if self.ema_decay is None:
            return
        weight = 1.0 - self.ema_decay
        stepped = {id(p) for plan in self._last for p in plan.params}
        fresh: list[tuple[Tensor, int]] = []
        for group, options in enumerate(self.param_groups):
            for p in options["params"]:
                average = self.state.get(p, {}).get("ema")
                if id(p) in stepped:
                    continue
                if average is not None:
                    skipped = self._last_control().skipped.to(p.device, average.dtype)
                    average.lerp_(p.to(average.dtype), (1 - skipped) * weight)
                elif p.requires_grad and is_supported(p):
                    fresh.append((p, group))
        if fresh:  # others may write to them; with all states, since a checkpoint needs these
            self._build([p for p, _ in fresh], [group for _, group in fresh], self._state_needs())

    def _build(self, params: list[Tensor], groups: list[int], needs: Needs) -> list[UpdatePlan]:
        for p in params:
            check_parameter(p, type(self).__name__)
        refuse_capture(f"the state of {type(self).__name__}")
        by_device: dict[torch.device, list[int]] = {}
        for i, p in enumerate(params):
            by_device.setdefault(p.device, []).append(i)
        return [
            UpdatePlan(
                self._store(device), self.state, [params[i] for i in which],
                [groups[i] for i in which], needs, self._low_precision,
            )
            for device, which in by_device.items()
        ]  # fmt: skip

    def _store(self, device: torch.device) -> Store:
        """The scalars of all parameters on the device; made anew if the parameters changed."""
        params = [p for p in self._all_params() if p.device == device]
        store = self._stores.get(device)
        if store is not None:
            # DeepSpeed steps group by group; the counts of the other groups must last.
            ids = set(map(id, params))
            params += [p for p in store.params if id(p) not in ids and p in self.state]
        if store is None or store.columns.keys() != set(map(id, params)):
            if device not in self._controls:
                control = torch.zeros(CONTROLS, dtype=torch.float32, device=device)
                self._controls[device] = control
            new = Store(params, device, self._controls[device])
            if self._scalar_names[0] is None:
                new.count_one_step(self._loaded)
            if store is not None:
                new.take_over(store, self._low_precision.values())
            self._stores[device] = store = new
            self._plans.clear()
        return store

    def _forget(self) -> None:
        """Drops the plans, after their options or states were replaced."""
        super()._forget()
        self._plans: dict[tuple[int, ...], tuple[Any, list[UpdatePlan]]] = {}
        self._stores: dict[torch.device, Store] = {}
        self._last = []
        self._measured = False
        self._loaded = {id(p) for p, p_state in self.state.items() if p_state}
