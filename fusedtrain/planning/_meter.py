"""Bytes that a device has allocated between marks: by torch's profiler (CPU), or by the caching
allocator of an accelerator."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from .._backends import quiet_kineto

_MARK = "fusedtrain mark"


def synchronize(device: torch.device) -> None:
    """Waits for an accelerator."""
    if device.index is not None:
        torch.accelerator.synchronize(device)


class Meter:
    """While entered, `mark()` ends an interval. Afterwards `peaks[i]` is the most that was
    allocated after mark i, and before the next one, since the meter was entered."""

    def __init__(self, device: torch.device) -> None:
        self.peaks: list[int] = []
        self._index = device.index  # None: the CPU
        self._profile: Any = None
        self._before = 0

    @property
    def peak(self) -> int:
        return max(self.peaks)

    def __enter__(self) -> Meter:
        if self._index is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            with quiet_kineto():
                self._profile.__enter__()
            self.mark()
        else:
            torch.accelerator.synchronize(self._index)
            self._before = torch.accelerator.memory_allocated(self._index)
            torch.accelerator.reset_peak_memory_stats(self._index)
        return self

    def mark(self) -> None:
        if self._index is None:
            with torch.profiler.record_function(_MARK):
                pass
        else:
            self.peaks.append(torch.accelerator.max_memory_allocated(self._index) - self._before)
            torch.accelerator.reset_peak_memory_stats(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._index is not None:
            self.mark()
            return
        self._profile.__exit__(kind, error, traceback)
        if kind is None:
            events = self._profile.profiler.kineto_results.events()
            self._read((e.start_ns(), e.name(), e.nbytes()) for e in events)
        self._profile = None

    def _read(self, events: Any) -> None:
        now = 0
        for _, name, size in sorted(e for e in events if e[1] in (_MARK, "[memory]")):
            if name == _MARK:
                self.peaks.append(now)
            elif self.peaks:
                now += size
                self.peaks[-1] = max(self.peaks[-1], now)
