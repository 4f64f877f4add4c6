"""Training steps of a model, measured: the bytes that are allocated between marks, the record of
outputs, and the autocast around a forward."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._backends import quiet_kineto
from .._graph.hooks import observing
from .._recompute.record import Record, Recorder

_MARK = "fusedtrain mark"


class Meter:
    """While entered, `mark()` ends an interval. Afterwards `peaks[i]` is the most that was
    allocated after mark i, and before the next one, since the meter was entered: by torch's
    profiler (CPU), or by the caching allocator of an accelerator. Garbage of earlier steps stays
    meanwhile: its memory, freed within a step, would be taken off the peak."""

    def __init__(self, device: torch.device) -> None:
        self.peaks: list[int] = []
        self._index = device.index  # None: the CPU
        self._profile: Any = None
        self._before = 0
        self._collects = False

    @property
    def peak(self) -> int:
        return max(self.peaks)

    def __enter__(self) -> Meter:
        self._collects = gc.isenabled()
        gc.disable()
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

    def __exit__(self, *error: Any) -> None:
        if self._collects:
            gc.enable()
        if self._index is not None:
            self.mark()
            return
        self._profile.__exit__(*error)
        if error[0] is None:
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


class Running(NamedTuple):
    """A forward that is about to run, and its input tensors. It returns output and loss, as a
    training loop holds both during backward."""

    forward: Callable[[], tuple[Any, Tensor]]
    inputs: list[Tensor]


def recorded(model: nn.Module, begin: Callable[[], Running], device: torch.device) -> Record:
    """The record of a forward and its backward; the ops are timed in a run of their own."""
    timed = _run(model, begin(), None)
    record = metered(model, begin(), device)
    if [one.op for one in record.outputs] != [one.op for one in timed.outputs]:
        raise RuntimeError("model: two forwards on the same example call different functions")
    for one, other in zip(record.outputs, timed.outputs):
        one.milliseconds, one.stays = other.milliseconds, other.stays
    return record


def metered(model: nn.Module, running: Running, device: torch.device) -> Record:
    """The record without times."""
    with Meter(device) as meter:
        record = _run(model, running, meter.mark)
    record.totals = meter.peaks
    return record


def _run(model: nn.Module, running: Running, mark: Callable[[], None] | None) -> Record:
    model.zero_grad(set_to_none=True)
    recorder = Recorder(model, [*model.parameters(), *model.buffers(), *running.inputs], mark)
    with recorder, observing(recorder.enter, recorder.leave):
        output, loss = running.forward()
    loss.backward()
    del output, loss
    record = recorder.finish()
    model.zero_grad(set_to_none=True)
    return record


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of the autocast that the caller has entered; None outside."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def without_autocast(device: str) -> AbstractContextManager[object]:
    """The context of all work outside forwards."""
    enabled = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if enabled else nullcontext()


@contextmanager
def autocast_to(dtype: torch.dtype | None, device: str) -> Iterator[None]:
    """The context of a forward: it enters and leaves autocast, and casts each weight anew; the
    cache of an outer autocast would hide the bytes of these casts. None: no autocast, but the
    model's own."""
    with nullcontext() if dtype is None else torch.autocast(device, dtype):
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
