"""Memory over the moments of a step, for pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ._simulate import Simulator

_POINTS = 400  # at most, each with the most that was allocated in its share of the moments
_GROUPS = 6  # of modules
_SHARE = 0.6  # of all bytes, at most, has one group; else names with more parts are the groups
_DEEPEST = 4
OTHERS = "other modules"


def timelines(simulator: Simulator, chosen: Sequence[bool]) -> dict[str, Any]:
    """Fields of a MemoryPlan: `timeline_store`, `timeline` and `backward_at`."""
    group_of = _groups(simulator)
    areas = simulator.areas(chosen, group_of)
    totals = [sum(values) for values in zip(*areas.values())]
    store = simulator.profile.totals
    count = max(len(totals), 1)
    size = -(-count // _POINTS)
    shares = [range(start, min(start + size, count)) for start in range(0, count, size)]
    largest = [max(share, key=totals.__getitem__) for share in shares if totals]
    return {
        "timeline_store": [max(store[share.start : share.stop], default=0) for share in shares],
        "timeline": {name: [values[at] for at in largest] for name, values in areas.items()},
        "backward_at": simulator.first // size,
    }


def _groups(simulator: Simulator) -> list[str]:
    """The group of modules that made each storage, or `OTHERS`."""
    profile = simulator.profile
    modules = [""] * len(profile.bytes)
    for save in profile.saves:
        modules[save.storage] = modules[save.storage] or save.module
    for step in profile.steps:
        modules[step.storage] = step.module
    for depth in range(1, _DEEPEST + 1):
        names = [".".join(module.split(".")[:depth]) for module in modules]
        sizes = Counter[str]()
        for name, size in zip(names, profile.bytes):
            sizes[name] += size
        if max(sizes.values(), default=0) <= _SHARE * sizes.total():
            break
    largest = {name for name, size in sizes.most_common(_GROUPS) if name and size}
    return [name if name in largest else OTHERS for name in names]
