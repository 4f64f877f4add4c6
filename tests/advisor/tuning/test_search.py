"""The order of trials, fed with facts instead of measurements."""

from __future__ import annotations

import pytest

from fusedtrain.advisor.tuning._budget import Budget, BudgetSpent, parse_budget
from fusedtrain.advisor.tuning._search import (
    greedy,
    largest_batch,
    product,
    size_of_product,
    switches_named,
)
from fusedtrain.advisor.tuning._switches import NAMES, SWITCHES, Conditions, difference, plain

CPU = Conditions(convolutions=True)
CUDA = Conditions("cuda", (9, 0), convolutions=True, loader=True, compile=True, cores=4)


class Judged:
    """Seconds of a configuration by a table; what was tried, in words."""

    def __init__(self, seconds):
        self.seconds, self.tried = seconds, []

    def __call__(self, best, trial):
        self.tried.append(difference(trial, best))
        return self.seconds(trial) < self.seconds(best)


def values(facts):
    return {switch.name: [value.name for value in switch.others(facts)] for switch in SWITCHES}


def test_the_device_decides_which_values_are_tried():
    on_cpu, on_cuda = values(CPU), values(CUDA)
    assert on_cpu["precision"] == ["bf16"]
    assert on_cpu["cudnn autotune"] == on_cpu["torch.compile"] == on_cpu["workers"] == []
    assert on_cuda["precision"] == ["tf32", "bf16", "fp16"]
    assert on_cuda["workers"] == ["1", "2", "4"]
    assert on_cuda["pin_memory"] == on_cuda["torch.compile"] == ["on"]
    assert values(Conditions("cuda", (7, 5)))["precision"] == ["fp16"]
    assert values(Conditions())["channels_last"] == []


def test_greedy_keeps_what_is_faster_and_tries_each_value_from_the_best_so_far():
    def seconds(config):
        return 4 - 2 * (config["channels_last"] == "on") - (config["optimizer"] == "fusedtrain")

    judge = Judged(seconds)
    best = greedy(plain(8), CPU, NAMES, judge)
    assert difference(best, plain(8)) == "channels_last on, optimizer fusedtrain"
    assert judge.tried == [
        "precision bf16",
        "channels_last on",
        "fusedtrain convert",
        "fusedtrain convert + plan",
        "fusedtrain convert + recompute",
        "optimizer torch, fused=True",
        "optimizer fusedtrain",
        "channels_last off",
    ]


def test_a_switch_that_a_later_one_has_made_useless_is_taken_off():
    def seconds(config):
        if config["fusedtrain"] == "convert":
            return 1 + (config["channels_last"] == "on")
        return 5 - 2 * (config["channels_last"] == "on")

    best = greedy(plain(8), CPU, NAMES, Judged(seconds))
    assert difference(best, plain(8)) == "fusedtrain convert"


def test_only_the_last_two_that_something_followed_are_tried_off():
    def seconds(config):
        return -sum(value != plain(8)[name] for name, value in config.items())

    judge = Judged(seconds)
    greedy(plain(8), CPU, NAMES, judge)
    assert judge.tried[-2:] == ["fusedtrain off", "channels_last off"]
    assert "precision fp32" not in judge.tried


def test_the_product_finds_what_pays_only_together():
    def seconds(config):
        together = config["precision"] == "bf16" and config["channels_last"] == "on"
        alone = (config["precision"] == "bf16") + (config["channels_last"] == "on")
        return 1 if together else 2 + alone

    names = ("precision", "channels_last", "optimizer")
    assert greedy(plain(8), CPU, names, Judged(seconds)) == plain(8)
    judge = Judged(seconds)
    best = product(plain(8), CPU, names, judge)
    assert difference(best, plain(8)) == "precision bf16, channels_last on"
    assert len(judge.tried) == size_of_product(CPU, names) == 2 * 2 * 3 - 1


def test_an_unknown_switch_is_named():
    with pytest.raises(ValueError, match="no colour; there are precision"):
        switches_named(["colour"])
    assert switches_named(["batch", "precision"]) == ["precision", "batch"]
    assert switches_named([]) == list(NAMES)


@pytest.mark.parametrize("base", [2, 3, 8, 30, 32])
@pytest.mark.parametrize("limit", [0, 1, 31, 32, 33, 100, 511, 512, 10_000])
def test_the_largest_batch_is_the_largest_that_fits(base, limit):
    asked = []

    def fits(batch):
        asked.append(batch)
        return batch <= limit

    most, unit = 512, max(1, base // 4)
    expected = max(base, min(limit, most) // unit * unit)
    assert largest_batch(fits, base, most) == expected
    assert len(asked) <= 18
    assert all(batch > base for batch in asked)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), ("2", 120), (" 3 m ", 180)]
)
def test_budgets_have_units(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0s", "-1m", "5 years", "1e3"])
def test_no_time_is_no_budget(text):
    with pytest.raises(ValueError, match="expected a time like"):
        parse_budget(text)


def test_a_trial_that_would_not_fit_is_not_begun():
    now = [100.0]
    budget = Budget(60, lambda: now[0])
    budget.require()
    now[0] += 40
    budget.last_trial = 19
    budget.require()
    with pytest.raises(BudgetSpent, match=r"1 min has 20 s left, and the next .* about 21 s"):
        budget.require(extra=2)
    budget.last_trial = 20
    with pytest.raises(BudgetSpent, match="about 20 s"):
        budget.require()
