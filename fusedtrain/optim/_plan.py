"""The plan of a step: the arguments of its one call, checked before each use."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._capture import check_captured
from .._graph.warning import level_outside
from ..reference.optimizer_rules import RULES
from ..reference.optimizers import (
    MAX_STATES,
    SCALARS,
    Control,
    GroupOptions,
)
from ..reference.state_codes import is_codes
from ._codes import Q8, check_codes, code_dtype, coded_state, floats, scale_name
from ._distributed import is_distributed, local, shard_number
from ._masters import MASTER, Versions, correction_dtype, is_correction, take_other_form

RULE_NUMBERS = {rule.name: number for number, rule in enumerate(RULES)}
_DROPS = 3  # once or twice others may load a checkpoint
_State = dict[str, Any]  # the entry of a parameter in the optimizer's state


class Numbers(NamedTuple):
    """The options of a parameter group as numbers; `row` makes `GroupOptions` of them."""

    lr: float | Tensor
    weight_decay: float
    option: tuple[float, ...]  # of the rule
    maximize: bool = False
    max_lr: float = 0.0  # for "corrected" weight decay, or 0
    cautious: bool = False

    def row(self, lrs: list[Tensor]) -> tuple[float, ...]:
        """The row of the table; a learning rate that is a tensor joins `lrs`."""
        lr, index = self.lr, -1.0
        if isinstance(lr, Tensor):
            index, lr = float(len(lrs)), 0.0
            assert isinstance(self.lr, Tensor)
            lrs.append(self.lr)
        sign = -1.0 if self.maximize else 1.0
        return GroupOptions(
            float(lr), index, float(self.weight_decay), sign, float(self.max_lr),
            float(self.cautious), tuple(map(float, self.option)),
        ).row()  # fmt: skip


class Store:
    """The scalars of all parameters on one device, and the control values of its last step."""

    def __init__(self, params: list[Tensor], device: torch.device, control: Tensor) -> None:
        self.params = params  # a reference keeps the ids from being reused
        # Random numbers of stochastic rounding differ by column, so the shards of a parameter have
        # different columns. With a common one, rounding errors of two ranks correlate by 0.5.
        count = len(params)
        self.columns = {id(p): i + count * shard_number(p) for i, p in enumerate(params)}
        width = max(self.columns.values(), default=-1) + 1  # 12 bytes a parameter and shard
        self.scalars = torch.zeros(SCALARS, width, dtype=torch.float32, device=device)
        self.views = [{c: row[c] for c in self.columns.values()} for row in self.scalars.unbind()]
        self.control = control
        self.last_step = Control.of(control)
        self.versions = Versions()
        # The first state of each column, for optimizers without saved step counts.
        self.known: dict[int, Tensor] = {}

    def view(self, which: int, column: int) -> Tensor:
        """A number of a parameter: a new view if others have replaced the view's ``.data``."""
        view, number = self.views[which][column], self.scalars[which, column]
        if view.data_ptr() != number.data_ptr():
            self.views[which][column] = view = number
        return view

    def count_one_step(self, loaded: set[int]) -> None:
        """Counts one step for parameters with states (ids) where a checkpoint has no counts."""
        steps = torch.zeros_like(self.scalars[0], device="cpu")
        steps[[column for key, column in self.columns.items() if key in loaded]] = 1
        self.scalars[0].copy_(steps)

    def take_over(self, earlier: Store, low_precision: Iterable[Tensor]) -> None:
        """Scalars and versions of parameters that both have, and of the model's behind masters."""
        self.versions.take_over(earlier.versions, [*self.params, *low_precision])
        for key, column in self.columns.items():
            before = earlier.columns.get(key)
            if before is not None:
                self.scalars[:, column].copy_(earlier.scalars[:, before])
                if before in earlier.known:
                    self.known[column] = earlier.known[before]


