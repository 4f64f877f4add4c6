"""Published experiments: each runs in its quick form, and those that check results notice wrong
ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.experiments import (
    NAMES,
    __main__ as command,
    amp_autotune,
    checkpointing,
    conv_bias,
    data_parallel,
    fused_gelu,
)
from benchmarks.experiments.experiment import Settings, WrongResult
from fusedtrain.advisor.bench.gate import NotTheJob

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = Settings(quick=True)
FAST = ("zero_grad", "fused_gelu", "conv_bias", "retained_graph")


class Inline:
    """In the place of a process, which imports torch for seconds."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        answer = function(*arguments)
        return SimpleNamespace(result=lambda: answer)


@contextlib.contextmanager
def inline(labels: Iterable[str]) -> Iterator[dict[str, Inline]]:
    yield {label: Inline() for label in labels}


def test_every_experiment_has_a_name() -> None:
    files = Path(command.__file__).parent.glob("*.py")
    assert {path.stem for path in files if "\ndef rows(" in path.read_text()} == {*NAMES}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in NAMES]
)
def test_quick(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(amp_autotune, "processes", inline)
    path = tmp_path / "rows.jsonl"
    arguments = [name, "--quick", f"--json={path}", f"--also={tmp_path}"]
    assert command.main(arguments) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    labels = [line["label"] for line in lines]
    assert len({*labels}) == len(labels) > 1
    assert {line["experiment"] for line in lines} == {name}
    (other,) = (tmp_path / "experiments").glob("*-quick.jsonl")
    assert other.read_text() == path.read_text()
    output = capsys.readouterr().out
    assert all(label in output for label in labels)


def _drops_a_scale(model: Any) -> list[str]:
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data[0] = 0.5
    return [""] * sum(isinstance(module, nn.Conv2d) for module in model)


def _changes_a_weight(model: Any, memory: str) -> None:
    if memory == "recompute":
        model[0][0].weight.data[0] += 1


def _drifting(settings: Settings, ways: list[str]) -> Any:
    losses = {way: [2.0, 1.0] for way in ways} | {data_parallel.SYNC: [2.0, 1.001]}
    return losses, {way: [1.0, 1.0] for way in ways}


@pytest.mark.parametrize(
    ("module", "place", "name", "wrong"),
    [
        (conv_bias, conv_bias.fusedtrain, "drop_redundant_bias", _drops_a_scale),
        (checkpointing, checkpointing.fusedtrain, "convert", _changes_a_weight),
        (data_parallel, data_parallel, "results_of", _drifting),
        (fused_gelu, fused_gelu.F, "gelu", torch.relu),
    ],
    ids=["conv_bias", "checkpointing", "data_parallel", "fused_gelu"],
)
def test_a_wrong_result_is_noticed(
    module: Any, place: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises((WrongResult, NotTheJob)):
        [*module.rows(QUICK)]
