"""`profile`: torch.profiler around a part of a program, and what it says by family."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity
from torch.utils.hooks import RemovableHandle

from ..._backends import quiet_kineto
from ._families import OPTIMIZER_RANGE
from ._lines import Lines
from ._records import Recording, recording
from ._summary import summary, top_operators


class Window:
    """torch.profiler from `start` to `stop`, which need not be in one function.

    It sees the operators of the thread that has called `start`.
    """

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self._begun = 0.0

    def start(self) -> None:
        wait_for_device()
        with quiet_kineto():
            self.profiler.start()
        self._thread = threading.current_thread()
        self._begun = time.perf_counter()

    @property
    def on_its_thread(self) -> bool:
        """Whether this thread is profiled."""
        return threading.current_thread() is self._thread

    def stop(self, steps: int) -> Recording:
        wait_for_device()
        wall_us = (time.perf_counter() - self._begun) * 1e6
        if not self.on_its_thread:
            # Nothing of this thread was seen. Under torch 2.10 and 2.11 `stop` would find no
            # profiler here, raise, and leave the process without a profiler for good.
            self.profiler.start_trace()
        self.profiler.stop()
        return recording(self.profiler.events() or (), wall_us, steps)


def wait_for_device() -> None:
    """Blocks until the GPU is idle."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class OptimizerRange:
    """A range around each optimizer step, made by hooks. torch's own range has the hooks inside:
    a window that begins or ends in a hook would see half of that range."""

    def __init__(self) -> None:
        self._open: list[record_function] = []
        self._hook: RemovableHandle | None = register_optimizer_step_pre_hook(self._enter)

    def _enter(self, *call: Any) -> None:
        opened = record_function(OPTIMIZER_RANGE)
        opened.__enter__()
        self._open.append(opened)

    def leave(self) -> None:
        """Ends the range of the step that has just been taken."""
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class profile:
    """Measures where a training loop's time goes.

    ``with fusedtrain.profile() as p:`` around some training steps; then ``print(p)`` is a table of
    milliseconds per step by family (convolutions, matrix products, norms, pointwise operators,
    pooling, optimizer, copies, loader, other, idle), and ``p.summary`` the same as a dictionary
    (docs/cli.md has its keys). A step is an optimizer's ``step()``; a program without one counts as
    one step. On a GPU these are times of kernels, and idle is when the GPU runs nothing; on the CPU
    they are the operators' own times, and idle is the rest of the wall time: Python, and waiting.

    The profiler slows small operators: compare shares, not steps per second. It cannot run inside
    another torch.profiler (RuntimeError of torch's), and sees the thread that it was started in: if
    optimizers step in other threads alone, it raises RuntimeError.

    Args:
        lines: also find the lines of Python that call the operators with most time,
            ``p.top_operators``. This slows the program more.
        trace: a file for Chrome's trace viewer (chrome://tracing, ui.perfetto.dev).

    Example::

        >>> import torch, fusedtrain
        >>> layer = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> with fusedtrain.profile() as p:
        ...     layer(torch.randn(4, 8)).sum().backward()
        ...     optimizer.step()
        >>> p.summary["steps"]
        1
    """

    def __init__(self, *, lines: bool = False, trace: str | os.PathLike[str] | None = None) -> None:
        self.summary: dict[str, Any] = {}
        self.recording: Recording | None = None  # each operator, for `fusedtrain.advisor.profiling`
        self.top_operators: list[dict[str, Any]] = []
        self._trace = None if trace is None else os.path.abspath(trace)
        self._lines = Lines() if lines else None
        self._steps = 0

    def __enter__(self) -> profile:
        self._window = Window()
        self._window.start()
        self._ranges = OptimizerRange()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        self._steps, self._elsewhere = 0, False
        if self._lines is not None:
            self._lines.__enter__()
        return self

    def _after_step(self, *call: Any) -> None:
        self._ranges.leave()
        if self._window.on_its_thread:
            self._steps += 1
        else:
            self._elsewhere = True

    def __exit__(self, *error: Any) -> None:
        if self._lines is not None:
            self._lines.__exit__(*error)
        self._hook.remove()
        self._ranges.leave()
        self._ranges.remove()
        seen = self._window.stop(self._steps)
        if self._elsewhere and not self._steps and error[0] is None:
            raise RuntimeError(
                "fusedtrain.profile: the optimizer steps in another thread, which the profiler "
                "does not see: put `with fusedtrain.profile()` into the function of that thread"
            )
        self.recording = seen
        self.summary = summary(seen)
        if self._lines is not None:
            self.top_operators = top_operators(seen)
        if self._trace is not None:
            self._window.profiler.export_chrome_trace(self._trace)

    def __str__(self) -> str:
        if not self.summary:
            return "fusedtrain.profile: nothing was profiled yet"
        seen = self.summary
        lines = [f"{seen['steps']} steps, {seen['wall_ms']:.3g} ms each ({seen['clock']})"]
        lines += [
            f"  {row['family']:<10} {row['ms']:>9.3f} ms {100 * row['share']:>5.1f} %"
            for row in seen["families"]
        ]
        lines += [
            f"  {row['operator']} {row['pass']} {row['line'] or ''} {100 * row['share']:.1f} %"
            for row in self.top_operators
        ]
        return "\n".join(lines)
