"""The gradients of one optimizer between a scaled backward pass and its step.

Apex unscaled them when the backward pass was over: one more pass over memory, which an optimizer of
fusedtrain does not need. Its gradients stay as backward left them, scaled, and the step's second
sweep divides. Who looks at ``.grad`` before that, to clip or to log, finds them unscaled all the
same: looking is what unscales them (`LazyParameter`). Other optimizers' are unscaled at once.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import attrgetter, ne
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..optim import FusedOptimizer
from ._masters import Masters
from ._raw import raw_grad, set_raw_grad

# They ask whether there is a gradient, to drop it or to zero it: no reason to unscale it.
_ZEROING = {
    inspect.unwrap(owner.zero_grad).__code__ for owner in (torch.nn.Module, torch.optim.Optimizer)
}

_OF_A_STEP = ("_checks_gradients", "grad_scale")  # what the optimizer is told of scaled gradients
# By parameter, a weak reference to the `ScaledGradients` that it belongs to.
_owner: Any = WeakTensorKeyDictionary()
_VERSION, _LAYOUT = attrgetter("_version"), attrgetter("layout")


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
        scaled = self._gradients.scaled_by is not None
        if scaled and sys._getframe(1).f_code not in _ZEROING:
            self._gradients.unscale()
        return raw_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and self._gradients.scaled_by is not None:
            self._gradients.unscale()
        set_raw_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        set_raw_grad(self, None)


class ScaledGradients:
    """What `initialize` adds to an optimizer.

    A backward pass is between `prepare` and `finish` (or `delay`, `abort`); any number of them come
    before a step.

    Args:
        optimizer: whose 16-bit parameters are replaced by masters, if `with_masters`.
        with_masters: whether the optimizer is to step float32 masters of 16-bit parameters.
        accumulates: whether gradients of masters stay until they are zeroed, as torch's do; in
            Apex's amp a step drops them.
    """

    def __init__(self, optimizer: Any, with_masters: bool, accumulates: bool = False) -> None:
        self.optimizer = optimizer
        self.with_masters = with_masters
        self.accumulates = accumulates
        self.masters = Masters()
        self.own: list[Tensor] = []  # parameters of param_groups that are no masters
        self._scaled_by: Tensor | None = None
        self.checked = False  # whether these have been searched for infs and NaNs
        self.stepped = False  # whether a step has used them
        self.retired = False
        self.found_inf: Tensor | None = None  # not 0 where a pass since the last step had any
        self._before: list[Tensor | None] | None = None  # unscaled gradients of `own`, set aside
        self._left: dict[int, int] = {}  # by id, the version of each gradient that `finish` left
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for p in params:
            earlier = _owner_of(p)
            if earlier is not None:
                earlier.retire()
        self.lazy = isinstance(optimizer, FusedOptimizer) and all(
            type(p) is torch.nn.Parameter for p in params
        )
        if self.lazy:
            self._kind = type("LazyParameter", (LazyParameter,), {"_gradients": self})
            self._plain_step = optimizer._step
            optimizer._step = self._step
        for group in optimizer.param_groups:
            self.add(group)

    def add(self, group: dict[str, Any]) -> None:
        """Takes over the parameters of a group."""
        first = len(self.masters.masters)
        if self.with_masters:
            self.masters.replace_in(group)
        new = set(map(id, self.masters.masters[first:]))
        own = [p for p in group["params"] if id(p) not in new]
        if self.lazy and any(type(p) is not torch.nn.Parameter or _owner_of(p) for p in own):
            raise RuntimeError(
                "a parameter of the group belongs to another optimizer already, or is of a "
                "subclass of torch.nn.Parameter"
            )
        self.own += own
        if not self.lazy:
            return
        _owner.update((p, weakref.ref(self)) for p in own)
        self._watch(self.scaled_by is not None)
        self.optimizer._read_gradients(self._gradients_of, self.masters.param_of)

    def retire(self) -> None:
        """Leaves the parameters to another optimizer."""
        self.unscale()
        self.retired = True
        for p in self.own:
            _owner.pop(p, None)

    @property
    def scaled_by(self) -> Tensor | None:
        """What the gradients are multiplied by."""
        return self._scaled_by

    @scaled_by.setter
    def scaled_by(self, scale: Tensor | None) -> None:
        changes = (scale is None) != (self._scaled_by is None)
        self._scaled_by = scale
        if changes and self.lazy:
            self._watch(scale is not None)

    def _watch(self, on: bool) -> None:
        """From here on who looks at a gradient unscales it, or does not."""
        kind = self._kind if on else torch.nn.Parameter
        for p in self.own:
            p.__class__ = kind
        for p in self.masters.masters:
            p.__class__ = kind

    # --- around a backward pass

    def prepare(self, scale: Tensor) -> None:
        """Before a backward pass of a loss times `scale`: unscaled gradients are set aside."""
        if self.retired:
            raise RuntimeError(
                f"the parameters of this {type(self.optimizer).__name__} have been given to "
                "another optimizer by a later amp.initialize"
            )
        self.masters.check_devices()
        if self.scaled_by is not None and not self.checked:
            self._rescale(scale)
            return
        self.unscale()
        self._before = [raw_grad(p) for p in self.own]
        self._drop([*self.own, *self.masters.params])

    def abort(self) -> None:
        """After a backward pass that raised: its gradients are dropped."""
        if self._before is not None and self.scaled_by is None:
            self._drop(self.masters.params)
            self._restore(self._before)
            self._before = None

    def delay(self, scale: Tensor) -> None:
        """After a backward pass whose gradients are to stay scaled."""
        self.scaled_by, self.checked, self.stepped = scale, False, False

    def finish(self, scale: Tensor, check: bool) -> Tensor | None:
        """After a backward pass: not 0 where it left infs or NaNs, or None without `check`.

        Raises:
            RuntimeError: for sparse gradients.
        """
        raw = self._raw()
        self._refuse_sparse(raw)
        before = self._before or []
        self._before, self.stepped = None, False
        if self.lazy and not any(g is not None for g in before) and not self.masters.have_grads():
            self._scaled_by, self.checked = scale, True  # watched when the optimizer has measured
            try:
                found = self.optimizer._measure(scale) if check else None
            finally:
                self._watch(True)
            self._left = dict(zip(map(id, raw), map(_VERSION, raw)))
            return found
        self.scaled_by = None
        new = [raw_grad(p) for p in self.own]
        found = self._unscale(scale)
        self._restore(before)
        both = [(old, g) for old, g in zip(before, new) if old is not None and g is not None]
        for old, g in both:
            old.add_(g)
        return found if check else None

    def unscale(self) -> None:
        """Gradients become what they are without a loss scale; those of masters are made."""
        scale = self.scaled_by
        if scale is None:
            return
        if self.checked and not self.stepped:
            self._refuse_foreign()
        self.scaled_by = None
        for name in _OF_A_STEP:  # where a hook of the step has looked
            self.optimizer.__dict__.pop(name, None)
        if not self._raw():
            return
        found = self._unscale(scale)
        if not self.checked:
            self.add_found(found)

    def add_found(self, found: Tensor) -> None:
        """Skips the next step where `found`, of no dimensions, is not 0."""
        if self.found_inf is not None:
            found = torch.maximum(self.found_inf.to(found.device, non_blocking=True), found)
        self.found_inf = found

    @torch.no_grad()
    def _unscale(self, scale: Tensor) -> Tensor:
        """Divides in place, and adds to the masters' gradients; not 0 where not finite."""
        added: list[tuple[Tensor, Tensor]] = []
        grads = [g for g in map(raw_grad, self.own) if g is not None]
        wide, narrow = [], []
        for master, p in () if self._used_up() else self.masters.pairs():
            g = raw_grad(p)
            if g is not None:
                copy = torch.empty_like(g, dtype=torch.float32)
                wide.append(copy)
                narrow.append(g)
                old = raw_grad(master)
                if old is None:
                    set_raw_grad(master, copy)
                else:
                    added.append((old, copy))
        if wide:
            torch._foreach_copy_(wide, narrow)
        found = torch.zeros((), dtype=torch.float32, device=scale.device)
        inverse = scale.double().reciprocal().float()
        for device, some in _by_device([*grads, *wide]).items():
            here = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(some, here, inverse.to(device))
            found = torch.maximum(found, here.to(found.device, non_blocking=True))
        for old, copy in added:
            old.add_(copy)
        return found

    @torch.no_grad()
    def _rescale(self, scale: Tensor) -> None:
        """Gradients that `delay` has left, where another loss has changed the scale since."""
        if self.scaled_by is not None and self.scaled_by is not scale:
            ratio = scale / self.scaled_by
            for device, grads in _by_device(self._raw()).items():
                torch._foreach_mul_(grads, ratio.to(device))
            self.scaled_by = scale

    # --- the step

    def step(self, original: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """What the optimizer's step does, or nothing after infs and NaNs.

        Raises:
            RuntimeError: for a closure that could not be followed, and for gradients that are
                still scaled.
        """
        if closure is not None and (self.with_masters or self.found_inf is not None):
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
        if self.scaled_by is not None and not self.checked and not self.stepped:
            raise RuntimeError(
                "the gradients are still scaled: the last backward pass before optimizer.step() "
                "must be under amp.scale_loss without delay_unscale"
            )
        if self.scaled_by is not None and not self.stepped:
            self._refuse_foreign()
        found, self.found_inf = self.found_inf, None
        try:
            if self.lazy:
                return self._step_in_two_sweeps(original, closure, found)
            if found is not None and found.item() != 0:
                return None
            self.masters.follow_parameters()
            result = original() if closure is None else original(closure)
            self.masters.write_parameters()
            return result
        finally:
            self.stepped = True
            if not self.accumulates:
                self._drop(self.masters.masters)

    def _step_in_two_sweeps(
        self, original: Callable[..., Any], closure: Callable[[], Any] | None, found: Tensor | None
    ) -> Any:
        optimizer = self.optimizer
        if self.stepped:
            self.unscale()  # of a second step without a backward pass between
        optimizer._checks_gradients = found is not None and self.scaled_by is not None
        if self.scaled_by is not None:
            optimizer.grad_scale = self.scaled_by
        if found is not None:
            optimizer.found_inf = found
        try:
            return original() if closure is None else original(closure)
        finally:
            for name in (*_OF_A_STEP, "found_inf"):
                optimizer.__dict__.pop(name, None)

    def _step(self) -> None:
        """The optimizer's own, after hooks and before hooks: nobody looks."""
        self._watch(False)
        try:
            self._plain_step()
        finally:
            self._watch(self.scaled_by is not None)

    def zeroed(self) -> None:
        """After ``zero_grad`` of the optimizer."""
        self._drop([*self.masters.params, *self.masters.masters])
        self.scaled_by = None

    # --- small things

    def _used_up(self) -> bool:
        """Whether gradients of masters are gone, though those of their parameters are there."""
        return self.stepped and not self.accumulates

    def _gradients_of(self, params: list[Tensor]) -> list[Tensor | None]:
        """What the fused step is to use: of a master its own, or that of its parameter, scaled."""
        grads = list(map(raw_grad, params))
        if self.scaled_by is not None and not self._used_up():
            param_of = self.masters.param_of
            for i, p in enumerate(params):
                if grads[i] is None and id(p) in param_of:
                    grads[i] = raw_grad(param_of[id(p)])
        return grads

    def _raw(self) -> list[Tensor]:
        params = [*self.own, *self.masters.params]
        return [g for g in map(raw_grad, params) if g is not None]

    def _drop(self, params: Iterable[Tensor]) -> None:
        deque(map(set_raw_grad, params, repeat(None)), maxlen=0)

    def _restore(self, before: list[Tensor | None]) -> None:
        for p, grad in zip(self.own, before):
            if grad is not None:
                set_raw_grad(p, grad)

    def _refuse_sparse(self, grads: list[Tensor]) -> None:
        if list(map(_LAYOUT, grads)).count(torch.strided) != len(grads):
            shape = next(tuple(g.shape) for g in grads if g.layout is not torch.strided)
            self.abort()
            raise RuntimeError(
                f"{type(self.optimizer).__name__}: a parameter of shape {shape} has a sparse "
                "gradient, which amp.scale_loss does not unscale; use torch.amp.GradScaler and "
                "torch.optim, or a dense gradient (sparse=False)"
            )

    def _refuse_foreign(self) -> None:
        """A backward pass outside `scale_loss` has added to gradients that were scaled."""
        raw = self._raw()
        if any(map(ne, map(self._left.get, map(id, raw)), map(_VERSION, raw))):
            raise RuntimeError(
                "gradients were changed between amp.scale_loss and optimizer.step() without being "
                "read through .grad: a backward pass must be under amp.scale_loss, too"
            )


def _owner_of(p: Tensor) -> ScaledGradients | None:
    """Whose parameter it is: nobody's any more where the optimizer is gone."""
    reference: weakref.ref[ScaledGradients] | None = _owner.get(p)
    return None if reference is None else reference()


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    grouped: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        grouped.setdefault(tensor.device, []).append(tensor)
    return grouped
