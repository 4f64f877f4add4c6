"""Gradient release: backward updates each parameter as soon as its gradient is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .._capture import is_capturing
from . import _distributed
from ._checks import check_parameter
from ._options import Options, of_itself
from ._plan import RULE_NUMBERS, Needs, UpdatePlan, on_device
from ._release_checks import (
    RELEASES,
    Hook,
    check_options,
    check_reducers,
    check_unscaled,
    is_released,
)


class Releases(Options):
    """The part of `FusedOptimizer` that steps within backward."""

    _release: GradientRelease | None = None

    @of_itself
    def release_gradients(self, model: nn.Module) -> GradientRelease:
        """Updates each parameter of the model within backward, and frees its gradient at once.

        From then on a backward pass is a step: as soon as the gradient of a parameter is complete,
        the parameter is updated and ``.grad`` becomes None. No more than a few gradients exist at a
        time. The results are those of ordinary steps, bit for bit.

        ``step()`` must still follow every backward pass. It updates the parameters that have a
        gradient - those of other models - and closes the step: counts, reports, averages.

        Args:
            model: of its parameters those are released that this optimizer has and that require
                a gradient now. For several models: ``torch.nn.ModuleList([a, b])``.

        Returns:
            A handle: ``remove()``, or the end of a ``with`` block, brings ordinary steps back.

        Raises:
            TypeError: `model` is not a module.
            ValueError: the optimizer has no parameter of the model, or the options
                ``max_grad_norm`` or ``gradient_writeback``.
            RuntimeError: gradients are released already; the model is wrapped in
                DistributedDataParallel; the optimizer has been through
                `fusedtrain.apex.amp.initialize`. Later, in backward: a second pass before
                ``step()``, the capture of a CUDA graph. In ``step()``: a closure, a GradScaler.

        Example:
            >>> import torch, fusedtrain
            >>> model = torch.nn.Linear(2, 1).bfloat16()
            >>> optimizer = fusedtrain.optim.AdamW(model.parameters(), master_weights="split24")
            >>> handle = optimizer.release_gradients(model)
            >>> model(torch.ones(4, 2, dtype=torch.bfloat16)).square().mean().backward()
            >>> model.weight.grad is None
            True
            >>> optimizer.step()
            >>> int(optimizer.applied_steps)
            1
            >>> handle.remove()
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if self._release is not None:
            raise RuntimeError(
                "release_gradients: the gradients of this optimizer are released already. Call the "
                "handle's remove() first (and step(), if a backward pass was the last call), or "
                "pass one torch.nn.ModuleList of all models"
            )
        check_options(self._fused_options)
        if hasattr(self, "_amp_stash"):
            raise RuntimeError(
                "release_gradients: the optimizer has been through amp.initialize, which scales "
                "losses and reads all gradients after backward. Train in bfloat16 without amp"
            )
        known = set(map(id, self._all_params()))
        params = [p for p in model.parameters() if id(p) in known and p.requires_grad]
        if not params:
            raise ValueError(
                "release_gradients: the optimizer has no parameter of the model that requires a "
                "gradient. Make the optimizer of model.parameters()"
            )
        for p in params:
            check_parameter(p, type(self).__name__)
            if is_released(p):
                raise RuntimeError(
                    f"release_gradients: another optimizer releases the gradient of a parameter of "
                    f"shape {tuple(p.shape)}. Each parameter belongs to one optimizer"
                )
        check_reducers(model, params)
        self._release = GradientRelease(self, params)
        return self._release

    def _write_low_precision(self, low_precision: Mapping[int, Tensor]) -> None:
        """Sets `_low_precision`, for `apex.amp`."""
        self._low_precision = low_precision
        self._forget()

    def _check_closed(self, what: str) -> None:
        """Raises RuntimeError between the updates of backward and step()."""
        if self._release is not None:
            self._release.check_closed(what)

    def _discard_step(self) -> None:
        """Forgets the open step, whose states have been replaced."""
        if self._release is not None:
            self._release.discard()


