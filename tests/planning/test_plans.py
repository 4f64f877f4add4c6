"""Simulation and search of plans, their timelines, files and pictures."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedtrain import MemoryPlan, plan_memory
from fusedtrain._recompute.record import Output, Record, Save
from fusedtrain._recompute.search import Search
from fusedtrain._recompute.simulate import Simulator, peak_lines, timelines
from helpers.commands import assert_png
from helpers.norm_models import UNet
from helpers.planned_networks import Convolutions


def chain(sizes: list[int], costs: list[float]) -> Record:
    """A record of layers that each save their input; the loss comes last."""
    count = len(sizes)
    record = Record(bytes=sizes, nodes=count, totals=[0] * (2 * count + 1))
    for number, cost in enumerate(costs):
        inputs = [number - 1] if number else []
        record.outputs.append(
            Output("op", f"{number}", number, inputs, [], number, number + 1, cost)
        )
        record.saves.append(Save(number, number, number, count - 1 - number))
    record.totals = [-rest for rest in Simulator(record)._rest]
    return record


def test_peak_lines_are_the_largest_of_all_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = [torch.randint(1, 50, (12,), generator=generator).tolist() for _ in range(2)]
        small, large = (chain(row, [1.0] * 12) for row in sizes)
        choice = (torch.rand(12, generator=generator) < 0.5).tolist()
        one, other = (Simulator(record).totals(choice)[0] for record in (small, large))
        lines = peak_lines(choice, (2, small), (5, large))
        for batch in (0, 2, 3, 5, 40):
            expected = max(a + (b - a) / 3 * (batch - 2) for a, b in zip(one, other))
            result = max(base + each * batch for base, each in lines)
            assert result == pytest.approx(expected)


def test_search_is_near_the_best_of_all_choices() -> None:
    torch.manual_seed(0)
    ratios = []
    for _ in range(8):
        count = 9
        sizes = torch.randint(1, 20, (count,)).tolist()
        costs = (torch.rand(count) * 10).tolist()
        search = Search(chain(sizes, costs))
        simulator = search.simulator
        search.run()
        search.deepen()
        every = [simulator.run(choice) for choice in itertools.product((False, True), repeat=count)]
        lowest = min(outcome.peak for outcome in every)
        assert search.least()[1].peak <= 1.1 * lowest
        full = simulator.run([False] * count).peak
        for share in (0.9, 0.7, 0.5):
            budget = int(share * full)
            fitting = [o.milliseconds for o in every if o.peak <= budget]
            if fitting and search.least()[1].peak <= budget:
                search.refine(budget)
                best = search.best(budget)
                assert best is not None
                ratios.append(best[1].milliseconds / max(min(fitting), 1e-9))
    assert len(ratios) > 10
    assert sum(ratios) / len(ratios) < 1.1
    assert max(ratios) < 1.6


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    torch.manual_seed(0)
    return plan_memory(UNet(4), torch.randn(4, 3, 32, 32), 0.7)


def test_timelines(plan: MemoryPlan) -> None:
    totals = [sum(values) for values in zip(*plan.timeline.values())]
    assert max(totals) == plan.predicted
    assert max(plan.timeline_store) == plan.store_peak
    assert len(totals) == len(plan.timeline_store) <= 400
    assert 0 < plan.backward_at < len(totals)
    *modules, recomputed, rest = plan.timeline
    assert (recomputed, rest) == ("recomputed", "gradients and the rest")
    assert {"inc", "conv2"} <= set(modules)
    assert len(modules) <= 7
    assert not any(plan.timeline[recomputed][: plan.backward_at])
    assert any(plan.timeline[recomputed])


def test_many_moments_keep_their_maxima() -> None:
    count = 700
    record = chain([4] * count, [1.0] * count)
    record.totals = list(range(5000, 5001 + 2 * count))
    simulator, choice = Simulator(record), [number % 2 > 0 for number in range(count)]
    fields = timelines(simulator, choice)
    totals = [sum(values) for values in zip(*fields["timeline"].values())]
    assert 200 < len(totals) <= 400
    assert max(totals) == simulator.run(choice).peak
    assert max(fields["timeline_store"]) == max(record.totals)


def test_picture(plan: MemoryPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a plan that recomputes nothing."""
    torch.manual_seed(0)
    stored = plan_memory(Convolutions(4, 2), torch.randn(2, 3, 8, 8), 1.0)
    assert not stored.recomputed
    for number, one in enumerate((plan, stored)):
        one.plot(tmp_path / f"{number}.png")
        assert_png(tmp_path / f"{number}.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"MemoryPlan\.plot needs matplotlib"):
        plan.plot(tmp_path / "plan.png")


WRONG: tuple[Any, ...] = ("x", True, [[1]], {"a": 1}, float("inf"), -1.5, None)


def test_a_damaged_file_names_its_field(plan: MemoryPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    whole = json.loads(path.read_text())
    for name, wrong in itertools.product(whole, WRONG):
        if name == "fusedtrain_memory_plan" or isinstance(wrong, type(whole[name])):
            continue
        path.write_text(json.dumps({**whole, name: wrong}))
        with pytest.raises(ValueError, match=f"has no memory plan .*{name}"):
            MemoryPlan.load(path)
    del whole["batch"]
    for text in (json.dumps(whole), "[" * 10**5):
        path.write_text(text)
        with pytest.raises(ValueError, match="has no memory plan"):
            MemoryPlan.load(path)
