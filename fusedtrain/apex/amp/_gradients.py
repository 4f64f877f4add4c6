"""The gradients of one optimizer between a scaled backward pass and its step, as Apex has them.

Gradients are unscaled at the end of `scale_loss`, and added to those of earlier passes. With
`delay_unscale` they stay scaled until a later pass without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ..._torch_private import foreach_mul_, is_view, unscale_
from ...optim import FusedOptimizer
from ._masters import Masters, needs_master

_MOST_TRIES = 300  # halvings from the largest float32 to the smallest are 277
_living: WeakSet[ScaledGradients] = WeakSet()


class ScaledGradients:
    """The stash that `initialize` adds to an optimizer.

    A backward pass runs between `prepare` and `finish` (or `delay`, `abort`). Any number of passes
    may come before a step.

    Args:
        optimizer: any torch optimizer.
        with_masters: whether float32 masters replace the optimizer's 16-bit parameters.
        accumulates: whether masters' gradients stay until zero_grad, as torch's do. In Apex's amp
            a step drops them.
        values: see `Masters`.
    """

    def __init__(
        self,
        optimizer: Any,
        with_masters: bool,
        accumulates: bool = False,
        values: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        self.optimizer = optimizer
        self.fused = isinstance(optimizer, FusedOptimizer)  # its step does not wait for the device
        self.with_masters = with_masters
        self.accumulates = accumulates
        self.masters = Masters(values)
        self.plain_params: list[Tensor] = []  # parameters in param_groups that are not masters
        self.running = False  # whether a backward pass is running under `scale_loss`
        self.retired = False
        self.scaled_by: Tensor | None = None  # the scale of gradients whose unscaling is delayed
        self.found_inf: Tensor | None = None  # not 0: a pass since the last step overflowed
        # Parameters with gradients before the pass; the gradients' tensors, and their values.
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        for owner in self._owners(p for group in optimizer.param_groups for p in group["params"]):
            owner.retire()
        self._take(optimizer.param_groups, bool(optimizer.state))
        _living.add(self)

    # --- parameters

    def _owners(self, params: Iterable[Tensor]) -> list[ScaledGradients]:
        """The other stashes that have any of these parameters."""
        ids = set(map(id, params))
        others = [other for other in _living if other is not self and not other.retired]
        return [other for other in others if not ids.isdisjoint(map(id, other.plain_params))]

    def retire(self) -> None:
        """Leaves the parameters to another optimizer."""
        if self.scaled_by is not None:
            self._unscale(self.scaled_by)
        self.retired = True

    def add(self, group: dict[str, Any]) -> None:
        """Takes over the parameters of a group.

        Raises:
            RuntimeError: for another optimizer's parameters. Nothing is modified.
        """
        if self._owners(group["params"]):
            raise RuntimeError("a parameter of the group belongs to another optimizer already")
        self._take([group], False)

    def _take(self, groups: list[dict[str, Any]], casts_states: bool) -> None:
        """Makes masters of the groups' parameters, and casts states to the dtypes of these."""
        optimizer, masters = self.optimizer, self.masters
        saved = optimizer.state_dict() if casts_states else None
        for group in groups if self.with_masters else ():
            masters.replace_in(group)
        every = [p for group in optimizer.param_groups for p in group["params"]]
        self.plain_params = [p for p in every if id(p) not in masters.param_of]
        if self.fused:
            optimizer._write_low_precision(masters.param_of)
        if saved is not None:
            optimizer.state.clear()
            optimizer.load_state_dict(saved)

    def _follow_groups(self) -> None:
        """Takes over parameters that were unfrozen, or added to the groups, since the last pass."""
        plain, masters = set(map(id, self.plain_params)), self.masters.param_of
        for group in self.optimizer.param_groups:
            if not all(id(p) in plain or id(p) in masters for p in group["params"]):
                self.add(group)
        unfrozen = [p for p in self.plain_params if self.with_masters and needs_master(p)]
        if unfrozen:
            stated = any(p in self.optimizer.state for p in unfrozen)
            self._take(self.optimizer.param_groups, stated)

    def follow_parameters(self) -> None:
        """Updates masters of parameters that others have written to, before masters are read."""
        if self.fused:
            self.optimizer._follow_parameters()
        else:
            self.masters.follow_parameters(begun=True)

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
        self._follow_groups()
        self.masters.check_devices()
        self.masters.begin()
        self.running = True
        if self.scaled_by is not None:
            self._rescale(scale)
            return
        # Gradients may be views of DistributedDataParallel's buckets, which backward writes to
        # whatever .grad is.
        self._before = [
            (p, p.grad, p.grad.clone() if is_view(p.grad) else p.grad)
            for p in self.plain_params
            if p.grad is not None
        ]
        _drop([*self.plain_params, *self.masters.params])

    @torch.no_grad()
    def abort(self) -> None:
        """Drops the gradients of a backward pass that raised, unless it added to delayed ones."""
        if self.running and self.scaled_by is None:
            _drop([*self.plain_params, *self.masters.params])
            self._restore()
        self.running = False

    def delay(self, scale: Tensor) -> None:
        """Ends a backward pass whose gradients stay scaled."""
        self.scaled_by = scale
        self.running = False

    @torch.no_grad()
    def finish(self, scale: Tensor) -> Tensor:
        """Ends a backward pass, and unscales. Returns not 0 if it left infs or NaNs.

        Raises:
            RuntimeError: for sparse gradients.
        """
        for p in (*self.plain_params, *self.masters.params):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__}: a parameter of shape "
                    f"{tuple(p.grad.shape)} has a sparse gradient, which amp.scale_loss does not "
                    "unscale; use torch.amp.GradScaler and torch.optim, or a dense gradient "
                    "(sparse=False)"
                )
        self.running = False
        overflow = self._unscale(scale)
        self._restore()
        return overflow

    @torch.no_grad()
    def _unscale(self, scale: Tensor) -> Tensor:
        """Divides in place, and adds to the masters' gradients. Returns 0 if all are finite."""
        self.scaled_by = None
        plain = [(p, p.grad) for p in self.plain_params if p.grad is not None]
        # The CUDA kernel takes no bfloat16: https://github.com/pytorch/pytorch/issues/127176.
        divided = [g.float() if g.dtype is torch.bfloat16 else g for _, g in plain]
        # Gradients of create_graph=True are divided below, within their graph.
        divided = [g.detach().clone() if g.requires_grad else g for g in divided]
        pairs = [(m, p.grad.float()) for m, p in self.masters.pairs() if p.grad is not None]
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        inverse_scale = scale.double().reciprocal().float()
        for device, some in _by_device([*divided, *(wide for _, wide in pairs)]).items():
            device_found_inf = torch.zeros((), dtype=torch.float32, device=device)
            unscale_(some, device_found_inf, inverse_scale.to(device))
            # A blocking copy: a CPU tensor is read at once.
            found_inf = torch.maximum(found_inf, device_found_inf.to(found_inf.device))
        for (p, grad), wide in zip(plain, divided, strict=True):
            if grad.requires_grad:
                with torch.enable_grad():
                    p.grad = grad * inverse_scale.to(grad.device)
            elif wide is not grad:
                grad.copy_(wide)
        for master, wide in pairs:
            if master.grad is None:
                master.grad = wide
            else:
                master.grad.add_(wide)
        return found_inf

    def _rescale(self, scale: Tensor) -> None:
        """Brings delayed gradients to `scale`, if another loss has changed the scale."""
        if self.scaled_by is not None and self.scaled_by is not scale:
            ratio = scale / self.scaled_by
            params = [*self.plain_params, *self.masters.params]
            for device, grads in _by_device([p.grad for p in params if p.grad is not None]).items():
                foreach_mul_(grads, ratio.to(device))
            self.scaled_by = scale

    def _restore(self) -> None:
        """Adds the stashed gradients, in the memory that they were in."""
        for p, place, old in self._before:
            if p.grad is not None and p.grad.requires_grad:
                with torch.enable_grad():
                    p.grad = p.grad + old
                continue
            if p.grad is not None and is_view(p.grad):  # stays a view of its bucket
                p.grad.add_(old)
                continue
            if place is not old:  # the script's own memory, or an unused part of a bucket
                place.copy_(old)
            if p.grad is not None:
                place.add_(p.grad)
            p.grad = place
        self._before = []

    # --- the step

    def add_overflow(self, overflow: Tensor) -> Tensor:
        """Skips the next step if the 0-dim `overflow` is not 0. Returns that of all passes."""
        if self.found_inf is not None:
            overflow = torch.maximum(self.found_inf.to(overflow.device), overflow)
        self.found_inf = overflow
        return overflow

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
        if closure is not None:
            return self._step_with_closure(original, closure)
        if self.scaled_by is not None:
            raise RuntimeError(
                "the gradients are still scaled: the last backward pass before optimizer.step() "
                "must be under amp.scale_loss without delay_unscale"
            )
        found_inf = self.found_inf
        if not self.accumulates:
            self.found_inf = None
        try:
            if self.fused:  # writes the rounded masters itself
                self.optimizer.found_inf = found_inf
                return original()
            if _overflowed(found_inf):
                return None
            self.masters.follow_parameters()
            result = original()
            self.masters.write_parameters()
            return result
        finally:
            vars(self.optimizer).pop("found_inf", None)
            if not self.accumulates:
                _drop(self.masters.masters)

    def _step_with_closure(self, original: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        if self.with_masters or (not self.fused and _overflowed(self.found_inf)):
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
        if self.fused:  # a fused optimizer calls a closure once, before anything else
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
            self.found_inf = None

    @contextmanager
    def zeroing(self) -> Iterator[None]:
        """Around ``zero_grad`` of the optimizer."""
        _drop([*self.masters.params, *self.masters.masters])
        self.scaled_by = None  # zeroed gradients need no unscaling
        self._before = []
        if self.accumulates:  # FP16_Optimizer; amp, like Apex, forgets at a step
            self.found_inf = None
        yield


def _drop(params: Iterable[Tensor]) -> None:
    for p in params:
        p.grad = None


def _overflowed(found_inf: Tensor | None) -> bool:
    return found_inf is not None and bool(found_inf.item() != 0)


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    grouped: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        grouped.setdefault(tensor.device, []).append(tensor)
    return grouped