class GradientRelease:
    """The handle of `FusedOptimizer.release_gradients`; the end of a ``with`` block removes it."""

    def __init__(self, optimizer: Any, params: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        if params:
            RELEASES.add(self)
        # Backward has a thread for each device, and optimizers have one state for all.
        self._lock = RLock()
        self._updates = [_Update(number) for number, _ in enumerate(params)]
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(Hook(self, number))
            for number, p in enumerate(params)
        ]
        self._devices: set[torch.device] = set()
        self._open: _ReleasedStep | None = None
        self._count = 0  # of steps
        self._needs: Needs | None = None
        self._alone = False  # whether it is known that no DistributedDataParallel is around
        # A step of many calls is one step for stochastic rounding: every call has a control of its
        # own, which starts as the optimizer's.
        self._controls: dict[torch.device, Tensor] = {}

    def remove(self) -> None:
        """Brings ordinary steps back.

        Parameters that the last backward pass has updated stay so: if no ``step()`` has followed,
        the next one closes this step.
        """
        with self._lock:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            RELEASES.discard(self)
            if self._open is None:
                self._detach()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy releases nothing: copies of parameters have no hooks."""
        return GradientRelease, (None, [])

    def _detach(self) -> None:
        if self._optimizer is not None and self._optimizer._release is self:
            self._optimizer._release = None

    # --- within backward ---

    def update(self, number: int, p: Tensor) -> None:
        """Updates a parameter whose gradient is complete."""
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                return self.update(number, p)
        with self._lock:
            optimizer, update = self._optimizer, self._updates[number]
            if "_step" in vars(optimizer):  # within swap_averages()
                optimizer._step()  # raises
            step = self._open or self._begin()
            grad, group = p.grad, step.groups.get(id(p))
            if grad is None or group is None:  # another hook has taken it, or the optimizer lost p
                return
            if update.step == step.number:
                p.grad = None
                raise RuntimeError(
                    f"release_gradients: the gradient of a parameter of shape {tuple(p.shape)} is "
                    "complete for the second time since the last optimizer.step(), and the first "
                    "one has been used and freed. Call step() after every backward pass; to "
                    "accumulate gradients over several passes, remove() the handle. Checkpoints "
                    "that share a parameter need use_reentrant=False"
                )
            if grad.layout is not torch.strided:
                raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
            plan = update.plan
            if plan is None or update.group != group or not self._fits(plan, p, step):
                plan = self._prepare(update, p, group, step)
            self._call(update, plan, grad, step)
            step.updates.append(update)
            update.step = step.number
            p.grad = None

    def _begin(self) -> _ReleasedStep:
        optimizer = self._optimizer
        check_unscaled(optimizer)
        if is_capturing():
            raise RuntimeError(
                "release_gradients: a CUDA graph is being captured, and gradients that are freed "
                "have no place in it. Capture ordinary steps: remove() the handle first"
            )
        if not self._alone:
            check_reducers(None, optimizer._all_params())
            self._alone = True
        for device in self._devices:
            optimizer._store(device)  # a new one, if parameters have joined
        for device, controls in self._controls.items():
            controls.copy_(optimizer._controls[device])
        needs = optimizer._state_needs()
        if needs != self._needs:
            self._needs = needs
        assert self._needs is not None
        self._count += 1
        self._open = _ReleasedStep(self._count, optimizer, self._needs)
        return self._open

    def _fits(self, plan: UpdatePlan, p: Tensor, step: _ReleasedStep) -> bool:
        optimizer = self._optimizer
        return (
            plan.needs is step.needs
            and plan.store is optimizer._stores.get(p.device)
            and optimizer.state.get(p) is plan.dicts[0]
            and plan.is_in_place()
        )

    def _prepare(self, update: _Update, p: Tensor, group: int, step: _ReleasedStep) -> UpdatePlan:
        plan: UpdatePlan
        (plan,) = self._optimizer._build([p], [group], step.needs)
        device = plan.store.control.device
        if device not in self._controls:
            self._controls[device] = plan.store.control.repeat(len(self._updates), 1)
        self._devices.add(p.device)
        update.plan, update.group = plan, group
        update.control = self._controls[device][update.number]
        update.written = [*plan.written, *plan.states]
        return plan

    def _call(self, update: _Update, plan: UpdatePlan, grad: Tensor, step: _ReleasedStep) -> None:
        if grad.is_neg():
            grad = grad.resolve_neg()
        if plan.distributed:
            grad = _distributed.local_grad(grad, plan.params[0])
        arguments: list[Any] = [
            step.rule, plan.local_params, [grad], plan.states, plan.masters, plan.averages,
            step.rates(plan.store.control.device), plan.store.scalars, update.control, step.table,
            plan.rows, None, None,
        ]  # fmt: skip
        if plan.masters:
            plan.follow_parameters()
        if plan.distributed and (step.measures or step.trial):
            _distributed.step([(plan, arguments)], step.trial)
        else:
            plan.sums = torch.ops.fusedtrain.optimizer_step(*arguments, None, None)
        increment_version(update.written)
        if plan.masters:
            plan.note_versions()

    # --- after backward ---

    def check_step(self, closure: Any) -> None:
        """Raises RuntimeError before a step that would not be right."""
        if closure is not None:
            raise RuntimeError(
                "release_gradients: step() takes no closure, whose backward pass would be a step "
                "of its own. Run the backward pass before step(), or remove() the handle"
            )
        check_unscaled(self._optimizer)
        for p in self._open.params() if self._open is not None else ():
            if p.grad is not None:
                raise RuntimeError(
                    "release_gradients: a parameter that backward has updated already has a "
                    f"gradient again (shape {tuple(p.shape)}), which would be a second update. "
                    "Set it to None, and change gradients in hooks of the parameter instead"
                )

    def close(self, plans: list[UpdatePlan]) -> None:
        """Ends the step; `plans`: of the parameters that step() itself has updated."""
        step, self._open = self._open, None
        if not self._hooks:
            self._detach()
        if step is None or not step.updates:
            return
        optimizer, released = self._optimizer, step.plans()
        stepped = {plan.store.control.device for plan in plans}
        for update in step.updates:
            assert update.plan is not None
            assert update.control is not None
            control = update.plan.store.control
            if control.device not in stepped:
                control.copy_(update.control)
                stepped.add(control.device)
        optimizer._last = [*plans, *released]
        optimizer._measured = step.measures != 0
        if step.measures:
            _report(optimizer._last)

    def discard(self) -> None:
        """Forgets the open step, without closing it."""
        self._open = None
        if not self._hooks:
            self._detach()

    def check_closed(self, what: str) -> None:
        """Raises RuntimeError if a step is open; `what` would hold half of it."""
        if self._open is not None and self._open.updates:
            raise RuntimeError(
                f"release_gradients: {what} between a backward pass and step() would hold a step "
                "that is not closed. Call step() first"
            )


class _Update:
    """The arguments of a parameter's call."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.group = -1
        self.plan: UpdatePlan | None = None
        self.control: Tensor | None = None
        self.written: list[Tensor] = []  # whose versions an update increments
        self.step = 0  # the number of the step in which it was updated last


