"""Contestants of the timings, and the gate of each: the command `bench` and benchmarks/ share them.

A family is a module with ``entries(options)``, the rows that the command `bench` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from . import activations, amp_step, chains, conv, depthwise, norms
from ._match import (
    CLOCKS,
    COMPILE,
    COPY,
    EAGER,
    FRESH_COPY,
    LAYOUTS,
    OURS,
    Contest,
    Entry,
    Options,
    Result,
    admitted,
    call_of,
    copies_of,
    duel,
    measure,
    numbers,
    peak_operations,
)

# In the order in which they are shown.
FAMILIES: Mapping[str, Callable[[Options], Iterable[Entry]]] = {
    "activations": activations.entries,
    "norm": norms.entries,
    "amp-step": amp_step.entries,
    "conv": conv.entries,
    "depthwise": depthwise.entries,
    "chains": chains.entries,
}

__all__ = [
    "CLOCKS",
    "COMPILE",
    "COPY",
    "EAGER",
    "FAMILIES",
    "FRESH_COPY",
    "LAYOUTS",
    "OURS",
    "Contest",
    "Entry",
    "Options",
    "Result",
    "admitted",
    "call_of",
    "copies_of",
    "duel",
    "measure",
    "numbers",
    "peak_operations",
]
