"""Findings of `convert`, and its changes to a module. The record of the changes is kept in the
module's `__dict__`: it outlives deepcopy and pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

_KEY = "_fusedtrain_convert"
_LATER = ("save",)  # attributes of fused classes that `convert` sets after all else


@dataclass
class Decision:
    """One module that may get another class, with every name it goes by and what to do with it."""

    module: nn.Module
    fused: type | None = None  # None: it is fused already, or left for a reason
    attributes: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    names: list[str] = field(default_factory=list)


class Record(NamedTuple):
    original: type
    fused: type
    added: tuple[str, ...]  # __dict__ keys which the original did not have
    replaced: dict[str, Any]  # and those which had another value


Record.__module__ = "fusedtrain.conversion"  # the name in pickles


def record_of(module: nn.Module) -> Record | None:
    return vars(module).get(_KEY)


def assign(module: nn.Module, fused: type, wanted: Mapping[str, Any]) -> None:
    """Gives the module a class and attributes."""
    attributes = vars(module)
    added = tuple(key for key in wanted if key not in attributes)
    replaced = {key: attributes[key] for key in wanted if key in attributes}
    record = Record(type(module), fused, added, replaced)
    module.__class__ = fused
    attributes.update(wanted)
    attributes[_KEY] = record


def assigned(module: nn.Module) -> tuple[type, dict[str, Any]]:
    """The class and the attributes that a module was given."""
    record = record_of(module)
    assert record is not None
    return record.fused, {key: vars(module)[key] for key in (*record.added, *record.replaced)}


def unassign(module: nn.Module) -> bool:
    """Takes back class and attributes; whether there was anything to take back."""
    record = record_of(module)
    if record is None:
        return False
    attributes = vars(module)
    del attributes[_KEY]
    for key in (*record.added, *_LATER):
        attributes.pop(key, None)
    attributes.update(record.replaced)
    module.__class__ = record.original
    return True
