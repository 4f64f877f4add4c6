"""Choice and order of the configurations that are tried. Knows nothing of processes or clocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection

from ...planning._batches import doubling, largest
from ._switches import NAMES, SWITCHES, Conditions, Config

# Whether the second configuration, tried against the first (the best so far), is accepted.
Judge = Callable[[Config, Config], bool]


def switches_named(names: Collection[str]) -> list[str]:
    """The names, or all of them for none.

    Raises:
        ValueError: an unknown name.
    """
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise ValueError(f"switches: no {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return [name for name in NAMES if not names or name in names]


def greedy(start: Config, facts: Conditions, names: Collection[str], judge: Judge) -> Config:
    """One switch at a time from the best so far.

    At the end the last two accepted switches are tried off again, because a switch that came later
    may have taken over their work. The very last is left out: nothing came later.
    """
    best = start
    accepted: list[str] = []
    for switch in SWITCHES:
        if switch.name not in names:
            continue
        for value in switch.others(facts):
            trial = {**best, switch.name: value.name}
            if judge(best, trial):
                best = trial
                if switch.name not in accepted:
                    accepted.append(switch.name)
    for name in reversed(accepted[:-1][-2:]):
        trial = {**best, name: start[name]}
        if judge(best, trial):
            best = trial
    return best


def product(start: Config, facts: Conditions, names: Collection[str], judge: Judge) -> Config:
    """Every combination against the best so far."""
    best = start
    columns = [
        [(switch.name, value.name) for value in (switch.values[0], *switch.others(facts))]
        for switch in SWITCHES
        if switch.name in names
    ]
    for pairs in itertools.islice(itertools.product(*columns), 1, None):
        trial = {**start, **dict(pairs)}
        if judge(best, trial):
            best = trial
    return best


def size_of_product(facts: Conditions, names: Collection[str]) -> int:
    """Trials of `product`."""
    return math.prod(1 + len(one.others(facts)) for one in SWITCHES if one.name in names) - 1


def largest_batch(fits: Callable[[int], bool], base: int, most: int) -> int:
    """The largest multiple of ``base`` / 4 that fits, by doubling and bisection.

    ``base`` fits; ``most`` is the largest that is asked for. ``fits`` is called a few times.
    """
    unit = max(1, base // 4)
    first, units = base // unit, most // unit
    number = largest(lambda n: fits(n * unit), units, doubling(2 * first, units), low=first)
    return max(number * unit, base)
