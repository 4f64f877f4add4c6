"""Common parts of the reports of convert and fold: names, and the lines of what was left."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_NAMES_SHOWN = 4  # in one line


class Unchanged(NamedTuple):
    """One module that was not changed, and why."""

    name: str
    type: str
    reason: str


def unchanged_lines(left: Iterable[Unchanged]) -> Iterator[str]:
    """A line for each type and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in left:
        groups.setdefault((entry.type, entry.reason), []).append(shown(entry.name))
    for (kind, reason), names in groups.items():
        more = len(names) - _NAMES_SHOWN
        places = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        yield f"  {len(names)} x {kind}: {reason} ({places})"


def shown(name: str) -> str:
    """A module's name as a reader may see it: the root of a model has none."""
    return name or "(the model itself)"


def title(cls: type) -> str:
    """A class by the name that it is imported by."""
    package = cls.__module__.partition(".")[0]
    public = {"torch": "torch.nn", "fusedtrain": "fusedtrain.nn"}.get(package, "")
    if public and getattr(importlib.import_module(public), cls.__name__, None) is cls:
        return f"{public}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