class Needs(NamedTuple):
    """The kinds of states that an optimizer's parameters have."""

    slots: tuple[tuple[str | None, ...], ...]  # of each group, in the order of the rule
    scalar_names: tuple[str | None, ...]
    initial: Callable[[str], float]
    state_dtype: torch.dtype | str | None
    wide_states: bool
    master_weights: bool | str
    ema: bool
    rule: str

    def has_master(self, p: Tensor) -> bool:
        return bool(self.master_weights) and p.dtype in (torch.float16, torch.bfloat16)

    def copies(self, p: Tensor) -> list[str]:
        """The states that begin as copies of their parameter."""
        return [MASTER] * self.has_master(p) + ["ema"] * self.ema

    def dtype(self, p: Tensor) -> torch.dtype:
        """The dtype of the states that are as large as their parameter, and not in codes."""
        if isinstance(self.state_dtype, torch.dtype):
            return self.state_dtype
        wide = self.wide_states or self.state_dtype == Q8
        return torch.promote_types(p.dtype, torch.float32) if wide else p.dtype

    def codes(self, group: int, which: int, p: Tensor) -> torch.dtype | None:
        """The dtype of the codes of a parameter's state, or None: a state of floats."""
        if self.state_dtype != Q8:
            return None
        return code_dtype(self.rule, self.slots[group], which, p)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor can be read: meta tensors and those of a FakeTensorMode have no values."""
    return not tensor.is_meta and not hasattr(tensor, "fake_mode")


def _is_of_others(buffer: Tensor, known: Tensor | None) -> bool:
    """Whether somebody else has set a buffer. A copy of one that no step has filled is zero."""
    mine = local(buffer)
    return buffer is not known and has_values(mine) and bool(mine.any())


def _places(tensors: list[Tensor]) -> list[Any]:
    """The properties that replacing ``.data`` may change."""
    facts = (Tensor.data_ptr, Tensor.stride, attrgetter("dtype"))
    return [list(map(fact, tensors)) for fact in facts]


class UpdatePlan:
    """The arguments of one call: parameters with gradients on one device, and their states."""

    def __init__(
        self,
        store: Store,
        state: dict[Tensor, _State],
        params: list[Tensor],
        groups: list[int],
        needs: Needs,
        low_precision: Mapping[int, Tensor],
    ) -> None:
        self.store = store
        self.params = params
        self.needs = needs
        # The model's parameters; for a master in `params` its 16-bit parameter.
        self.models = [low_precision.get(id(p), p) for p in params]
        self.local_params = [local(p) for p in self.models]
        self.distributed = any(map(is_distributed, params))
        self.dicts: list[_State | None] = []
        # The contents of the dictionaries: owners[k][names[k]] was tensors[k].
        self.owners: list[_State] = []
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.states: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.behind: list[tuple[Tensor, Tensor, Tensor]] = []  # model's parameter, part, master
        self.whole: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its part, float32 master
        self.split: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its part, correction
        self.stale, self.drops = False, 0  # whether others made corrections 0; steps in a row
        self.averages: list[Tensor] = []
        self.sums: Tensor | None = None
        rows: list[list[int]] = []
        for p, inner, group in zip(params, self.local_params, groups, strict=True):
            p_state = state.get(p, {})
            column = store.columns[id(p)]
            row = [group, column]
            slots = needs.slots[group]
            named = [name for name in slots if name and needs.scalar_names[0] is None]
            if any(p_state.get(name) is None for name in named):
                store.view(0, column).zero_()  # without a saved step count states start anew
            elif named and _is_of_others(p_state[named[0]], store.known.get(column)):
                store.view(0, column).clamp_(min=1)  # as torch: a buffer of others is no first one
            # The step count is the first key, as in torch.
            self._scalar(p_state, needs.scalar_names[0], store.view(0, column))
            for k, name in enumerate(slots):
                if name is None:
                    row.append(-1)
                else:
                    row.append(self._large(p_state, name, p, inner, needs.codes(group, k, p)))
            if named:
                store.known[column] = p_state[named[0]]
            row += [-1] * (MAX_STATES - len(slots))
            is_master = self.models[len(rows)] is not p
            if is_master:
                row.append(len(self.masters))
                self.masters.append(local(p))
                self.behind.append((self.models[len(rows)], inner, self.masters[-1]))
                store.versions.compare(*self.behind[-1])
            else:
                row.append(self._master(p_state, p, inner))
            row.append(self._copy(p_state, "ema", p, self.averages) if needs.ema else -1)
            for which, name in enumerate(needs.scalar_names[1:], 1):
                self._scalar(p_state, name, store.view(which, column))
            if p_state:  # torch's SGD without momentum has no states either
                state[p] = p_state
            self.dicts.append(state.get(p))
            rows.append(row)
        self.rows = torch.tensor(rows, dtype=torch.int64, device="cpu")
        # A step increments the versions of these tensors.
        self.written = [
            *self.local_params, *(local(p) for p, m in zip(params, self.models) if p is not m)
        ]  # fmt: skip
        self.places = _places(self.written)
        kept = dict(zip(map(id, reversed(self.owners)), reversed(self.tensors)))
        self.firsts = list(kept.values())  # the first state of each parameter
        self.pointers = self._pointers()
        self.all_dicts: list[int] | None = None  # ids; not looked at yet

    def fits(self, state: dict[Tensor, _State]) -> bool:
        """Whether memory and states are still those that the plan was built for.

        ResNet-50's 161 parameters take 60 us; loops in Python would take 200.
        """
        # Hashing a tensor is a call to Python: look tensors up only if a dictionary has changed.
        all_dicts = list(map(id, state.values()))
        if all_dicts != self.all_dicts:
            if not all(map(is_, map(state.get, self.params), self.dicts)):
                return False
            self.all_dicts = all_dicts
        return self.is_in_place()

    def is_in_place(self) -> bool:
        """Whether states and parameters are still the plan's tensors, at the same addresses."""
        if not all(map(is_, map(dict.get, self.owners, self.names), self.tensors)):
            return False
        if self._pointers() != self.pointers:  # offloading may replace the ``.data`` of all states
            return False
        written = self.written
        if self.distributed:
            written = [*map(local, self.models), *written[len(self.models) :]]
        return _places(written) == self.places

    def _pointers(self) -> list[int]:
        firsts = map(local, self.firsts) if self.distributed else self.firsts
        return list(map(Tensor.data_ptr, firsts))

    def follow_parameters(self) -> None:
        """Copies to masters what others have written to parameters, where the step does not."""
        for p, inner, master in self.behind:
            self.store.versions.follow(p, inner, master)
        for p, inner, master in self.whole:
            self.store.versions.take_master(p, inner, master)
        for one in self.split:
            self.stale |= self.store.versions.drop_stale(*one)

    def note_versions(self) -> None:
        """Records versions after a step: a later version means that others wrote to a parameter."""
        self.store.versions.note_whole([(p, inner) for p, inner, _ in self.behind])
        for p, _, master in self.whole:
            self.store.versions.note_master(p, master)
        for p, inner, _ in self.split:
            self.store.versions.note(p, inner)
        self.drops, self.stale = self.drops + 1 if self.stale else 0, False
        if self.drops == _DROPS:
            warnings.warn(
                f"split masters: others have written to the parameters before each of {_DROPS} "
                "steps, and every time the corrections became 0, so that small updates are lost. "
                "For SAM call optimizer.perturb() and restore(); for clamps and masks take "
                "master_weights=True",
                stacklevel=level_outside(),
            )

    def _keep(self, p_state: _State, name: str, tensor: Tensor) -> None:
        p_state[name] = tensor
        self.owners.append(p_state)
        self.names.append(name)
        self.tensors.append(tensor)

    def _large(
        self, p_state: _State, name: str, p: Tensor, inner: Tensor, codes: torch.dtype | None
    ) -> int:
        """A state as large as its parameter, made or laid out like the parameter; codes of a dtype,
        with their scales behind them in the list of states, or (None) floats."""
        dtype, fill = self.needs.dtype(p), self.needs.initial(name)
        tensor = p_state.get(name)
        if tensor is not None and tensor.shape != p.shape:
            raise ValueError(f"state {name!r} has shape {tuple(tensor.shape)}, its parameter "
                             f"{tuple(p.shape)}")  # fmt: skip
        if tensor is not None:
            check_codes(name, p_state, codes or (tensor.dtype if is_codes(tensor) else None))
        if codes is not None:
            tensor, scales = coded_state(p_state, name, p, codes, fill)
            self._keep(p_state, name, tensor)
            self._keep(p_state, scale_name(name), scales)
            self.states += [local(tensor), scales]
            return len(self.states) - 2
        if tensor is None:
            tensor = torch.full_like(p, fill, dtype=dtype, memory_format=torch.preserve_format)
        elif is_codes(tensor):
            tensor = floats(tensor, p_state[scale_name(name)])
        tensor = self._laid_out(tensor, inner, dtype, p)
        self._keep(p_state, name, tensor)
        p_state.pop(scale_name(name), None)  # not before: memory may not suffice for floats
        self.states.append(local(tensor))
        return len(self.states) - 1

    def _master(self, p_state: _State, p: Tensor, inner: Tensor) -> int:
        """The master of a 16-bit parameter: float32 weights or a correction; -1 for none."""
        kind = self.needs.master_weights
        if not self.needs.has_master(p):
            return -1
        dtype, versions = correction_dtype(kind), self.store.versions
        tensor = p_state.get(MASTER)
        if is_correction(tensor):
            versions.drop_stale(p, inner, local(tensor))
        if take_other_form(p_state, p, dtype):
            versions.forget(p)
        if dtype is None:
            place = self._copy(p_state, MASTER, p, self.masters)
            self.whole.append((p, inner, self.masters[place]))
            return place
        tensor = p_state.get(MASTER)
        if tensor is None:
            tensor = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            versions.forget(p)
        tensor = self._laid_out(tensor, inner, dtype, p)
        self._keep(p_state, MASTER, tensor)
        self.masters.append(local(tensor))
        self.split.append((p, inner, self.masters[-1]))
        return len(self.masters) - 1

    def _copy(self, p_state: _State, name: str, p: Tensor, into: list[Tensor]) -> int:
        """Master weights or an average, first a copy of p; float32 for 16-bit parameters."""
        dtype = torch.float64 if p.dtype is torch.float64 else torch.float32
        tensor = p_state.get(name)
        if tensor is None:
            tensor = torch.empty_like(p, dtype=dtype, memory_format=torch.preserve_format)
            tensor.copy_(p)
        tensor = self._laid_out(tensor, local(p), dtype, p)
        self._keep(p_state, name, tensor)
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

    def _scalar(self, p_state: _State, name: str | None, view: Tensor) -> None:
        """Makes a number of the parameter a view of the store, with its loaded value."""
        if name is None:
            return
        value = p_state.get(name)
        if value is None:
            view.zero_()
        elif value is not view:
            if isinstance(value, Tensor):
                view.copy_(value.reshape(()), non_blocking=True)
            else:
                view.fill_(value)
        self._keep(p_state, name, view)


def on_device(number: Tensor | None, device: torch.device) -> Tensor | None:
    """A learning rate, loss scale or flag as kernels take it: there, float32 or float64.

    Raises:
        RuntimeError: the number is in host memory, and a CUDA graph is being captured.
    """
    if number is None:
        return None
    if number.device != device:
        check_captured(number, "a learning rate or loss scale")
        number = number.to(device, non_blocking=True)
    return number if number.dtype in (torch.float32, torch.float64) else number.float()
