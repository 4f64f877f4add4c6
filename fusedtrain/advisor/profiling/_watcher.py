"""Profiles a user's script: what happens at which of its optimizer steps."""

from __future__ import annotations

import statistics
import time
from typing import Any

from torch.optim.optimizer import Optimizer

from ._convert import Conversion
from ._lines import Lines
from ._profile import OptimizerRange, Window, wait_for_device
from ._summary import summary, top_operators


class ProfilingWatcher:
    """A `fusedtrain.advisor._scripts.Watcher`.

    After ``warmup`` steps come ``steps`` with the profiler, ``steps`` without, which are timed, and
    one with the profiler and with the lines of Python. With ``convert``, the models of the script
    are converted at the first step of each optimizer, before the last step of the warm-up.

    A script with torch.compile is not asked for lines: it would compile anew for that step.
    """

    def __init__(
        self, script: str, *, steps: int, warmup: int, trace: str | None = None,
        convert: bool = False,
    ) -> None:  # fmt: skip
        self._warmup, self._steps, self._trace = warmup, steps, trace
        self._conversion = Conversion() if convert else None
        self._window: Window | None = None
        self._profiled = 0  # steps since the window began
        self._lines: Lines | None = None
        self._results: dict[str, Any] = {}
        self._times: list[float] = []  # seconds of steps without the profiler
        self._processor: list[float] = []  # of the processor, in all threads
        self._before = self._before_processor = 0.0

    def begin(self) -> None:
        self._ranges = OptimizerRange()
        if self._conversion is not None:
            self._conversion.begin()
        if self._warmup == 0:
            self._open()

    def step(self, count: int, optimizer: Optimizer) -> bool:
        self._ranges.leave()
        # The last step of the warm-up is without hooks: torch.compile may compile anew.
        last = max(self._warmup - 1, 1)
        if self._conversion is not None and count <= last:
            self._conversion.apply(optimizer)
            if count == last:
                self._conversion.end()
        if self._window is not None:
            # The training thread had not begun, or is another one now.
            if not self._window.on_its_thread:
                self._profiled = 0
                self._close()
                self._warmup = count
            else:
                self._profiled += 1
        first, second = self._warmup + self._steps, self._warmup + 2 * self._steps
        if count == self._warmup:
            self._open()
        elif count == first:
            self._close()
        elif first < count <= second:
            wait_for_device()
            self._times.append(time.perf_counter() - self._before)
            self._processor.append(time.process_time() - self._before_processor)
        if count == second:
            if "no_lines" in self._results:
                return True
            self._open(lines=True)
        elif count > second:
            self._close()
            return True
        self._before, self._before_processor = time.perf_counter(), time.process_time()
        return False

    def finish(self) -> dict[str, Any]:
        self._ranges.remove()
        if self._window is not None:
            self._close()
        if self._times:
            self._results["step_ms"] = 1e3 * statistics.median(self._times)
            self._results["processor_ms"] = 1e3 * min(self._processor)  # others only add to it
        if self._conversion is not None:
            self._conversion.end()
            self._results["conversion"] = self._conversion.report
        return self._results

    def _open(self, lines: bool = False) -> None:
        self._window, self._profiled = Window(), 0
        if lines:
            self._lines = Lines()
            self._lines.__enter__()
        self._window.start()

    def _close(self) -> None:
        assert self._window is not None
        seen = self._window.stop(self._profiled)
        if self._lines is not None:
            # Not taken off torch's stack of modes: the script may have put one on top meanwhile.
            self._lines.active = False
            self._lines = None
            if self._profiled:
                self._results["top_operators"] = top_operators(seen)
        elif self._profiled:
            self._results |= summary(seen)
            if any(r.name.startswith("Torch-Compiled Region") for r in seen.records):
                self._results["no_lines"] = "torch.compile: no operators with lines of Python"
            if self._trace:
                self._window.profiler.export_chrome_trace(self._trace)
        self._window = None
