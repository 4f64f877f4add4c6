"""The order of `make gpu`: two calls, played with a false clock, have a result of every family."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusedtrain.reference import FAMILIES
from helpers import ROOT
from helpers.gpu_project import H200, parts_of_an_h200

sys.path.insert(0, str(ROOT / "tools"))

import _gpu_parts
import gpu
from _gpu_parts import Part
from _gpu_plugin import SETTINGS, Journal
from gpu import Context

pytestmark = [
    pytest.mark.slow,
    # Names of backends are names of parts here.
    pytest.mark.launches_nothing("kernels run in other processes, if at all"),
]
FOREVER = float("inf")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    return parts_of_an_h200(monkeypatch)


KERNELS = tuple(FAMILIES)
CASES, KERNEL_SECONDS = 20, 0.45  # of a family, of a case on 8 processes
ROW_SECONDS = {"conv_bn": 12.0}  # of a row; 3 s otherwise
ROWS = 5  # of a family
STEP_SECONDS = {"machine": 5.0, "memcheck": 3.0, "ncu": 20.0, "plans": 25.0}  # of a test
PLAIN_SECONDS = 30.0


class Gone(BaseException):
    """The machine was taken away."""


class Simulated(Context):
    """A machine on which each test takes so long, by a false clock; `bad` tests hang or crash.

    One test at a time: a hang stops all that comes after it, which is worse than eight processes.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, bad: Mapping[str, str] | None = None,
        seconds: Mapping[str, float] | None = None, gone: float = FOREVER,
    ) -> None:  # fmt: skip
        super().__init__(Journal(folder / "j"), folder, lambda: self.now)
        self.now, self.bad, self.gone = 0.0, dict(bad or {}), gone
        self.seconds = {**STEP_SECONDS, **(seconds or {})}
        monkeypatch.setattr(Journal, "now", lambda journal: self.now)

    def tests(self, step: str) -> list[tuple[str, float]]:
        """Names and seconds, in the order of the plugin: first one of each family."""
        if step == "kernels":
            each = self.seconds.get(step, KERNEL_SECONDS)
            return [(f"{f}[{n}]", each) for n in range(CASES) for f in KERNELS]
        if step == "rows":
            families = [(f, ROW_SECONDS.get(f, 3.0)) for f in _gpu_parts.FIRST]
            first = [(f"{f}[0]", s) for f, s in families]
            return first + [(f"{f}[{n}]", s) for f, s in families for n in range(1, ROWS)]
        return [(f"{step}[{n}]", self.seconds.get(step, PLAIN_SECONDS)) for n in range(4)]

    def wait(self, until: float) -> None:
        if until > self.gone:
            self.now, self.gone = self.gone, FOREVER
            raise Gone
        self.now = until

    def run(
        self, command: Sequence[str], deadline: float, environment: Mapping[str, str]
    ) -> tuple[int, bool]:
        if SETTINGS not in environment:  # a probe
            self.wait(self.now + 5)
            return 0, False
        settings = json.loads(Path(environment[SETTINGS]).read_text())
        step, tests = settings["step"], self.tests(settings["step"])
        self.wait(min(deadline, self.now + 12))  # imports, collection
        self.journal.append("wanted", step, ids=[name for name, _ in tests])
        for name, seconds in tests:
            if name in settings["ended"]:
                continue
            if self.now >= deadline:
                return 0, True
            self.journal.append("start", step, id=name)
            does = self.bad.get(f"{step} {name}")
            ends = self.now + (settings["patience"] if does == "hangs" else seconds)
            self.wait(min(ends, deadline))
            if ends > deadline:
                return 0, True
            if does:
                return 1, False
            self.journal.end(step, name, "passed", "", seconds)
        return 0, False

    def call(self, seconds: float) -> int:
        self.end = self.now + seconds
        code = gpu.call(self, H200, "all", False)
        assert self.now <= self.end
        return code

    def learned(self, step: str) -> set[str]:
        """Families that have a result of a test that ended by itself."""
        ended = self.journal.progress(step).results.values()
        return {e["id"].partition("[")[0] for e in ended if e["outcome"] == "passed"}


