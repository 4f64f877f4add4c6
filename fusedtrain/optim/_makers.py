"""Finds the optimizer that has made a state dict, by the keys of its groups and its states."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from ._codes import is_scale_name

_COMMON = {"step", "ema", "master_param", "master_correction"}  # states that any class may have
_NO_KEYS = {"self", "params", "options"}  # of __init__
_PACKAGE = __name__.rpartition(".")[0]


def foreign_maker(cls: Any, saved: Mapping[str, Any]) -> Any:
    """The class that made a state dict, if that keeps other states than `cls`; else None.

    A dict of a class with the same states may be loaded (AdamW's by NAdamW), and so may one with
    keys or states that no class here knows.
    """
    keys = {key for group in saved["param_groups"] for key in group}
    states = {
        key
        for s in saved["state"].values()
        if isinstance(s, dict)
        for key in s
        if not is_scale_name(key, s)
    }
    decoupled = saved["param_groups"][0].get("decoupled_weight_decay", False)

    def rank(other: Any) -> tuple[int, bool]:
        """Fitness of a class. AdamW's and Adam's groups have one key more than their arguments."""
        misses = (keys_of(other) ^ keys) - {"decoupled_weight_decay"}
        return -len(misses), (other.__name__ == "AdamW") == bool(decoupled)

    able = [other for other in _relatives(cls) if states <= _COMMON | states_of(other)]
    if cls in able:  # then only a class whose keys are all there, and that fits better
        able = [
            o for o in able
            if o is cls or (keys_of(o) - o._absent.keys() <= keys and rank(o) > rank(cls))
        ]  # fmt: skip
    maker = max(able, key=rank, default=cls)
    return None if _needed(maker) == _needed(cls) else maker


def keys_of(cls: Any) -> set[str]:
    """The keys of the groups of a class that are its arguments."""
    return set(cls._keys) or set(inspect.signature(cls.__init__).parameters) - _NO_KEYS


def states_of(cls: Any) -> set[str]:
    """The names of all states that a class may keep, but for those that any may."""
    return set().union(*_kept(cls)) - _COMMON


def _kept(cls: Any) -> list[set[str]]:
    """States of a parameter's shape, and states that are numbers."""
    return [set(filter(None, kind)) for kind in (cls._states, cls._scalar_names)]


def _needed(cls: Any) -> list[set[str]]:
    """States without those that a counterpart lacks ("step" of timm's LAMB is elsewhere)."""
    return [kind - {"max_exp_avg_sq", "step"} for kind in _kept(cls)]


def _relatives(cls: Any) -> Iterator[Any]:
    """All optimizers of the package."""
    pending = [base for base in cls.__mro__ if base.__name__ == "FusedOptimizer"]
    for base in pending:
        pending += base.__subclasses__()
        if base is cls or (base.__module__.startswith(_PACKAGE) and hasattr(base, "_rule")):
            yield base
