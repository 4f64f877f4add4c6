"""Findings of `make gpu` so far, one JSON line an event: whoever is killed loses nothing.

The journal lies in build/gpu, where the next call finds it, and beside the results. Its events:
``tree`` (the sources and the machine it is about), ``start`` and ``test`` (of a test), ``done`` (of
a step, all of whose tests have ended).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

BAD = ("failed", "error", "crashed", "hung")
CONTROL = {n: "?" for n in range(32) if n not in (9, 10, 13)}  # characters that XML cannot hold


@dataclass(frozen=True)
class Outcome:
    """How a test ended: passed, skipped, xfailed, or one of BAD."""

    outcome: str
    seconds: float = 0.0
    message: str = ""

    @property
    def bad(self) -> bool:
        return self.outcome in BAD


class Journal:
    """Events in one file or several equal ones."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def append(self, event: str, step: str = "", **more: Any) -> None:
        """Adds an event; on disk when this returns, as far as other processes see."""
        line = json.dumps({"event": event, "step": step, **more})
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(line + "\n")

    def events(self) -> Iterator[dict[str, Any]]:
        """All events; the last line of a process that was killed may be a half one."""
        if not self.paths[0].exists():
            return
        for line in self.paths[0].read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def results(self, step: str) -> dict[str, Outcome]:
        """The tests of the step that have ended."""
        outcomes: dict[str, Outcome] = {}
        for e in self.events():
            if e["event"] == "test" and e["step"] == step:
                before = outcomes.get(e["id"])
                # The failure that came first says more than the worker's death by it.
                if not (before and before.bad and e["outcome"] == "crashed"):
                    outcomes[e["id"]] = Outcome(e["outcome"], e["seconds"], e["message"])
        return outcomes

    def in_flight(self, step: str, run: str) -> dict[str, float]:
        """Tests that this process has begun and not ended, with the time of their beginning."""
        begun: dict[str, float] = {}
        for event in self.events():
            if (event["step"], event.get("run")) == (step, run):
                if event["event"] == "start":
                    begun[event["id"]] = event["time"]
                elif event["event"] == "test":
                    begun.pop(event["id"], None)
        return begun

    def done(self, step: str) -> bool:
        return any(e["event"] == "done" and e["step"] == step for e in self.events())

    def begin(self, tree: str, keep: bool) -> str:
        """Takes up the journal where it is about this tree, and begins a new one otherwise.

        Args:
            tree: what the results are about: the sources, the GPU, torch.
            keep: take it up in any case, without what failed.

        Returns:
            what was done, in words.
        """
        first, *others = self.paths
        if not first.exists():  # a bare machine may have been given the results of the last one
            beside = next((p for p in others if p.exists()), None)
            if beside is not None:
                first.parent.mkdir(parents=True, exist_ok=True)
                first.write_text(beside.read_text())
        of = [e["tree"] for e in self.events() if e["event"] == "tree"]
        if of and of[-1] == tree:
            self._rewrite(list(self.events()))
            return "goes on where the last call stopped"
        if of and keep:
            bad = {s for s in self._steps() if any(o.bad for o in self.results(s).values())}
            # A finding of compute-sanitizer belongs to no test: all of its step run again.
            anew = {s for s in bad for name, o in self.results(s).items()
                    if o.bad and name.startswith(f"{s}: exit")}  # fmt: skip
            kept = [
                e for e in self.events()
                if not (e["event"] == "test" and (e["outcome"] in BAD or e["step"] in anew))
                and not (e["event"] == "done" and e["step"] in bad)
            ]  # fmt: skip
            self._rewrite(kept)
            self.append("tree", tree=tree)
            return "the sources have changed: what passed is kept, what failed runs again"
        self._rewrite([])
        self.append("tree", tree=tree)
        return "the sources have changed: from the beginning" if of else "from the beginning"

    def _steps(self) -> set[str]:
        return {e["step"] for e in self.events()}

    def _rewrite(self, events: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(e) + "\n" for e in events)
        for path in self.paths:
            write(path, text)

    def junit(self, path: Path, wanted: dict[str, list[str]]) -> None:
        """JUnit XML of all steps; tests that are wanted and have not ended are skipped ones."""
        root = ElementTree.Element("testsuites")
        for step, names in wanted.items():
            results = self.results(step)
            suite = ElementTree.SubElement(root, "testsuite", name=step)
            for name in dict.fromkeys([*results, *names]):
                result = results.get(name, Outcome("not run", message="the part was cut"))
                file, _, test = name.translate(CONTROL).partition("::")
                case = ElementTree.SubElement(
                    suite, "testcase", classname=file, name=test or file,
                    time=f"{result.seconds:.3f}",
                )  # fmt: skip
                if result.outcome != "passed":
                    kind = {"failed": "failure"}.get(
                        result.outcome, "error" if result.bad else "skipped"
                    )
                    message = f"{result.outcome}: {result.message}".translate(CONTROL)
                    ElementTree.SubElement(
                        case, kind, message=message.split("\n")[0]
                    ).text = message
            cases = list(suite)
            suite.set("tests", str(len(cases)))
            for kind, total in (("failure", "failures"), ("error", "errors"), ("skipped",) * 2):
                suite.set(total, str(sum(c.find(kind) is not None for c in cases)))
        write(path, ElementTree.tostring(root, encoding="unicode") + "\n")


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
