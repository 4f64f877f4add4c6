"""Time by family, forward and backward; the operators that take most, with their lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ._families import FAMILIES, family_of, uses_tensor_cores
from ._records import LINE_RANGE, Record, Recording

TOP = 15


def summary(window: Recording) -> dict[str, Any]:
    """Milliseconds per step, of a window of at least one step; for JSON.

    Where the GPU ran anything, times are those of kernels, and idle is when the GPU ran nothing.
    Otherwise they are the operators' own on the host, and idle is the rest of the wall time:
    Python, and whatever waits without the profiler's knowledge.
    """
    records = window.of_training()
    on_gpu = bool(window.busy)
    times: dict[str, dict[str, float]] = {
        name: {"forward": 0.0, "backward": 0.0} for name in FAMILIES
    }
    tensor_cores = products = 0.0
    for record, family, name, us in _work(records, on_gpu):
        times[family]["backward" if record.backward else "forward"] += us
        if on_gpu and family in ("conv", "matmul"):
            products += us
            tensor_cores += us if uses_tensor_cores(name) else 0.0
    worked = _covered(window.busy) if on_gpu else sum(sum(t.values()) for t in times.values())
    times["idle"]["forward"] = max(0.0, window.wall_us - worked)
    total = sum(sum(parts.values()) for parts in times.values())
    steps = max(1, window.steps)
    families = [
        {
            "family": name,
            "ms": _per_step(sum(parts.values()), steps),
            "share": sum(parts.values()) / total if total else 0.0,
            # No gradient of these is computed: they are no part of either.
            **({} if name in _NEITHER else {k: _per_step(v, steps) for k, v in parts.items()}),
        }
        for name, parts in times.items()
    ]
    return {
        "steps": window.steps,
        "clock": "kernels on the GPU" if on_gpu else "operators on the host",
        "wall_ms": _per_step(window.wall_us, steps),
        "families": families,
        "tensor_core_share": tensor_cores / products if products else None,
    }


_NEITHER = ("optimizer", "loader", "idle")


def _per_step(us: float, steps: int) -> float:
    return us / 1e3 / steps


def _work(records: Iterable[Record], on_gpu: bool) -> Iterator[tuple[Record, str, str, float]]:
    """Record, family, name and microseconds of all that took time."""
    for record in records:
        if on_gpu:
            for kernel in record.kernels:
                family = family_of(kernel.name, record.ranges, record.name)
                yield record, family, kernel.name, kernel.us
        else:
            yield record, family_of(record.name, record.ranges), record.name, record.us


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union: kernels of several streams overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def top_operators(window: Recording) -> list[dict[str, Any]]:
    """The operators with most time, by the line that called them, of a window with `Lines`.

    An operator of a backward pass has the line of the call whose gradient it computes.
    """
    records = window.of_training()
    lines = _lines_by_sequence(records)
    on_gpu = bool(window.busy)
    times: dict[tuple[str, str, str, bool], float] = defaultdict(float)
    total = 0.0
    for record, family, name, us in _work(records, on_gpu):
        total += us
        # The families say enough of these. A line's own time is Python's.
        if family in _NEITHER or name.startswith(LINE_RANGE):
            continue
        line = lines.get(record.sequence, "") if record.backward else record.line
        times[name, line, family, record.backward] += us
    ranked: Sequence[tuple[tuple[str, str, str, bool], float]] = sorted(
        times.items(), key=lambda item: -item[1]
    )
    steps = max(1, window.steps)
    return [
        {
            "operator": operator, "line": line or None, "family": family,
            "pass": "backward" if backward else "forward", "ms": _per_step(us, steps),
            "share": us / total if total else 0.0,
        }
        for (operator, line, family, backward), us in ranked[:TOP]
    ]  # fmt: skip


def _lines_by_sequence(records: Iterable[Record]) -> dict[int, str]:
    """The last operator with a number made the node: those before it, without a node of their own,
    have the same number."""
    lines: dict[int, str] = {}
    for record in sorted(records, key=lambda r: r.start):
        if record.line and record.sequence >= 0 and not record.backward:
            lines[record.sequence] = record.line
    return lines
