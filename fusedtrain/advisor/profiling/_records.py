"""Events of the profiler, as plain records: the summary needs no profiler and no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ._families import OPTIMIZER_RANGE

LINE_RANGE = "fusedtrain line: "
_ENGINE = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Kernel:
    """A kernel, or a copy, on a GPU."""

    name: str
    us: float


@dataclass(frozen=True)
class Record:
    """An operator or a range on the host.

    Args:
        name: aten::conv2d, a range's name.
        us: microseconds of its own, without those of operators that it calls.
        start: microseconds; the order of operators.
        ranges: names of the ranges around it, the innermost first.
        thread: its number.
        sequence: number of the autograd node that a forward operator makes, or whose backward this
            operator is part of; -1 if there is none.
        kernels: launched by the operator itself.
    """

    name: str
    us: float
    start: float = 0.0
    ranges: tuple[str, ...] = ()
    thread: int = 0
    sequence: int = -1
    kernels: tuple[Kernel, ...] = ()

    @property
    def backward(self) -> bool:
        return any(name.startswith(_ENGINE) for name in (self.name, *self.ranges))

    @property
    def line(self) -> str:
        """``file:line`` where `Lines` was on, else empty."""
        for name in self.ranges:
            if name.startswith(LINE_RANGE):
                return name.removeprefix(LINE_RANGE)
        return ""


@dataclass(frozen=True)
class Recording:
    """A window of a program.

    Args:
        records: what the host did.
        wall_us: microseconds of the window.
        steps: optimizer steps in it.
        busy: intervals in which the GPU ran something, in microseconds; empty without a GPU.
    """

    records: list[Record]
    wall_us: float
    steps: int
    busy: list[tuple[float, float]] = field(default_factory=list)

    def of_training(self) -> list[Record]:
        """Records of the threads that train: pinning threads of loaders run beside them."""
        threads = {
            r.thread
            for r in self.records
            if r.name.startswith(_ENGINE) or r.name == OPTIMIZER_RANGE
        }
        return [r for r in self.records if not threads or r.thread in threads]


def recording(events: Iterable[Any], wall_us: float, steps: int) -> Recording:
    """The events of torch.profiler as records."""
    records, busy = [], []
    for event in events:
        span = event.time_range
        # A range of the host has a twin on the GPU's time line, which is no work.
        if event.device_type.name != "CPU":
            if not event.is_user_annotation:
                busy.append((span.start, span.end))
            continue
        launched = () if event.is_user_annotation else event.kernels
        kernels = tuple(Kernel(k.name, float(k.duration)) for k in launched)
        records.append(
            Record(
                event.name, float(event.self_cpu_time_total), float(span.start),
                tuple(e.name for e in _ancestors(event)), event.thread, _sequence(event), kernels,
            )
        )  # fmt: skip
    return Recording(records, wall_us, steps, busy)


def _ancestors(event: Any) -> Iterator[Any]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def _sequence(event: Any) -> int:
    """The engine's range has the number of the node; the operators in the range have not."""
    for each in (event, *_ancestors(event)):
        if each.name.startswith(_ENGINE):
            return int(each.sequence_nr)
    return int(event.sequence_nr)
