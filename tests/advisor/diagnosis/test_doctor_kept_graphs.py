"""Graphs that outlive their step: `doctor` names the line that keeps them."""

from __future__ import annotations

import gc
import inspect
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.advisor.diagnosis import doctor
from helpers.diagnosis import rules, stepping, training

pytestmark = pytest.mark.usefixtures("one_thread")


class Meter:
    """As in many examples: the average of a loss."""

    def __init__(self) -> None:
        self.sum: Any = 0

    def update(self, value: Any) -> None:
        self.sum += value


class Log:
    """Things that keep a loss, each changed by one line of `KEEPING`."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[Any]] = {"loss": []}
        self.total: Any = 0
        self.extended: list[Any] = []
        self.latest: deque[Any] = deque()
        self.rows: list[Any] = []


LOG, HISTORY = Log(), defaultdict(list)
KEEPING: dict[str, Callable[[Any], Any]] = {}


def keeps(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    KEEPING[function.__name__] = function
    return function


@keeps
def nested_list(loss: Any) -> None:
    LOG.by_name["loss"].append(loss)


@keeps
def attribute_of_another(loss: Any) -> None:
    LOG.total += loss


@keeps
def extended(loss: Any) -> None:
    LOG.extended.extend([loss])


@keeps
def queue(loss: Any) -> None:
    LOG.latest.append(loss)


@keeps
def row(loss: Any) -> None:
    LOG.rows.append({"loss": loss})


@keeps
def global_dictionary(loss: Any) -> None:
    HISTORY["loss"].append(loss)


def enclosed() -> Callable[[Any], Any]:
    best: Any = None

    def least(loss: Any) -> None:
        nonlocal best
        best = loss if best is None else torch.minimum(best, loss)

    return least


KEEPING["enclosed"] = enclosed()


METER = Meter()
KEEPING["update"] = METER.update


@pytest.mark.parametrize("how", KEEPING)
def test_the_line_that_keeps_a_graph(how: str) -> None:
    """Wherever it is: the function has returned when the graph is seen."""
    model, keep = nn.Linear(4, 1), KEEPING[how]
    try:
        step = stepping(model, lambda: model(torch.randn(2, 4)).sum(), keep)
        diagnosis = doctor(step, steps=6, trials=False)
    finally:
        LOG.__init__()
        METER.__init__()
        HISTORY.clear()
    (kept,) = (finding for finding in diagnosis.findings if finding.rule == "graph-kept")
    assert kept.site is not None
    lines, first = inspect.getsourcelines(keep)
    assert kept.site.line == first + len(lines) - 1
    assert kept.site.function == keep.__name__
    assert Path(kept.site.file) == Path(__file__)
    if how == "update":  # which may be called with plain numbers
        assert "detach" not in diagnosis.diff()


def test_a_meter_of_numbers_keeps_nothing() -> None:
    model, meter = nn.Linear(4, 1), Meter()
    step = stepping(
        model, lambda: model(torch.randn(2, 4)).sum(), lambda loss: meter.update(loss.detach())
    )
    assert "graph-kept" not in rules(doctor(step, steps=5))


def test_predictions_without_backward_keep_all_that_was_saved() -> None:
    model, kept = nn.Sequential(nn.Linear(4, 64), nn.Tanh()), []
    step = training(model, torch.randn(2, 4))

    def predicts() -> None:
        kept.append(model(torch.randn(512, 4)))
        step()

    (finding,) = (f for f in doctor(predicts, steps=6).findings if f.rule == "graph-kept")
    assert finding.cost.kind == "measured"
    assert finding.cost.bytes is not None
    assert finding.cost.bytes >= 512 * 64 * 4


@pytest.mark.parametrize("act", [nn.Tanh, nn.ReLU, nn.SiLU, fusedtrain.nn.Mish])
def test_outputs_that_nobody_keeps_are_freed(act: Any) -> None:
    """The watch's hooks of saved tensors keep no graph alive, nor does a forward without backward
    count as one that is kept."""
    model = nn.Sequential(nn.Linear(4, 4), act(), nn.Sigmoid())
    train = training(model, torch.randn(2, 4))

    def step() -> None:
        model(torch.randn(2, 4))  # for its side effects, and dropped
        train()

    gc.disable()
    try:
        diagnosis = doctor(step, steps=6, trials=False)
    finally:
        gc.enable()
    assert "graph-kept" not in rules(diagnosis)
