"""Float32 master weights in an optimizer, behind 16-bit parameters in a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..._torch_private import foreach_copy_
from ...reference.split_weights import follow

_DEVICE = attrgetter("device")
HALF_DTYPES = (torch.float16, torch.bfloat16)

# Masters of 16-bit parameters, for state dicts of the model.
_master_of: Any = WeakTensorKeyDictionary()
_loaded: Any = WeakTensorKeyDictionary()  # parameters whose master a checkpoint has set


def needs_master(p: Tensor) -> bool:
    """Whether an optimizer should step float32 weights in place of a parameter."""
    return p.requires_grad and p.dtype in HALF_DTYPES


class Masters:
    """Pairs of a master weight and the parameter of the model that is its rounded copy.

    If others write to a parameter (a loaded checkpoint, a clamp), the next step copies the changed
    elements to its master. Elements that still equal the rounded master keep the master's value.
    """

    def __init__(self, values: Mapping[int, Tensor] = MappingProxyType({})) -> None:
        """`values`: by the id of a parameter, its value before rounding to 16 bits."""
        self._values = values
        self.masters: list[Tensor] = []
        self.params: list[Tensor] = []
        self.param_of: dict[int, Tensor] = {}  # by the id of the master
        self._seen: list[tuple[int, int]] = []  # of parameters: version and place in memory
        self._begun = 0  # number of masters that have been through `begin`

    def replace_in(self, group: dict[str, Any]) -> None:
        """Puts masters into the group for its 16-bit parameters that require gradients."""
        for i, p in enumerate(group["params"]):
            if id(p) not in self.param_of and needs_master(p):
                value = self._values.get(id(p), p.detach())
                if value.device != p.device:
                    value = p.detach()
                wide = value.to(torch.float32, memory_format=torch.preserve_format)
                master = torch.nn.Parameter(wide)
                master.data.copy_(follow(p.detach(), wide))  # p may have changed since rounding
                group["params"][i] = master
                self.masters.append(master)
                self.params.append(p)
                self.param_of[id(master)] = p
                self._seen.append(_version(p))
                _master_of[p] = master.detach()  # refers to no optimizer, so not back to p

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of master and parameter."""
        return zip(self.masters, self.params, strict=True)

    def check_devices(self) -> None:
        """Raises RuntimeError if the model has moved to another device."""
        if list(map(_DEVICE, self.masters)) == list(map(_DEVICE, self.params)):
            return
        for master, p in self.pairs():
            if master.device != p.device:
                raise RuntimeError(
                    f"a parameter is on {p.device}, its master weights on {master.device}: move "
                    "the model before amp.initialize"
                )

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first backward pass, replaces masters of parameters that others wrote to.

        DistributedDataParallel copies one rank's rounded weights to all ranks. On that rank the
        unrounded masters would still fit, and differ from the other ranks' masters.
        """
        for i in range(self._begun, len(self.masters)):
            p = self.params[i]
            if _version(p) != self._seen[i] and p not in _loaded:
                self.masters[i].copy_(p)
                self._seen[i] = _version(p)
        self._begun = len(self.masters)

    @torch.no_grad()
    def follow_parameters(self, begun: bool = False) -> None:
        """Updates masters of parameters that others have written to.

        Args:
            begun: only masters that `begin` has seen.
        """
        for i, (master, p) in enumerate(self.pairs()):
            if begun and i >= self._begun:
                break
            if _version(p) != self._seen[i]:
                master.copy_(follow(p, master))
                self._seen[i] = _version(p)

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Parameters become the rounded masters."""
        if self.masters:
            foreach_copy_(self.params, self.masters)
            self._seen = list(map(_version, self.params))


def _version(p: Tensor) -> tuple[int, int]:
    """Version and place in memory, which others may change by writing to ``p.data``."""
    return p._version, p.data_ptr()


@torch.no_grad()
def full_precision(p: Tensor) -> Tensor:
    """A 16-bit tensor of a model in float32, with its master's precision."""
    master = _master_of.get(p)
    if master is None or master.device != p.device:
        return p.detach().to(torch.float32, copy=True)
    return follow(p.detach(), master.detach())


@torch.no_grad()
def load_full_precision(p: Tensor, value: Any) -> None:
    """Copies a checkpoint's values to p's master, before loading rounds them into p."""
    master = _master_of.get(p)
    if master is not None and isinstance(value, Tensor) and value.shape == p.shape:
        master.copy_(value)
        _loaded[p] = True
