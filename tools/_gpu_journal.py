"""Findings of `make gpu` so far, one JSON line an event: whoever is killed loses nothing.

The journal lies in build/gpu/results, where the next call finds it, and beside the results. Its
events: ``tree`` (the sources and the machine it is about), ``run`` (a process of a step's tests
begins), ``wanted`` (the names of all tests of a step), ``start`` and ``test`` (a test begins, has
ended).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

BAD = ("failed", "error", "crashed", "hung")
TAGS = {"failed": "failure", **dict.fromkeys(BAD[1:], "error")}  # of JUnit
CONTROL = {n: "?" for n in range(32) if n not in (9, 10, 13)}  # characters that XML cannot hold
Event = dict[str, Any]


@dataclass
class Progress:
    """A step so far.

    Attributes:
        results: events of the tests that have ended, by name.
        wanted: the names of all tests; None where they were never collected.
        run: the event of the last process.
        before: tests that had ended when that process began.
        flying: tests that it has begun and not ended, with the time of their beginning.
    """

    results: dict[str, Event] = field(default_factory=dict)
    wanted: list[str] | None = None
    run: Event = field(default_factory=dict)
    before: set[str] = field(default_factory=set)
    flying: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> list[str]:
        """The tests that have not ended."""
        return [name for name in self.wanted or () if name not in self.results]

    @property
    def done(self) -> bool:
        return self.wanted is not None and not self.left

    @property
    def bad(self) -> list[str]:
        return [name for name, e in self.results.items() if e["outcome"] in BAD]


class Journal:
    """Events in one file or several equal ones."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def append(self, event: str, step: str = "", **more: Any) -> None:
        """Adds an event, in one write: workers may do so at the same time."""
        line = json.dumps({"event": event, "step": step, **more}) + "\n"
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:
                file.write(line.encode())

    def end(self, step: str, name: str, outcome: str, message: str, seconds: float = 0.0) -> None:
        """Adds the event of a test that has ended."""
        kept = {"seconds": round(seconds, 3), "message": message[-4000:]}
        self.append("test", step, id=name, outcome=outcome, **kept)

    def events(self) -> list[Event]:
        """All events; the last line of a process that was killed may be a half one."""
        path = next((p for p in self.paths if p.exists()), None)
        events = []
        for line in path.read_text(errors="replace").splitlines() if path else []:
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
        return events

    def progress(self, step: str) -> Progress:
        """The step so far."""
        p = Progress()
        for e in self.events():
            if e["step"] != step:
                continue
            if e["event"] == "run":
                p.run, p.before, p.flying = e, set(p.results), {}
            elif e["event"] == "wanted":
                p.wanted = e["ids"]
            elif e["event"] == "start":
                p.flying[e["id"]] = e["time"]
            elif e["event"] == "test":
                p.flying.pop(e["id"], None)
                # The failure that came first says more than the worker's death by it.
                if e["outcome"] not in ("crashed", "hung") or e["id"] not in p.bad:
                    p.results[e["id"]] = e
        return p

    def begin(self, tree: str, keep: bool) -> str:
        """Goes on with the journal where it is about this tree, and begins a new one otherwise.

        Args:
            tree: what the results are about: the sources, the GPU, torch.
            keep: go on in any case, without what failed.

        Returns:
            what was done, in words.
        """
        kept, words = self.events(), "goes on where the last call stopped"
        trees = [e["tree"] for e in kept if e["event"] == "tree"]
        if trees[-1:] != [tree]:
            words = "the sources have changed: " * bool(trees)
            if trees and keep:
                steps = {e["step"]: self.progress(e["step"]) for e in kept}
                kept = [e for name, p in steps.items() for e in _passed(name, p)]
                words += "what passed is kept, what failed runs again"
            else:
                kept, words = [], words + "from the beginning"
        for path in self.paths:
            write(path, "".join(json.dumps(e) + "\n" for e in kept))
        self.append("tree", tree=tree)
        return words

    def junit(self, path: Path, steps: Iterable[str]) -> None:
        """JUnit XML of these steps; tests that are wanted and have not ended are skipped ones."""
        root = ElementTree.Element("testsuites")
        cut = {"outcome": "not run", "seconds": 0.0, "message": "the part was cut"}
        for step in steps:
            p, totals = self.progress(step), dict.fromkeys(("failure", "error", "skipped"), 0)
            suite = ElementTree.SubElement(root, "testsuite", name=step)
            for name, e in {**p.results, **dict.fromkeys(p.left, cut)}.items():
                file, _, test = name.translate(CONTROL).partition("::")
                names = {"classname": file, "name": test or file, "time": f"{e['seconds']:.3f}"}
                case = ElementTree.SubElement(suite, "testcase", names)
                if e["outcome"] != "passed":
                    text = f"{e['outcome']}: {e['message']}".translate(CONTROL)
                    tag = TAGS.get(e["outcome"], "skipped")
                    totals[tag] += 1
                    ElementTree.SubElement(case, tag, message=text.split("\n")[0]).text = text
            failures, errors, skipped = map(str, totals.values())
            suite.attrib |= {"tests": str(len(suite)), "failures": failures, "errors": errors}
            suite.set("skipped", skipped)
        write(path, ElementTree.tostring(root, encoding="unicode") + "\n")


def _passed(step: str, p: Progress) -> list[Event]:
    """The results to keep; the names of all tests are collected again."""
    # A finding of compute-sanitizer belongs to no test: all of its step run again.
    if any(name.startswith(f"{step}: exit") for name in p.bad):
        return []
    return [e for name, e in p.results.items() if name not in p.bad]


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
