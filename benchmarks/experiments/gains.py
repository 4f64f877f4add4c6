"""A ratio of two times: its numbers in a run, and the verdict that its interval allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.experiments.experiment import Column, Run, Verdict
from benchmarks.experiments.measure import gain_text

Gain = tuple[float, float, float]  # the median, and its 99 % interval
COLUMNS: Mapping[str, Column] = {
    "gain": Column("times as fast", 2),
    "gain_low": Column("at least", 2),
    "gain_high": Column("at most", 2),
}
KEYS = ("gain", "low", "high")  # of experiments that call the columns so
SPEED = ("gain", "least", "most")  # of those whose notes have the gain
NONE = 1.02  # an interval that ends below shows that there is no gain worth the name


def numbers_of(gain: Gain) -> dict[str, float]:
    """The numbers of a run, by the keys of ``COLUMNS``."""
    return dict(zip(COLUMNS, gain, strict=True))


def columns_of(name: str, keys: Sequence[str] = KEYS) -> dict[str, Column]:
    """Columns of a gain and its interval, under these keys."""
    return dict(zip(keys, (Column(name, 2), *[*COLUMNS.values()][1:]), strict=True))


def triple(run: Run, keys: Sequence[str] = KEYS) -> Gain:
    """The gain of a run that has one under these keys."""
    gain, low, high = (run.numbers[key] for key in keys)
    return gain, low, high


def gain_of(runs: Mapping[str, Run], label: str) -> Gain | None:
    """The gain of a run; None where the run or its gain lacks."""
    numbers = runs[label].numbers if label in runs else {}
    if not numbers.keys() >= COLUMNS.keys():
        return None
    return numbers["gain"], numbers["gain_low"], numbers["gain_high"]


def is_faster(gain: Gain) -> bool | None:
    """None where the interval contains 1 and gains worth the name."""
    if gain[1] > 1:
        return True
    return False if gain[2] < NONE else None


def judge(gains: Mapping[str, Gain | None], otherwise: str) -> Verdict:
    """Whether all are faster: each needs an interval above 1, and one that is not decides.

    Args:
        gains: what the gain is of -> the gain; None was not measured.
        otherwise: the reason why there may be no gain: the end of the sentence.
    """
    missing = [what for what, gain in gains.items() if gain is None]
    if missing:
        return Verdict(None, f"{_listed(missing)}: not measured.")
    answers = [is_faster(gain) for gain in gains.values() if gain]
    words = "; ".join(f"{what}: {gain_text(gain)}" for what, gain in gains.items() if gain)
    if all(answers):
        return Verdict(True, f"{words}.")
    if False in answers:
        return Verdict(False, f"{words}: {otherwise}.")
    return Verdict(None, f"{words}: the interval contains 1, so the noise is larger than a gain.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