BAD = {
    "all is well": {},
    "a hang of one kernel": {"kernels depthwise[0]": "hangs"},
    "hangs of one family": {f"kernels pool[{n}]": "hangs" for n in (0, 3)},
    "crashes": {f"kernels few_bit[{n}]": "crashes" for n in range(3)},
    "a row that hangs": {"rows batch_norm[0]": "hangs"},
    "a row that crashes": {"rows amp_step[0]": "crashes", "rows chains[1]": "crashes"},
    "a hang of the first part": {"machine machine[0]": "hangs"},
    "hangs in both": {"kernels gated[0]": "hangs", "rows images[0]": "hangs"},
    "a sanitizer that hangs": {"memcheck memcheck[0]": "hangs"},
}


@pytest.mark.parametrize("name", BAD)
def test_two_calls_have_a_result_of_every_family(
    tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    c = Simulated(tmp_path, monkeypatch, BAD[name])
    codes = [c.call(540), c.call(200)]
    assert codes == [1 if BAD[name] else 2] * 2  # a failure, or not yet all
    assert c.learned("kernels") == {*KERNELS}  # also the family that hangs: its other cases
    culprits = {place.split()[1].partition("[")[0] for place in BAD[name] if "rows" in place}
    assert c.learned("rows") >= {*_gpu_parts.FIRST} - culprits
    for place in BAD[name]:
        step, test = place.split()
        assert c.journal.progress(step).results[test]["outcome"] == "crashed"
    assert c.learned("plans") or BAD[name]


def test_two_calls_of_a_slow_machine(
    tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels take 5 times as long: all that has limits is cut, and each still has its turn."""
    c = Simulated(tmp_path, monkeypatch, seconds={"kernels": 2.0, "memcheck": 25.0, "ncu": 30.0})
    assert [c.call(540), c.call(200)] == [2, 2]
    assert c.learned("kernels") == {*KERNELS}
    assert c.learned("rows") == {*_gpu_parts.FIRST}
    assert c.learned("memcheck")
    assert c.learned("ncu")


@pytest.mark.parametrize("gone", [10.0, 100.0, 260.0, 400.0])
def test_a_machine_that_is_taken_away(
    tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch, gone: float
) -> None:
    c = Simulated(tmp_path, monkeypatch, gone=gone)
    with pytest.raises(Gone):
        c.call(540)
    had = {s: set(c.journal.progress(s).results) for s in ("kernels", "rows")}
    (tmp_path / "j").open("a").write('{"event": "te')  # half a line
    c.call(540)
    c.call(200)
    for step, families in (("kernels", KERNELS), ("rows", _gpu_parts.FIRST)):
        assert c.learned(step) == {*families}
        assert had[step] <= set(c.journal.progress(step).results)


def test_all_ends(tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    c = Simulated(tmp_path, monkeypatch, {"kernels pool[1]": "hangs"})
    while c.call(540) == 1 and [p.name for p in h200 if not c.journal.progress(p.name).done]:
        assert c.now < 24 * 3600
    names = [e["step"] for e in c.journal.events() if e["event"] == "run"]
    assert list(dict.fromkeys(names)) == [part.name for part in h200]


def test_what_cannot_run_is_skipped(
    tmp_path: Path, h200: list[Part], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """compute-sanitizer and ncu refuse some machines; each is asked once a call."""
    c = Simulated(tmp_path, monkeypatch)
    run = Simulated.run
    asked: list[str] = []

    def refuse(self: Simulated, command: Sequence[str], *rest: Any) -> tuple[int, bool]:
        if SETTINGS not in rest[1]:
            asked.append(Path(command[0]).name)
            return 1, False
        return run(self, command, *rest)

    monkeypatch.setattr(Simulated, "run", refuse)
    c.call(740)
    assert asked == ["compute-sanitizer", "sh"]
    assert c.learned("plans")
    assert "gpu-memcheck: skipped: compute-sanitizer does not run here" in capfd.readouterr().out
    with pytest.raises(SystemExit, match="no part rosw: there are build, predictions, machine"):
        gpu.call(c, H200, "rosw", False)
