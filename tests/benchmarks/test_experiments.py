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

from benchmarks.experiments import (
    NAMES,
    __main__ as command,
    amp_autotune,
)
from benchmarks.experiments.experiment import Settings

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
