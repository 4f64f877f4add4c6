"""The state of one optimizer's gradients: which are scaled, the scale, and unscaling.

`GradientState` changes the class of its parameters while their gradients are scaled, and a
`LazyParameter` asks its `GradientState` to unscale. The two refer to each other, so one file.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import compress, repeat
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..._torch_private import foreach_copy_, foreach_mul_, unscale_
from ...optim import FusedOptimizer
from ._masters import Masters
from ._raw import NotedGradients, raw_grad, set_raw_grad

_OF_A_STEP = ("_checks_gradients", "grad_scale")  # the optimizer's attributes during a scaled step
# By parameter, a weak reference to its `GradientState`.
_owner: Any = WeakTensorKeyDictionary()
_LAYOUT = attrgetter("layout")
_ZEROING = inspect.unwrap(torch.nn.Module.zero_grad).__code__


class GradientState:
    """Base of `ScaledGradients`.

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
        # A weak reference: the parameters refer to this object and may outlive the optimizer.
        self._optimizer = weakref.ref(optimizer)
        self.with_masters = with_masters
        self.accumulates = accumulates
        self.masters = Masters(values)
        self.plain_params: list[Tensor] = []  # parameters in param_groups that are not masters
        self._scaled_by: Tensor | None = None
        self.checked = False  # whether the gradients have been searched for infs and NaNs
        self.stepped = False  # whether a step has used the gradients
        self.unborn = True  # whether there was no step yet
        self.retired = False
        self.found_inf: Tensor | None = None  # not 0: a pass since the last step overflowed
        self._before: list[Tensor | None] | None = None  # stashed unscaled grads of `plain_params`
        self._places: list[Tensor | None] = []  # the tensors that held the stashed gradients
        self._left = NotedGradients()  # the scaled gradients, as a backward pass left them
        self._zeros = NotedGradients()  # the gradients that zero_grad zeroed
        self._zeros_before: list[tuple[Tensor, Tensor]] = []  # zeroed gradients, stashed
        self.running = False  # whether a backward pass is running under `scale_loss`
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
        saved = optimizer.state_dict() if optimizer.state else None
        for group in optimizer.param_groups:
            self.add(group)
        if saved is not None:
            optimizer.state.clear()
            optimizer.load_state_dict(saved)  # casts states to the parameters' present dtypes

    @property
    def optimizer(self) -> Any:
        """The optimizer, or None once it is gone."""
        return self._optimizer()

    def add(self, group: dict[str, Any]) -> None:
        """Takes over the parameters of a group.

        Raises:
            RuntimeError: for another optimizer's parameters. Nothing is modified.
        """
        params = group["params"]
        if self.lazy and any(type(p) is not torch.nn.Parameter or _owner_of(p) for p in params):
            raise RuntimeError(
                "a parameter of the group belongs to another optimizer already, or its class is a "
                "subclass of torch.nn.Parameter"
            )
        first = len(self.masters.masters)
        if self.with_masters:
            self.masters.replace_in(group)
        new = set(map(id, self.masters.masters[first:]))
        plain = [p for p in group["params"] if id(p) not in new]
        self.plain_params += plain
        if not self.lazy:
            return
        _owner.update((p, weakref.ref(self)) for p in plain)
        self._watch(self.scaled_by is not None)
        self.optimizer._read_gradients(self._gradients_of, self.masters.param_of)

    def follow_parameters(self) -> None:
        """Masters take what others have written to the model, before they are read."""
        if self.lazy:
            self.optimizer._follow_parameters()
        else:
            self.masters.follow_parameters(begun=True)

    def retire(self) -> None:
        """Leaves the parameters to another optimizer."""
        self.unscale()
        self.retired = True
        for p in self.plain_params:
            _owner.pop(p, None)

    @property
    def scaled_by(self) -> Tensor | None:
        """The scale of the gradients; None: they are unscaled."""
        return self._scaled_by

    @scaled_by.setter
    def scaled_by(self, scale: Tensor | None) -> None:
        changes = (scale is None) != (self._scaled_by is None)
        self._scaled_by = scale
        if changes and self.lazy:
            self._watch(scale is not None)

    def _watch(self, on: bool) -> None:
        """Makes reading a gradient unscale it, or not, from now on."""
        kind = self._kind if on else torch.nn.Parameter
        for p in self.plain_params:
            p.__class__ = kind
        for p in self.masters.masters:
            p.__class__ = kind

    def _step(self) -> None:
        """The optimizer's `_step`, between its hooks: reading a gradient does not unscale it."""
        self._watch(False)
        try:
            type(self.optimizer)._step(self.optimizer)
        finally:
            self._watch(self.scaled_by is not None)

    def unscale(self) -> None:
        """Divides the gradients by the loss scale, and makes the masters' gradients."""
        scale = self.scaled_by
        if scale is None:
            return
        if self.checked and not self.stepped:
            self._refuse_foreign()
        self.scaled_by = None
        for name in _OF_A_STEP:  # set if a hook of the step read a gradient
            getattr(self.optimizer, "__dict__", {}).pop(name, None)
        if not self._raw():
            return
        overflow = self._unscale(scale)
        if not self.checked:
            self.add_overflow(overflow)

    def add_overflow(self, overflow: Tensor) -> None:
        """Skips the next step if the 0-dim `overflow` is not 0."""
        if self.found_inf is not None:
            overflow = torch.maximum(self.found_inf.to(overflow.device), overflow)
        self.found_inf = overflow

    @torch.no_grad()
    def _unscale(self, scale: Tensor) -> Tensor:
        """Divides in place, and adds to the masters' gradients. Returns 0 if all are finite."""
        added: list[tuple[Tensor, Tensor]] = []
        plain = zip(*self._with_grads(self.plain_params), strict=True)
        grads = [g for p, g in plain if self._left.has(p, g)]
        # The CUDA kernel takes no bfloat16: https://github.com/pytorch/pytorch/issues/127176.
        brain = [g for g in grads if g.dtype is torch.bfloat16]
        grads = [g for g in grads if g.dtype is not torch.bfloat16]
        widened = [g.float() for g in brain]
        wide, narrow = [], []
        for master, p in () if self._used_up() else self.masters.pairs():
            g = raw_grad(p)
            if g is not None and self._left.has(p, g):
                copy = torch.empty_like(g, dtype=torch.float32)
                wide.append(copy)
                narrow.append(g)
                old = raw_grad(master)
                if old is None:
                    set_raw_grad(master, copy)
                else:
                    added.append((old, copy))
        if wide:
            foreach_copy_(wide, narrow)
        found_inf = torch.zeros((), dtype=torch.float32, device=scale.device)
        inverse_scale = scale.double().reciprocal().float()
        for device, some in _by_device([*grads, *widened, *wide]).items():
            device_found_inf = torch.zeros((), dtype=torch.float32, device=device)
            unscale_(some, device_found_inf, inverse_scale.to(device))
            # A blocking copy: a CPU tensor is read at once.
            found_inf = torch.maximum(found_inf, device_found_inf.to(found_inf.device))
        if brain:
            foreach_copy_(brain, widened)
        for old, copy in added:
            old.add_(copy)
        return found_inf

    @torch.no_grad()
    def _rescale(self, scale: Tensor) -> None:
        """Brings gradients that `delay` left to `scale`, if another loss has changed the scale."""
        if self.scaled_by is not None and self.scaled_by is not scale:
            ratio = scale / self.scaled_by
            for device, grads in _by_device(self._raw()).items():
                foreach_mul_(grads, ratio.to(device))
            self.scaled_by = scale

    def drop(self, master: Tensor) -> None:
        """Drops the scaled gradient that would become the master's gradient."""
        low = self.masters.param_of.get(id(master))
        if low is not None and self.scaled_by is not None:
            set_raw_grad(low, None)

    def _used_up(self) -> bool:
        """Whether masters' gradients are gone, though their parameters' gradients remain."""
        return self.stepped and not self.accumulates

    def _gradients_of(self, params: list[Tensor]) -> list[Tensor | None]:
        """The gradients for the fused step: a master's, or its parameter's scaled one."""
        grads = list(map(raw_grad, params))
        if self.scaled_by is not None and not self._used_up():
            param_of = self.masters.param_of
            for i, p in enumerate(params):
                if grads[i] is None and id(p) in param_of:
                    grads[i] = raw_grad(param_of[id(p)])
        return grads

    def _with_grads(self, params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters that have gradients, and their gradients."""
        all_grads = list(map(raw_grad, params))
        grads = [grad for grad in all_grads if grad is not None]
        if len(grads) != len(params):
            params = list(compress(params, [grad is not None for grad in all_grads]))
        return params, grads

    def _raw(self) -> list[Tensor]:
        return self._with_grads([*self.plain_params, *self.masters.params])[1]

    def _note_left(self) -> None:
        """Notes the present gradients as scaled; a gradient that replaces one is not."""
        self._left = NotedGradients(*self._with_grads([*self.plain_params, *self.masters.params]))

    def _drop(self, params: Iterable[Tensor]) -> None:
        deque(map(set_raw_grad, params, repeat(None)), maxlen=0)

    def _restore_zeros(self) -> None:
        """Puts zeroed gradients back where the backward pass has not reached the parameter."""
        for p, grad in self._zeros_before:
            if raw_grad(p) is None:
                set_raw_grad(p, grad)
        self._zeros_before = []

    def _refuse_sparse(self, grads: list[Tensor]) -> None:
        if list(map(_LAYOUT, grads)).count(torch.strided) != len(grads):
            shape = next(tuple(g.shape) for g in grads if g.layout is not torch.strided)
            raise RuntimeError(
                f"{type(self.optimizer).__name__}: a parameter of shape {shape} has a sparse "
                "gradient, which amp.scale_loss does not unscale; use torch.amp.GradScaler and "
                "torch.optim, or a dense gradient (sparse=False)"
            )

    def _refuse_foreign(self) -> None:
        """Raises if a backward pass outside `scale_loss` has added to scaled gradients.

        Or if, before a step has used the gradients, others have replaced them.
        """
        low = [] if self._used_up() else self.masters.params
        params, grads = self._with_grads([*self.plain_params, *low])
        if self._left.are(params, grads):
            return
        for p, grad in zip(params, grads, strict=True):
            if self._left.has(p, grad, unchanged=True):
                continue
            if self.stepped and not self._left.has(p, grad):
                continue
            raise RuntimeError(
                "gradients were changed between amp.scale_loss and optimizer.step() without being "
                "read through .grad: a backward pass must be under amp.scale_loss, too"
            )


class LazyParameter(torch.nn.Parameter):
    """A parameter whose gradient is unscaled when it is read.

    Each optimizer has its own subclass. Parameters are of that class only while their gradients are
    scaled: torch takes three times as long to read any attribute of a subclass. Pickling makes a
    plain parameter.
    """

    _gradients: GradientState

    @property
    def grad(self) -> Tensor | None:
        """The unscaled gradient."""
        gradients = self._gradients
        scaled = gradients.scaled_by is not None and not gradients.running
        if scaled and not _drops(sys._getframe(1)):
            gradients.unscale()
        return raw_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        gradients = self._gradients
        if value is not None and gradients.scaled_by is not None and not gradients.running:
            gradients.unscale()
        if value is None:
            gradients.drop(self)
        set_raw_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self._gradients.drop(self)
        set_raw_grad(self, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A plain parameter: a copied model's belong to no optimizer."""
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(data, self.requires_grad)
        copied: torch.nn.Parameter = memo[id(self)]
        return copied


def _drops(frame: Any) -> bool:
    """Whether the frame is Module.zero_grad, which reads a gradient only to drop it."""
    return frame.f_code is _ZEROING and bool(frame.f_locals.get("set_to_none", False))


def _owner_of(p: Tensor) -> GradientState | None:
    """The parameter's `GradientState`; None without one or once its optimizer is gone."""
    reference: weakref.ref[GradientState] | None = _owner.get(p)
    return None if reference is None else reference()


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    grouped: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        grouped.setdefault(tensor.device, []).append(tensor)
    return grouped