class _ReleasedStep:
    """The options of a step, read at its first gradient, and the updates so far."""

    def __init__(self, number: int, optimizer: Any, needs: Needs) -> None:
        groups = list(map(optimizer._numbers, optimizer.param_groups))
        self.number = number
        self.needs = needs
        self.rule = RULE_NUMBERS[optimizer._rule]
        self.trial: bool = optimizer._tries or any(group.cautious for group in groups)
        self.measures: int = optimizer._measures()
        options = optimizer._step_options(self.measures, "none", self.trial)
        self._lrs: list[Tensor] = []
        self._rates: dict[torch.device, list[Tensor | None]] = {}
        rows = [options.row(), *(group.row(self._lrs) for group in groups)]
        self.table = torch.tensor(rows, dtype=torch.float64, device="cpu")
        self.groups = {
            id(p): number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self.updates: list[_Update] = []

    def rates(self, device: torch.device) -> list[Tensor | None]:
        """The learning rates that are tensors, on the device."""
        rates = self._rates.get(device)
        if rates is None:
            rates = self._rates[device] = [on_device(lr, device) for lr in self._lrs]
        return rates

    def params(self) -> list[Tensor]:
        """The parameters that were updated."""
        return [p for update in self.updates if update.plan for p in update.plan.params]

    def plans(self) -> list[UpdatePlan]:
        """Plans of the updates, in the order of the model's parameters."""
        ordered = sorted(self.updates, key=lambda update: update.number)
        return [update.plan for update in ordered if update.plan is not None]


def _report(plans: list[UpdatePlan]) -> None:
    """Writes norm and count of all gradients to the controls of the step."""
    first = plans[0].store.control.device
    sums = torch.cat([plan.sums.to(first) for plan in plans if plan.sums is not None])
    norm, bad = sums[:, 1].sum().sqrt(), sums[:, 0].sum()
    for store in {id(plan.store): plan.store for plan in plans}.values():
        store.last_step.grad_norm.copy_(norm)
        store.last_step.nonfinite.copy_(bad)
