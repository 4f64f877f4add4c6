"""Acceptance of a rival: times and losses are given, and the verdict is known."""

from __future__ import annotations

import itertools
import math

import pytest

from fusedtrain.advisor.tuning._check import FACTORS, Reference
from fusedtrain.advisor.tuning._race import LEAST, MOST, Race, race, rounds_in, verdict


def test_rivals_take_turns_and_change_who_comes_first():
    order = []

    def turn(name, seconds):
        def take():
            order.append(name)
            return next(seconds)

        return take

    best = turn("best", itertools.cycle([3.0, 6.0]))
    trial = turn("trial", itertools.cycle([2.0, 3.0]))
    seen = race(best, trial, 4)
    assert order == ["best", "trial", "trial", "best"] * 2
    assert (seen.best, seen.trial, seen.rounds) == (4.5, 2.5, 4)
    assert seen.gain == 1.75
    assert seen.interval == (1.5, 2.0)


def test_a_neighbour_who_slows_both_does_not_move_the_gain():
    machine = itertools.chain.from_iterable(([1.0] * 4 + [7.0] * 4) for _ in range(3))
    slow = list(machine)
    best, trial = iter(slow), (0.5 * one for one in slow)
    assert race(lambda: next(best), lambda: next(trial), 20).interval == (2.0, 2.0)


def test_a_hopeless_trial_is_stopped_after_three_rounds():
    assert race(lambda: 1.0, lambda: 2.0, 10).rounds == 3
    assert race(lambda: 1.0, lambda: 1.3, 10).rounds == 10
    lucky = iter([0.9, *[2.0] * 9])
    assert race(lambda: 1.0, lambda: next(lucky), 10).rounds == 10


def test_rounds_fill_the_time_within_limits():
    assert rounds_in(10, 0.5, 0.5) == 10
    assert rounds_in(10, 5, 5) == LEAST
    assert rounds_in(10, 0.01, 0.01) == MOST


@pytest.mark.parametrize(
    ("gain", "interval", "memory", "accepted", "reason"),
    [
        (1.2, (1.1, 1.3), 100, True, "faster"),
        (1.2, (1.1, 1.3), 300, True, "faster"),
        (1.2, (0.99, 1.3), 100, False, "no sure gain"),
        (1.0, (1.0, 1.0), 100, False, "no sure gain"),
        (0.99, (0.9, 1.1), 94, True, "less memory, no loss of time"),
        (0.99, (0.9, 1.1), 96, False, "no sure gain"),
        (0.97, (0.9, 1.1), 50, False, "no sure gain"),
        (0.99, (0.98, 0.999), 50, False, "slower, with less memory"),
        (0.5, (0.4, 0.6), 100, False, "slower"),
        (math.nan, (math.nan, math.nan), 100, False, "no sure gain"),
    ],
)
def test_a_gain_must_be_sure_or_save_memory(gain, interval, memory, accepted, reason):
    seen = verdict(Race(1.0, 1.0, gain, interval, 8), 100, memory)
    assert (seen.accepted, seen.reason) == (accepted, reason)


REFERENCE = Reference(
    losses=[2.0, 1.5, 1.0],
    other_seeds=[[2.0, 1.5, 1.0]],
    rounded={"fp32": [2.0, 1.50001, 1.0], "bf16": [2.0, 1.51, 1.0]},
)


def test_losses_may_differ_by_rounding_and_no_more():
    allowed = REFERENCE.allowed("bf16")
    assert allowed[0] == pytest.approx(FACTORS["bf16"] * 2.0 / 256)
    assert allowed[1] == pytest.approx(FACTORS["bf16"] * (0.01 + 1.5 / 256))
    # The third step's weights have moved as the second's.
    assert allowed[2] == pytest.approx(FACTORS["bf16"] * (0.01 + 1.0 / 256))
    for sign in (-1, 1):
        near = [loss + sign * 0.99 * one for loss, one in zip(REFERENCE.losses, allowed)]
        assert REFERENCE.complaint(near, "bf16") == ""
        assert REFERENCE.complaint(near, "fp32") != ""
    assert REFERENCE.complaint([2.0, 1.501, 1.0], "fp32") == (
        "wrong: loss of step 2 1.501, fp32 1.5, allowed ±3.3e-04"
    )
    assert "step 3 nan" in REFERENCE.complaint([2.0, 1.5, math.nan], "bf16")


def test_random_layers_widen_what_is_allowed():
    random = Reference([2.0, 1.5], [[2.0, 1.5], [2.1, 1.5]], {"fp32": [2.0, 1.5]})
    assert random.complaint([2.29, 1.5], "fp32") == ""
    assert random.complaint([2.31, 1.5], "fp32") != ""
    assert random.complaint([2.0, 1.6], "fp32") != ""


def test_where_fp32_has_diverged_nothing_is_compared():
    diverged = Reference([2.0, math.nan], [[2.0, math.nan]], {"fp32": [2.0, math.nan]})
    assert diverged.complaint([2.0, 5.0], "fp32") == ""
    assert diverged.complaint([3.0, math.nan], "fp32") != ""
