"""The gradients of one optimizer between a scaled backward pass and its step.

Apex unscaled them when the backward pass was over: one more pass over memory, which an optimizer of
fusedtrain does not need. Its gradients stay as backward left them, scaled, and the step's second
sweep divides. Who looks at ``.grad`` before that, to clip or to log, finds them unscaled all the
same: looking is what unscales them (`LazyParameter`). Other optimizers' are unscaled at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ..optim import FusedOptimizer
from ._lazy import LazyParameter
from ._masters import Masters
from ._raw import raw_grad, set_raw_grad

_MOST_TRIES = 300  # halvings from the largest float32 to the smallest are 277
_OF_A_STEP = ("_checks_gradients", "grad_scale")  # what the optimizer is told of scaled gradients
# By parameter, a weak reference to the `ScaledGradients` that it belongs to.
_owner: Any = WeakTensorKeyDictionary()
_LAYOUT = attrgetter("layout")


class ScaledGradients:
    """What `initialize` adds to an optimizer.

    A backward pass is between `prepare` and `finish` (or `delay`, `abort`); any number of them come
    before a step.

    Args:
        optimizer: whose 16-bit parameters are replaced by masters, if `with_masters`.
        with_masters: whether the optimizer is to step float32 masters of 16-bit parameters.
        accumulates: whether gradients of masters stay until they are zeroed, as torch's do; in
            Apex's amp a step drops them.
        values: see `Masters`.
    """

    def __init__(
        self,
        optimizer: Any,
        with_masters: bool,
        accumulates: bool = False,
        values: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        # The optimizer refers to this, and so do parameters, which may outlive it.
        self._optimizer = weakref.ref(optimizer)
        self.with_masters = with_masters
        self.accumulates = accumulates
        self.masters = Masters(values)
        self.own: list[Tensor] = []  # parameters of param_groups that are no masters
        self._scaled_by: Tensor | None = None
        self.checked = False  # whether these have been searched for infs and NaNs
        self.stepped = False  # whether a step has used them
        self.unborn = True  # whether there was no step yet
        self.retired = False
        self.found_inf: Tensor | None = None  # not 0 where a pass since the last step had any
        self._before: list[Tensor | None] | None = None  # unscaled gradients of `own`, set aside
        # Of parameters, by id: the scaled gradient that a backward pass has left, and its version.
        self._left: dict[int, tuple[TensorWeakRef, int]] = {}
        self.running = False  # whether a backward pass is, under `scale_loss`
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
            optimizer._step = self._step
        for group in optimizer.param_groups:
            self.add(group)

    @property
    def optimizer(self) -> Any:
        """The optimizer, while there is one."""
        return self._optimizer()

    def add(self, group: dict[str, Any]) -> None:
        """Takes over the parameters of a group.

        Raises:
            RuntimeError: for parameters of another optimizer. Nothing is modified.
        """
        params = group["params"]
        if self.lazy and any(type(p) is not torch.nn.Parameter or _owner_of(p) for p in params):
            raise RuntimeError(
                "a parameter of the group belongs to another optimizer already, or is of a "
                "subclass of torch.nn.Parameter"
            )
        first = len(self.masters.masters)
        if self.with_masters:
            self.masters.replace_in(group)
        new = set(map(id, self.masters.masters[first:]))
        own = [p for p in group["params"] if id(p) not in new]
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
        if self.running:
            raise RuntimeError(
                f"amp.scale_loss within another of the same {type(self.optimizer).__name__}: its "
                "gradients would be of two scales"
            )
        self.masters.check_devices()
        if self.scaled_by is not None and not self.checked:
            self._rescale(scale)
            self.running = True
            return
        if self.scaled_by is not None:
            self._refuse_foreign()
        self.unscale()
        self.running = True
        # Memory of DistributedDataParallel's buckets, of which gradients may be views, is written
        # to whatever .grad is.
        before = [raw_grad(p) for p in self.own]
        self._before = [g.clone() if g is not None and g._is_view() else g for g in before]
        self._drop([*self.own, *self.masters.params])

    def abort(self) -> None:
        """After a backward pass that raised: its gradients are dropped."""
        self.running = False
        if self._before is not None and self.scaled_by is None:
            self._drop([*self.own, *self.masters.params])
            self._restore(self._before)
            self._before = None

    def delay(self, scale: Tensor) -> None:
        """After a backward pass whose gradients are to stay scaled."""
        self.scaled_by, self.checked, self.stepped = scale, False, False
        self.running = False
        self._note_left()

    def finish(self, scale: Tensor, check: bool) -> Tensor | None:
        """After a backward pass: not 0 where it left infs or NaNs, or None without `check`.

        Raises:
            RuntimeError: for sparse gradients.
        """
        raw = self._raw()
        self._refuse_sparse(raw)
        before = self._before or []
        self._before, self.stepped, self.running = None, False, False
        if self._may_stay_scaled(before, raw):
            self._scaled_by, self.checked = scale, True  # watched when the optimizer has measured
            try:
                found = self.optimizer._measure(scale) if check else None
            finally:
                self._watch(True)
            self._note_left()
            return found
        self.scaled_by = None
        self._note_left()
        new = [raw_grad(p) for p in self.own]
        found = self._unscale(scale)
        self._restore(before)
        for p, old, g in zip(self.own, before, new):
            if old is None or g is None:
                continue
            if g._is_view():  # of a bucket, where it stays
                g.add_(old)
                set_raw_grad(p, g)
            else:
                old.add_(g)
        return found if check else None

    def _may_stay_scaled(self, before: list[Tensor | None], raw: list[Tensor]) -> bool:
        if not self.lazy or any(g is not None for g in before) or self.masters.have_grads():
            return False
        # After its first backward pass DistributedDataParallel makes other buckets, once.
        return not (self.unborn and any(map(Tensor._is_view, raw)))

    def unscale(self) -> None:
        """Gradients become what they are without a loss scale; those of masters are made."""
        scale = self.scaled_by
        if scale is None:
            return
        if self.checked and not self.stepped:
            self._refuse_foreign()
        self.scaled_by = None
        for name in _OF_A_STEP:  # where a hook of the step has looked
            getattr(self.optimizer, "__dict__", {}).pop(name, None)
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
        grads = [g for p, g in self._with_grads(self.own) if self._is_left(p, g)]
        wide, narrow = [], []
        for master, p in () if self._used_up() else self.masters.pairs():
            g = raw_grad(p)
            if g is not None and self._is_left(p, g):
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
        found, self.found_inf = self.found_inf, None
        try:
            if self.lazy:
                return self._step_in_two_sweeps(original, found)
            if _overflowed(found):
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
        if self.lazy:  # which call it once, before anything else
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
            raise RuntimeError("the gradients of the closure are finite at no loss scale")

        try:
            return original(close)
        finally:
            self.stepped, self.found_inf = True, None

    def _step_in_two_sweeps(self, original: Callable[..., Any], found: Tensor | None) -> Any:
        optimizer = self.optimizer
        if self.stepped:
            self.unscale()  # of a second step without a backward pass between
        optimizer._checks_gradients = found is not None and self.scaled_by is not None
        if self.scaled_by is not None:
            optimizer.grad_scale = self.scaled_by
        if found is not None:
            optimizer.found_inf = found
        try:
            result = original()
            if optimizer.gradient_writeback != "none":
                self.scaled_by = None
            return result
        finally:
            for name in (*_OF_A_STEP, "found_inf"):
                optimizer.__dict__.pop(name, None)

    def _step(self) -> None:
        """The optimizer's own, after hooks and before hooks: nobody looks."""
        self._watch(False)
        try:
            type(self.optimizer)._step(self.optimizer)
        finally:
            self._watch(self.scaled_by is not None)

    def zeroed(self) -> None:
        """With ``zero_grad`` of the optimizer."""
        self._drop([*self.masters.params, *self.masters.masters])
        self.scaled_by = None
        if self._before is not None:
            self._before = [None] * len(self._before)

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

    def _with_grads(self, params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for p in params:
            grad = raw_grad(p)
            if grad is not None:
                yield p, grad

    def _raw(self) -> list[Tensor]:
        return [g for _, g in self._with_grads([*self.own, *self.masters.params])]

    def _note_left(self) -> None:
        """These gradients are scaled; what takes the place of one is not."""
        params = [*self.own, *self.masters.params]
        self._left = {id(p): (TensorWeakRef(g), g._version) for p, g in self._with_grads(params)}

    def _is_left(self, p: Tensor, grad: Tensor) -> bool:
        left = self._left.get(id(p))
        return left is not None and left[0]() is grad

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
        """A backward pass outside `scale_loss` has added to gradients that were scaled.

        Or, before a step has used these, has put others in their places.
        """
        low = [] if self._used_up() else self.masters.params
        for p, grad in self._with_grads([*self.own, *low]):
            if self._is_left(p, grad):
                if self._left[id(p)][1] == grad._version:
                    continue
            elif self.stepped:
                continue
            raise RuntimeError(
                "gradients were changed between amp.scale_loss and optimizer.step() without being "
                "read through .grad: a backward pass must be under amp.scale_loss, too"
            )


def _overflowed(found_inf: Tensor | None) -> bool:
    return found_inf is not None and bool(found_inf.item() != 0)


def _owner_of(p: Tensor) -> ScaledGradients | None:
    """Whose parameter it is: nobody's any more where the optimizer is gone."""
    reference: weakref.ref[ScaledGradients] | None = _owner.get(p)
    return None if reference is None else reference()


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    grouped: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        grouped.setdefault(tensor.device, []).append(tensor)
    return grouped
