"""State dicts and pickles of the optimizers, from and for torch, timm and Apex."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._graph.warning import level_outside
from ..reference.split_weights import CORRECTIONS
from ..reference.state_codes import is_codes
from ..reference.stochastic_rounding import seed_after
from ._codes import (
    Q8,
    any_code_dtype,
    check_codes,
    coded_state,
    for_checkpoint,
    is_scale_name,
    scale_name,
)
from ._distributed import check_state
from ._makers import foreign_maker, states_of
from ._masters import CORRECTION, MASTER, is_correction, joined
from ._options import of_itself
from ._perturb import Perturbs
from ._plan import Needs, has_values
from ._release import Releases

_STREAM = "rounding_stream"  # key of the seed with which stochastic rounding goes on


class Checkpoints(Releases, Perturbs):
    """The part of `FusedOptimizer` that saves and loads."""

    def _group_step(self, group: dict[str, Any], count: float) -> Any:
        """The step count of a saved group, or None if the counterpart has none."""
        return None

    def state_dict(self, *, compressed: bool = False) -> dict[str, Any]:
        """As torch's: same keys, shapes and dtypes for optimizers that torch has.

        Stochastic rounding, also of 8-bit states, adds a key: "rounding_stream", the integer with
        which its random numbers go on after `load_state_dict`.

        Momentum buffers that every step so far skipped are left out, as torch would not have made
        them. Looking for them waits for the device, and so do step counts that torch keeps on the
        CPU. Where timm or Apex count steps by group, a group has its parameters' largest count.

        Args:
            compressed: 8-bit states are saved as codes, with their scales under the name of the
                state and "_scale"; split master weights as corrections ("master_correction") of the
                parameters, which must be saved beside them. By default all are float32 (masters
                under "master_param"), and load into the same codes.
        """
        self._check_closed("a state dict")
        self._follow_parameters()
        hook = self.register_state_dict_post_hook(
            lambda _, saved: self._as_torch_has_it(saved, compressed), prepend=True
        )
        try:
            state_dict: dict[str, Any] = super().state_dict()
        finally:
            hook.remove()
        return state_dict

    def _as_torch_has_it(self, state_dict: dict[str, Any], compressed: bool) -> dict[str, Any]:
        unborn, state = self._without_a_step(), dict(state_dict["state"])
        needs = self._state_needs()
        groups = zip(state_dict["param_groups"], self.param_groups, strict=True)
        for which, (saved, group) in enumerate(groups):
            counts = []
            for number, p in zip(saved["params"], group["params"], strict=True):
                p_state = self.state.get(p)
                if not p_state:
                    continue
                if compressed:
                    p_state = _codes_ahead(p_state, p, needs, which)
                kept = {**for_checkpoint(p_state, compressed), **self._copies_ahead(p, p_state)}
                kept = {name: value for name, value in kept.items() if value is not None}
                if id(p) in unborn:
                    kept = _without_momentum(kept)
                if is_correction(kept.get(MASTER)):
                    if compressed:
                        kept[CORRECTION] = kept.pop(MASTER)
                    else:
                        kept[MASTER] = joined(self._swapped.get(id(p), p), kept[MASTER])
                if isinstance(kept.get("step"), Tensor) and has_values(kept["step"]):
                    kept["step"] = _saved_step(kept["step"], group)
                    counts.append(kept["step"])
                state[number] = kept
                if not kept:
                    del state[number]
            count = self._group_step(group, max(map(float, counts))) if counts else None
            if count is not None:
                saved["step"] = count
        state_dict["state"] = state
        if self._fused_options["stochastic_rounding"] or self._fused_options["state_dtype"] == Q8:
            state_dict[_STREAM] = seed_after(self._rounding_seed, int(self.applied_steps))
        return state_dict

    def _name_copies(self) -> None:
        """Names the copies of parameters that the next step will make: their states are None.

        Adagrad has states before its first step. torch.distributed.checkpoint then loads states by
        their names, and no others.
        """
        needs = self._state_needs()
        for p in self._all_params():
            if p_state := self.state.get(p):
                for name in needs.copies(p):
                    p_state.setdefault(name, None)

    def _copies_ahead(self, p: Tensor, p_state: dict[str, Any]) -> dict[str, Tensor]:
        """Copies of the parameter that the next step will make (see `_name_copies`)."""
        with torch.no_grad():
            return {
                name: torch.empty_like(p, dtype=self._dtype_of(name, p)).copy_(p)
                for name in self._state_needs().copies(p)
                if p_state.get(name) is None
            }

    @of_itself
    def _float32_masters(self) -> dict[int, Tensor]:
        """Copies of the float32 weights, by the ids of the model's 16-bit parameters; within
        `swap_averages` of their averages."""
        self._follow_parameters()
        masters: dict[int, Tensor] = {}
        for p in self._all_params():
            low, master = self._low_precision.get(id(p)), self.state.get(p, {}).get(MASTER)
            if low is not None:
                masters[id(low)] = p.detach().clone()
            elif id(p) in self._swapped:
                masters[id(p)] = self.state[p]["ema"].clone()
            elif is_correction(master):
                masters[id(p)] = joined(p, master)
            elif master is not None:
                masters[id(p)] = master.clone()
        return masters

    def _without_a_step(self) -> set[int]:
        """Ids of parameters that were never updated, for optimizers without saved step counts."""
        if self._scalar_names[0] is not None:
            return set()
        unborn: set[int] = set()
        for store in self._stores.values():
            if has_values(store.scalars):
                steps = store.scalars[0].tolist()
                unborn |= {id(p) for p in store.params if steps[store.columns[id(p)]] == 0}
        return unborn

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep this optimizer's dtype for them.

        torch casts states to the parameter's dtype, which cuts float32 states of 16-bit parameters.

        Averages that the dict lacks start at the parameters of the next step, with a UserWarning if
        the dict has steps. Masters start there without one, since nothing is lost: the 16-bit
        parameters were the weights.

        Raises:
            ValueError: the dict is of another optimizer, or of no optimizer. Nothing is changed.
        """
        dicts: list[dict[str, Any]] = []

        def note(_: Any, saved: dict[str, Any]) -> None:
            self._check_saved(saved)
            dicts.append(saved)

        hooks = [
            self.register_load_state_dict_pre_hook(note),
            self.register_load_state_dict_post_hook(lambda _: self._load(dicts[0]), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        """Tries what is to be loaded on a copy: torch would fail halfway, or at the next step."""
        if not {"state", "param_groups"} <= saved.keys():
            keys = ", ".join(map(repr, list(saved)[:6]))
            raise ValueError(
                "state_dict: expected what optimizer.state_dict() returns, with 'state' and "
                f"'param_groups', got the keys {keys}; of a whole checkpoint pass that part"
            )
        groups, state = [], {}
        if len(saved["param_groups"]) != len(self.param_groups):
            return  # torch says so
        for old, new in zip(saved["param_groups"], self.param_groups, strict=True):
            groups.append({**old, "params": new["params"]})
            for number, p in zip(old["params"], new["params"]):
                if number in saved["state"]:
                    state[p] = dict(saved["state"][number])
        trial = object.__new__(type(self))
        vars(trial).update(vars(self))
        try:
            trial.__setstate__({"state": state, "param_groups": groups})
            # States as large as their parameters, with the dtype of their codes.
            large: dict[str | None, torch.dtype | None] = {"ema": None, MASTER: None}
            rule = self._state_needs().rule
            for group in trial.param_groups:
                trial._numbers(group)
                for which, slot in enumerate(trial._slots(group)):
                    large[slot] = any_code_dtype(rule, which)
        except KeyError as error:
            states = [s for s in saved["state"].values() if isinstance(s, dict)]
            named = sorted({name for p_state in states for name in p_state})
            raise ValueError(
                f"state_dict: not of {type(self).__name__}, since there is no {error} in it. It "
                f"has groups with {', '.join(sorted(saved['param_groups'][0]))}, and states "
                f"{', '.join(named) or 'of no parameter'}"
            ) from None
        maker = foreign_maker(type(self), saved)
        if maker is not None:
            theirs, ours = (", ".join(sorted(states_of(one))) for one in (maker, type(self)))
            raise ValueError(
                f"state_dict: of {maker.__name__} (states {theirs}), not of {type(self).__name__} "
                f"(states {ours})"
            )
        for p, p_state in state.items():
            for name, value in p_state.items():
                if name not in large:
                    continue
                check_state(name, value, p)
                if not _is_split(name, value):
                    check_codes(name, p_state, large[name])

    def _load(self, saved: dict[str, Any]) -> None:
        """Loads states again, in their dtypes, and the stream of random numbers."""
        self._discard_step()
        if _STREAM in saved:  # the seed counts from this optimizer's own steps
            self._rounding_seed = seed_after(saved[_STREAM], -int(self.applied_steps))
        numbers = [n for group in saved["param_groups"] for n in group["params"]]
        for number, p in zip(numbers, self._all_params(), strict=True):
            for key, value in saved["state"].get(number, {}).items():
                name = MASTER if key == CORRECTION else key
                if _is_missing(value):
                    del self.state[p][name]
                elif isinstance(value, Tensor) and (_is_split(name, value) or is_codes(value)):
                    # torch has cast the integers to the parameter's dtype
                    self.state[p][name] = value.to(p.device, copy=True)
                elif isinstance(value, Tensor) and value.is_floating_point() and name != "step":
                    self.state[p][name] = value.to(self._dtype_of(name, p), copy=True).to(p.device)
        if self.ema_decay is not None and any(map(_lacks_average, self.state.values())):
            warnings.warn(
                f"{type(self).__name__}: the loaded state has steps but no averages. Those of "
                f"ema_decay={self.ema_decay} start at the parameters of the next step",
                stacklevel=level_outside(),
            )
        self._name_copies()

    def _dtype_of(self, name: str, p: Tensor) -> torch.dtype:
        if name in ("ema", MASTER):
            return torch.float64 if p.dtype is torch.float64 else torch.float32
        if name in self._scalar_names or is_scale_name(name, self.state[p]):
            return torch.float32
        return self._state_needs().dtype(p)

    def __getstate__(self) -> dict[str, Any]:
        self._check_closed("a copy")
        self._follow_parameters()
        state: dict[str, Any] = super().__getstate__()
        unborn = self._without_a_step()
        if unborn:
            state["state"] = self.state.copy()
            for p in self.state:
                if id(p) in unborn:
                    state["state"][p] = _without_momentum(self.state[p])
        return {
            **state,
            "_fused_options": self._fused_options,
            "_rounding_seed": self._rounding_seed,
            "_controls": self._controls,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        name = self._scalar_names[0]
        for group in state["param_groups"]:
            for key, value in self._absent.items():
                group.setdefault(key, value)
            step = group.pop("step", None)  # Apex and timm's Lamb count by group
            if step is not None and name is not None:
                _take_over(float(step), name, [state["state"].get(p) for p in group["params"]])
        for p_state in state["state"].values():
            if isinstance(p_state, dict) and CORRECTION in p_state:  # of a compressed state dict
                p_state[MASTER] = p_state.pop(CORRECTION)
        super().__setstate__(state)
        for key, value in self._absent.items():
            self.defaults.setdefault(key, value)  # of an older pickle
        self._forget()
        self._name_copies()


def _codes_ahead(p_state: dict[str, Any], p: Tensor, needs: Needs, group: int) -> dict[str, Any]:
    """A parameter's state with the codes that the next step will make of floats.

    Adagrad has states before its first step. torch.distributed.checkpoint would copy saved codes,
    as they are, into floats.
    """
    ahead = dict(p_state)
    for which, name in enumerate(needs.slots[group]):
        dtype = needs.codes(group, which, p)
        if dtype is not None and name in p_state and p_state[name].dtype != dtype:
            made = coded_state(p_state, name, p, dtype, needs.initial(name))
            ahead[name], ahead[scale_name(name)] = made
    return ahead


def _is_split(name: str, value: Any) -> bool:
    """Whether a loaded state is the correction of a split master."""
    return name == MASTER and getattr(value, "dtype", None) in CORRECTIONS.values()


def _is_missing(value: Any) -> bool:
    """Whether a value is the empty dictionary that torch has for a state that a flattened dict
    lacks. It looks for the states of the loading optimizer: scales of codes, say."""
    return isinstance(value, dict) and not value


def _lacks_average(p_state: Any) -> bool:
    """Whether a loaded state of a parameter has steps, and no average of them."""
    if not isinstance(p_state, dict) or p_state.get("ema") is not None:
        return False
    if "step" in p_state:  # Adagrad has states before its first step
        step = torch.as_tensor(p_state["step"])
        return not has_values(step) or bool(step > 0)
    return any(isinstance(value, Tensor) for value in p_state.values())


def _without_momentum(p_state: dict[str, Any]) -> dict[str, Any]:
    names = ("momentum_buffer", scale_name("momentum_buffer"))
    return {name: value for name, value in p_state.items() if name not in names}


def _take_over(count: float, name: str, states: list[dict[str, Any] | None]) -> None:
    """Sets steps by parameter from the group's count, which is ahead if others continued ours."""
    stepped = [p_state for p_state in states if p_state]
    known = [float(p_state[name]) for p_state in stepped if name in p_state]
    ahead = count - max(known, default=0.0)
    for p_state in stepped:
        if name not in p_state:
            p_state[name] = torch.as_tensor(count)
        elif ahead:
            p_state[name] = p_state[name] + ahead


def _saved_step(step: Tensor, group: dict[str, Any]) -> Tensor:
    """A step count with the dtype and on the device of torch's."""
    fused = group.get("fused")
    dtype = torch.float32
    if torch.get_default_dtype() is torch.float64 and not fused:
        dtype = torch.float64
    on_device = group.get("capturable") or fused
    return step.to(dtype=dtype, device=step.device if on_device else "cpu", copy=True)
