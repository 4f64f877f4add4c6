"""The timelines of a plan, its file, and its picture."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedtrain import MemoryPlan, plan_memory
from fusedtrain.planning._profile import Profile, Save, Step
from fusedtrain.planning._simulate import Simulator
from fusedtrain.planning._timeline import timelines
from helpers.commands import assert_png
from helpers.norm_models import UNet
from helpers.planned_networks import Convolutions


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    torch.manual_seed(0)
    return plan_memory(UNet(4), torch.randn(4, 3, 32, 32), 0.7)


def test_timelines(plan: MemoryPlan, tmp_path: Path) -> None:
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
    plan.save(tmp_path / "plan.json")
    assert MemoryPlan.load(tmp_path / "plan.json") == plan


def test_many_moments_keep_their_maxima() -> None:
    count = 700
    profile = Profile(bytes=[4] * count, nodes=count, totals=list(range(5000, 5001 + 2 * count)))
    for number in range(count):
        inputs = [number - 1] if number else []
        profile.steps.append(Step("op", f"{number}", number, inputs, [], number, number + 1, 1.0))
        profile.saves.append(Save(number, number, number, count - 1 - number))
    simulator, chosen = Simulator(profile), [number % 2 > 0 for number in range(count)]
    fields = timelines(simulator, chosen)
    totals = [sum(values) for values in zip(*fields["timeline"].values())]
    assert 200 < len(totals) <= 400
    assert max(totals) == simulator.run(chosen).peak
    assert max(fields["timeline_store"]) == max(profile.totals)


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
