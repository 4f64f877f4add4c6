"""The plan of a step: everything that its one call needs, compared before each use."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.optimizer_rules import RULES
from ._distributed import is_distributed, local

SCALARS = 3  # numbers that a parameter has: step, two moments
STATES = 3
DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
RULE_NUMBERS = {rule.name: number for number, rule in enumerate(RULES)}


class Numbers(NamedTuple):
    """A parameter group as a row of the table (OptionGroup of csrc/ops.h)."""

    lr: float | Tensor
    weight_decay: float
    option: tuple[float, ...]  # of the rule
    maximize: bool = False
    max_lr: float = 0.0  # of "corrected" weight decay, or 0
    cautious: bool = False

    def row(self, lrs: list[Tensor]) -> tuple[float, ...]:
        """The row; a learning rate that is a tensor joins `lrs`."""
        lr, index = self.lr, -1.0
        if isinstance(lr, Tensor):
            index, lr = float(len(lrs)), 0.0
            assert isinstance(self.lr, Tensor)
            lrs.append(self.lr)
        padding = (0.0,) * (8 - len(self.option))
        sign = -1.0 if self.maximize else 1.0
        cautious = float(self.cautious)
        return (
            float(lr), index, float(self.weight_decay), sign, float(self.max_lr), cautious,
            *map(float, self.option), *padding,
        )  # fmt: skip


class Store:
    """The scalars of all parameters on one device, and what the last step there decided."""

    def __init__(self, params: list[Tensor], device: torch.device) -> None:
        self.params = params  # also keeps their ids from being taken by others
        self.columns = {id(p): column for column, p in enumerate(params)}
        self.scalars = torch.zeros(SCALARS, len(params), device=device)
        self.views = [row.unbind() for row in self.scalars.unbind()]
        self.control = torch.zeros(8, device=device)


class Needs(NamedTuple):
    """What kind of states an optimizer's parameters have."""

    slots: tuple[tuple[str | None, ...], ...]  # of each group, in the order of the rule
    scalar_names: tuple[str | None, ...]
    initial: Callable[[str], float]
    state_dtype: torch.dtype | None
    master_weights: bool
    ema: bool


class Plan:
    """The arguments of one call: parameters with gradients on one device, and their states."""

    def __init__(
        self,
        store: Store,
        state: dict[Tensor, dict[str, Any]],
        params: list[Tensor],
        groups: list[int],
        needs: Needs,
    ) -> None:
        self.store = store
        self.params = params
        self.needs = needs
        self.local_params = [local(p) for p in params]
        self.distributed = any(map(is_distributed, params))
        self.dicts: list[dict[str, Any]] = []
        # What the dictionaries held: tensor k was found in owner k under name k.
        self.owners: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.states: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.averages: list[Tensor] = []
        self.sums: Tensor | None = None
        rows = []
        for p, inner, group in zip(params, self.local_params, groups, strict=True):
            own = state[p]
            self.dicts.append(own)
            column = store.columns[id(p)]
            row = [group, column]
            for name in needs.slots[group]:
                row.append(-1 if name is None else self._large(own, name, p, inner, needs))
            row += [-1] * (STATES - len(needs.slots[group]))
            has_master = needs.master_weights and p.dtype in (torch.float16, torch.bfloat16)
            row.append(self._copy(own, "master_param", p, self.masters) if has_master else -1)
            row.append(self._copy(own, "ema", p, self.averages) if needs.ema else -1)
            for which, name in enumerate(needs.scalar_names):
                self._scalar(own, name, store.views[which][column])
            rows.append(row)
        self.rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        self.addresses = list(map(Tensor.data_ptr, self.local_params))
        self.all_dicts: list[int] = []

    def fits(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """Whether memory and states are still those that the plan was built for.

        ResNet-50's 161 parameters take 60 us; loops in Python would take 200.
        """
        # The hash of a tensor is a call to Python: ask for each only where something has changed.
        all_dicts = list(map(id, state.values()))
        if all_dicts != self.all_dicts:
            if not all(map(is_, map(state.get, self.params), self.dicts)):
                return False
            self.all_dicts = all_dicts
        if not all(map(is_, map(dict.get, self.owners, self.names), self.tensors)):
            return False
        params = list(map(local, self.params)) if self.distributed else self.params
        return list(map(Tensor.data_ptr, params)) == self.addresses

    def _keep(self, own: dict[str, Any], name: str, tensor: Tensor) -> None:
        own[name] = tensor
        self.owners.append(own)
        self.names.append(name)
        self.tensors.append(tensor)

    def _large(self, own: dict[str, Any], name: str, p: Tensor, inner: Tensor, needs: Needs) -> int:
        """A state as large as its parameter: made, or taken and laid out like the parameter."""
        dtype = needs.state_dtype or p.dtype
        tensor = own.get(name)
        if tensor is None:
            fill = needs.initial(name)
            tensor = torch.full_like(p, fill, dtype=dtype, memory_format=torch.preserve_format)
        elif tensor.shape != p.shape:
            raise ValueError(f"state {name!r} has shape {tuple(tensor.shape)}, its parameter "
                             f"{tuple(p.shape)}")  # fmt: skip
        tensor = self._laid_out(tensor, inner, dtype, p)
        self._keep(own, name, tensor)
        self.states.append(local(tensor))
        return len(self.states) - 1

    def _copy(self, own: dict[str, Any], name: str, p: Tensor, into: list[Tensor]) -> int:
        """Master weights or an average: float32 for 16-bit parameters, at first what these are."""
        dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
        tensor = own.get(name)
        if tensor is None:
            tensor = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format)
            tensor.copy_(p)
        tensor = self._laid_out(tensor, local(p), dtype, p)
        self._keep(own, name, tensor)
        into.append(local(tensor))
        return len(into) - 1

    def _laid_out(self, tensor: Tensor, inner: Tensor, dtype: torch.dtype, p: Tensor) -> Tensor:
        model = torch.empty_like(inner, memory_format=torch.preserve_format)
        mine = local(tensor)
        if mine.stride() == model.stride() and tensor.dtype == dtype and mine.device == p.device:
            return tensor
        if mine is not tensor:
            return torch.empty_like(p, dtype=dtype).copy_(tensor)
        return torch.empty_like(model, dtype=dtype).copy_(tensor)

    def _scalar(self, own: dict[str, Any], name: str | None, view: Tensor) -> None:
        """A number of the parameter lives in the store; what was loaded moves there."""
        if name is None:
            return
        value = own.get(name)
        if value is not None and value is not view:
            if isinstance(value, Tensor):
                view.copy_(value.reshape(()), non_blocking=True)
            else:
                view.fill_(value)
        self._keep(own, name, view)
