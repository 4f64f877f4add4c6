"""Numbers and findings as text."""

from __future__ import annotations

import textwrap

from ._facts import Facts
from ._rule import Finding, milliseconds

__all__ = ["device_in_words", "finding_lines", "milliseconds"]

WIDTH = 100


def finding_lines(finding: Finding) -> list[str]:
    """A finding as text: where, what, how much, what to do."""
    where = f"{finding.site}: " if finding.site else ""
    lines = [f"{where}{finding.title} [{finding.rule}]"]
    if finding.site and finding.site.code and finding.site.line > 1:
        lines.append(f"    > {finding.site.code}")
    rows = {"seen": finding.evidence, "cost": str(finding.cost), "do": finding.remedy}
    for name, text in rows.items():
        lines += textwrap.wrap(f"{name}: {text}", WIDTH, initial_indent="    ",
                               subsequent_indent=" " * (6 + len(name)))  # fmt: skip
    return lines


def device_in_words(facts: Facts) -> str:
    """Where the script ran, and whether the rules assume something else."""
    if facts.assumed:
        return "the CPU; a GPU is assumed"
    return "a GPU" if facts.on_gpu else "the CPU"
