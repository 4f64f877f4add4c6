"""The experiment of 8-bit states: what is trained, and its judge on made-up runs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.experiments import eight_bit_states
from benchmarks.experiments.eight_bit_states import (
    CODES,
    DIGITS,
    FLOAT32,
    QUARTERS,
    RANDOM,
    RESNET,
    RULES,
    VIT,
    WAYS,
    label_of,
)
from benchmarks.experiments.experiment import Run, Verdict
from benchmarks.experiments.images import digit_images
from helpers.experiments import CPU, QUICK, judged, measured

pytestmark = pytest.mark.usefixtures("one_thread")


def test_codes_beside_float32() -> None:
    runs, verdicts = measured("eight_bit_states")
    for network in (RESNET, VIT):
        line, codes, rounded = (runs[label_of(DIGITS, network, "AdamW", way)] for way in WAYS)
        assert line.numbers["coded"] == 0
        for run in (codes, rounded):
            assert 90 < run.numbers["coded"] < 100
            # The same weights and images in the same order: early losses are near, later ones not
            # equal, since codes round.
            assert run.numbers["loss1"] == pytest.approx(line.numbers["loss1"], rel=1e-3)
            assert run.numbers["loss4"] != line.numbers["loss4"]
        assert codes.numbers["loss4"] != rounded.numbers["loss4"]
    assert [type(verdict.holds) for verdict in verdicts] == [bool] * 4


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_keeps_codes_and_lowers_the_loss(rule: eight_bit_states.Rule) -> None:
    data = digit_images(8, 256)
    for way in WAYS:
        outcome = eight_bit_states.train(VIT, rule, way, data, 0, QUICK)
        assert len(outcome.losses) == QUARTERS
        assert outcome.losses[-1] < outcome.losses[0]
        assert (outcome.coded > 90) == (way != FLOAT32)
    again = eight_bit_states.train(VIT, rule, RANDOM, data, 0, QUICK)
    assert again == outcome
    assert eight_bit_states.train(VIT, rule, RANDOM, data, 1, QUICK) != outcome


# --- the judge ---

SAME = {"accuracy": 0.0, "loss": 1.0}


def _judged(changes: Mapping[tuple[str, str, str], Mapping[str, float]]) -> list[Verdict]:
    """float32 has 90 +- 0.5 % and a loss of 0.1 +- 5 %, so that the spreads are 1 point and 10 %.

    Args:
        changes: (network, rule, way) -> points of accuracy more, and factors of the losses.
    """
    runs = {}
    for network in (RESNET, VIT):
        for rule in RULES:
            for way in WAYS:
                change = {**SAME, **changes.get((network, rule.name, way), {})}
                numbers = {"accuracy": 90 + change["accuracy"], "deviation": 0.5}
                for n in range(1, QUARTERS + 1):
                    factor = change.get(f"loss{n}", change["loss"])
                    numbers |= {f"loss{n}": 0.1 * factor, f"loss_deviation{n}": 5.0}
                label = label_of(DIGITS, network, rule.name, way)
                runs[label] = Run(label, numbers)
    return [*eight_bit_states.EXPERIMENT.judge(runs, CPU)]


def _holds(verdicts: list[Verdict]) -> list[bool | None]:
    return [verdict.holds for verdict in verdicts]


def test_equal_runs_and_differences_within_the_spread() -> None:
    assert _holds(_judged({})) == [True] * 4
    within = {"accuracy": -0.9, "loss": 1.09}
    verdicts = _judged({(VIT, "LAMB", way): within for way in (CODES, RANDOM)})
    assert _holds(verdicts) == [True] * 4
    assert "digits, ViT: SGD +0, AdamW +0, Lion +0, LAMB -0.9" in verdicts[0].words
    # 3 seeds, 4 rules: 0.5 * sqrt(2 / 12)
    assert "mean -0.23 +- 0.2 percentage points (spread 1)" in verdicts[0].words
    assert "Beyond the spread are 0 of 8 differences" in verdicts[0].words
    assert "Beyond the spread are 0 of 32 differences" in verdicts[1].words


@pytest.mark.parametrize(("way", "place"), [(CODES, 0), (RANDOM, 2)])
def test_a_worse_accuracy(way: str, place: int) -> None:
    verdicts = _judged({(RESNET, "Lion", way): {"accuracy": -1.5}})
    wanted = [True] * 4
    wanted[place] = False
    assert _holds(verdicts) == wanted
    words = verdicts[place].words
    assert "Worse beyond the spread: digits, ResNet-18, Lion, accuracy: -1.5" in words
    assert "Better beyond" not in words


@pytest.mark.parametrize(("way", "place"), [(CODES, 1), (RANDOM, 3)])
def test_a_loss_curve_that_leaves_the_spread_on_its_way(way: str, place: int) -> None:
    verdicts = _judged({(VIT, "SGD", way): {"loss2": 1.2}, (VIT, "Lion", way): {"loss4": 0.8}})
    wanted = [True] * 4
    wanted[place] = False
    assert _holds(verdicts) == wanted
    words = verdicts[place].words
    assert "Worse beyond the spread: digits, ViT, SGD, loss of quarter 2: +18 %" in words
    assert "Better beyond the spread: digits, ViT, Lion, loss of quarter 4: -22 %" in words
    assert "Beyond the spread are 2 of 32 differences" in words


def test_runs_without_their_float32_run() -> None:
    label = label_of(DIGITS, VIT, "SGD", CODES)
    assert judged("eight_bit_states", {label: {}}, CPU) == [None] * 4
