"""The result of a diagnosis: printed as text, written as JSON."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from ..._text import time_text
from ._all_rules import RULES
from ._edits import diff_of
from ._facts import RunFacts
from ._rule import Finding

_WIDTH = 100  # characters of a line
NO_THREAD = (
    "each optimizer step was taken by a thread of its own, and doctor follows a thread from its "
    "first step on: nothing was seen. Take several steps in one thread"
)


@dataclass(repr=False)
class Diagnosis:
    """Findings of :func:`fusedtrain.doctor`: print it, or read its fields.

    `findings` are ordered by the time that they cost, `not_checked` maps the rules that say nothing
    about this run to the reason. `end` is how the run ended: "done" (after the steps that were
    asked for), "ended" (by itself, earlier), "raised", "exited" (with a `status` that is not 0),
    "stopped" (by Ctrl-C) or "died". `status` is the exit status of the script.
    """

    findings: list[Finding] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)
    facts: RunFacts = field(default_factory=RunFacts)
    end: str = "done"
    status: int = 0

    def __len__(self) -> int:
        return len(self.findings)

    def __repr__(self) -> str:
        return f"Diagnosis({len(self.findings)} findings, steps={self.facts.steps}, {self.end})"

    @property
    def partial(self) -> str:
        """Why findings may be missing; "" if none are."""
        steps = self.facts.steps
        reasons = {
            "raised": f"the script raised after {steps} steps; these are the findings so far",
            "exited": f"the script ended with exit status {self.status} after {steps} steps",
            "stopped": f"stopped after {steps} steps; these are the findings so far",
            "died": f"the process died (status {self.status}); nothing was recorded",
        }
        if self.end in reasons or steps:
            return reasons.get(self.end, "")
        if self.facts.ignored:
            return NO_THREAD
        return "the script took no step of an optimizer: most rules had nothing to look at"

    def diff(self) -> str:
        """The changes that remove findings, as a unified diff for ``patch -p0``.

        Nothing is written. Bytes of a source that are not UTF-8 are in the text as surrogates: to
        write it, take ``errors="surrogateescape"``.
        """
        return diff_of(change for finding in self.findings for change in finding.changes)

    def to_json(self) -> dict[str, Any]:
        """All fields, of JSON types."""
        return {
            "end": self.end,
            "status": self.status,
            "partial": self.partial,
            "steps": self.facts.steps,
            "device": self.facts.device,
            "assumed": self.facts.assumed,
            "step_seconds": self.facts.step,
            "findings": [
                {**asdict(finding), "site": finding.site._asdict() if finding.site else None}
                for finding in self.findings
            ],
            "not_checked": self.not_checked,
            "guide": "docs/doctor.md#the-rules",
        }

    def __str__(self) -> str:
        lines = [self.headline()]
        if self.partial:
            lines.append(f"PARTIAL: {self.partial}")
        for finding in self.findings:
            lines.append("")
            lines += finding_lines(finding)
        if self.not_checked:
            lines.append("")
            for note in self.not_checked_lines():
                lines += textwrap.wrap(note, _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)

    def headline(self) -> str:
        """One line: how much was found, in how long a run, where."""
        facts = self.facts
        count = len(self.findings)
        apply = len(RULES) - len(self.not_checked)
        step = f", {time_text(facts.step)} each" if facts.step else ""
        machine = "a GPU" if facts.on_gpu else "the CPU"
        machine = "the CPU; a GPU is assumed" if facts.assumed else machine
        return (
            f"{count or 'no'} finding{'s' * (count != 1)} in {facts.steps} steps{step} "
            f"({machine}; {apply} of {len(RULES)} rules apply)"
        )

    def not_checked_lines(self) -> list[str]:
        """The rules that say nothing: a line for each reason."""
        reasons: dict[str, list[str]] = {}
        for rule, reason in self.not_checked.items():
            reasons.setdefault(reason, []).append(rule)
        text = (f"not checked, {reason}: {', '.join(ids)}" for reason, ids in reasons.items())
        return list(text)


def finding_lines(finding: Finding) -> list[str]:
    """A finding as text: where, what, how much, what to do."""
    where = f"{finding.site}: " if finding.site else ""
    lines = [f"{where}{finding.title} [{finding.rule}]"]
    if finding.site and finding.site.code and finding.site.line > 1:
        lines.append(f"    > {finding.site.code}")
    rows = {"seen": finding.evidence, "cost": str(finding.cost), "do": finding.remedy}
    for name, text in rows.items():
        lines += textwrap.wrap(f"{name}: {text}", _WIDTH, initial_indent="    ",
                               subsequent_indent=" " * (6 + len(name)))  # fmt: skip
    return lines


def decide(facts: RunFacts, *, end: str = "done", status: int = 0) -> Diagnosis:
    """The diagnosis of the rules for these facts."""
    diagnosis = Diagnosis(facts=facts, end=end, status=status)
    for rule in RULES:
        if reason := rule.not_checked(facts):
            diagnosis.not_checked[rule.id] = reason
        else:
            diagnosis.findings += rule.findings(facts)
    diagnosis.findings.sort(key=lambda finding: -(finding.cost.seconds or 0.0))
    return diagnosis
