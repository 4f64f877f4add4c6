"""The operators of a step: which of them wait for the device, copy, clear or clone."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import TorchDispatchMode, current_dispatch_mode
from .._views import Site, user_site
from ._facts import Copy, Event

# The host needs a number of the device for these, and waits for the device.
_SYNCS = {
    "_local_scalar_dense": "a number is read",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "equal": "torch.equal",
}
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_convolution")
_CONVOLUTIONS = ("convolution", "_convolution")
_CLAMPS = ("clamp_", "clamp_max_", "_foreach_clamp_max_")  # clip_grad_value_ calls one
_LARGE = 1 << 20  # bytes
# Activations whose derivative needs the input: autograd clones it before they work in place.
CLONING = frozenset(
    ("silu_", "mish_", "hardswish_", "hardsigmoid_", "gelu_", "hardtanh_", "relu6_", "threshold_")
)

_Key = tuple[str, Site | None, Any, Any]  # kind, line, and what two fields of the kind's class hold


@dataclass
class _StepTrace:
    """One step: events by key as [count, bytes, seconds]; outputs' elements of each operator.
    `counts`: by the names of `RunFacts`."""

    events: dict[_Key, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 3))
    elements: list[int] = field(default_factory=list)
    matmuls: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)


class _Mode(TorchDispatchMode):
    """Calls `run` with each operator of the thread that has entered the mode; None: calls the
    operator alone."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run: Callable[..., Any] | None = run

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.run is None:
            return func(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})


class Operators:
    """The operators of the thread that called `enter`, until `leave`.

    `gradients` returns the addresses of gradients. `quiet()`: whether reads of numbers on the CPU
    are usual now and do not count.
    """

    def __init__(self, gradients: Callable[[], set[int]], quiet: Callable[[], bool]) -> None:
        self.steps: list[_StepTrace] = [_StepTrace()]
        self._gradients, self._quiet = gradients, quiet
        self._cloned: tuple[int, int] = (0, 0)  # the input of a clone just made, and its bytes
        self._inside = 0
        self._modes: list[_Mode] = []
        self.clamps: Callable[[list[Tensor]], None] = lambda tensors: None  # called before a clamp

    def enter(self) -> None:
        self._modes.append(_Mode(self._run))
        self._modes[-1].__enter__()

    def leave(self) -> None:
        """Only the thread that has entered a mode can take it off its stack, and only from the top,
        where the script may have a mode of its own: there the mode stays and does nothing, until
        `leave` is called again."""
        for mode in reversed(self._modes):
            mode.run = None
            if current_dispatch_mode() is mode:
                mode.__exit__(None, None, None)
                self._modes.remove(mode)

    def next_step(self) -> None:
        self.steps.append(_StepTrace())

    @contextmanager
    def sync(self, what: str, device: str) -> Iterator[None]:
        """A call that waits; operators within do not count a second time."""
        site, start = user_site(), time.perf_counter()
        with self.paused():
            yield
        if not self._inside and not (device == "cpu" and self._quiet()):
            self._count("sync", site, what, device, 0, time.perf_counter() - start)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls that wait do not count."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def clipped(self, site: Site | None, what: str, gradients: list[Tensor]) -> None:
        """Counts gradients that are clipped while a loss scale multiplies them."""
        size = sum(t.nbytes for t in gradients)
        self._count("clip", site, what, gradients[0].device.type, size)

    def _count(
        self, kind: str, site: Site | None, one: Any, other: Any, size: float, seconds: float = 0
    ) -> None:
        entry = self.steps[-1].events[kind, site, one, other]
        entry[0] += 1
        entry[1] += size
        entry[2] += seconds

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "profiler" or name == "detach":  # no work; and the watch detaches, too
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        what = _waits(name, first, args, kwargs)
        if what and first is not None and not self._inside:
            device = args[1].device.type if name == "copy_" else first.device.type
            with self.sync(what, device):
                result = func(*args, **kwargs)
        else:
            self._before(name, first, args, kwargs)
            result = func(*args, **kwargs)
        self._after(func, name, args, result)
        return result

    def _before(
        self, name: str, first: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        cloned, self._cloned = self._cloned, (0, 0)
        if name == "zero_" and first is not None and first.data_ptr() in self._gradients():
            self._count("memset", user_site(), name, first.device.type, first.nbytes)
        elif name in _CLAMPS and not self._inside:
            self.clamps(args[0] if first is None else [first])
        elif name == "_foreach_zero_":
            cleared = [t for t in args[0] if t.data_ptr() in self._gradients()]
            if cleared:
                size = sum(t.nbytes for t in cleared)
                self._count("memset", user_site(), name, cleared[0].device.type, size)
        elif name == "clone" and first is not None:
            self._cloned = (first.data_ptr(), first.nbytes)
        elif name in CLONING and first is not None:
            if first.requires_grad and cloned[0] and cloned[0] == first.data_ptr():
                self._count("clone", user_site(), name, first.device.type, cloned[1])
        elif name == "_to_copy" and first is not None and kwargs.get("device") is not None:
            self._copy(first, torch.device(kwargs["device"]), bool(kwargs.get("non_blocking")))
        elif name == "copy_" and first is not None and isinstance(args[1], Tensor):
            self._copy(args[1], first.device, _non_blocking(args, kwargs))

    def _copy(self, source: Tensor, device: torch.device, non_blocking: bool) -> None:
        kinds = (source.device.type, device.type)
        if kinds == ("cpu", "cuda"):
            self._count("copy", user_site(), source.is_pinned(), non_blocking, source.nbytes)

    def _after(self, func: Any, name: str, args: tuple[Any, ...], result: Any) -> None:
        step = self.steps[-1]
        output = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(output, Tensor):
            return
        step.elements.append(output.numel())
        step.counts["operators"] += 1
        returns = func._schema.returns
        if returns and returns[0].alias_info is None and output.nbytes >= _LARGE:
            step.counts["large"] += output.nbytes
        if name in _MATMULS:
            step.matmuls[str(output.dtype).removeprefix("torch.")] += 1
        if name in _CONVOLUTIONS:
            x, formats = args[0], {4: torch.channels_last, 5: torch.channels_last_3d}
            dtype, last = output.dtype, formats.get(x.dim())
            step.counts["convolutions"] += 1
            step.counts["half_convolutions"] += dtype in (torch.float16, torch.bfloat16)
            step.counts["single_convolutions"] += dtype is torch.float32
            step.counts["contiguous"] += bool(last) and not x.is_contiguous(memory_format=last)


def _waits(name: str, first: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The reason why the host waits in this operator; "" if it does not."""
    if name in _SYNCS:
        return _SYNCS[name]
    if name in _INDEXING and _by_booleans(args):
        return "an index of booleans"
    if first is None:
        return ""
    source, device = first, kwargs.get("device")
    if name == "copy_" and isinstance(args[1], Tensor):
        source, device = args[1], first.device
    elif name != "_to_copy" or device is None:
        return ""
    to_host = (source.device.type, torch.device(device).type) == ("cuda", "cpu")
    return "a copy to the host" if to_host and not _non_blocking(args, kwargs) else ""


def _non_blocking(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _by_booleans(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], (tuple, list)) else ()
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


class Account:
    """The averages of some steps."""

    def __init__(self, steps: list[_StepTrace]) -> None:
        self._steps, self._count = steps, max(len(steps), 1)

    def mean(self, name: str) -> float:
        return sum(step.counts[name] for step in self._steps) / self._count

    def matmuls(self) -> dict[str, float]:
        total: Counter[str] = sum((step.matmuls for step in self._steps), Counter())
        return {dtype: count / self._count for dtype, count in total.items()}

    def elements(self) -> float:
        return median([n for step in self._steps for n in step.elements] or [0])

    def events(self, kind: str) -> list[Event]:
        """The lines of one kind that are in each of the steps, or every other one.

        A line that only the first step has is left out: the line
        `if i % 100 == 0: print(loss.item())` of the step before prints there.
        """
        later = {key for step in self._steps[1:] or self._steps for key in step.events}
        events = [
            Event(site, what, count, size, seconds, device)
            for (_, site, what, device), (count, size, seconds) in self._means(kind, later)
        ]
        return sorted(events, key=lambda event: -event.count)

    def copies(self) -> list[Copy]:
        return [
            Copy(site, count, size, pinned, non_blocking)
            for (_, site, pinned, non_blocking), (count, size, _) in self._means("copy")
        ]

    def _means(self, kind: str, among: set[_Key] | None = None) -> list[tuple[_Key, list[float]]]:
        """Count, bytes and seconds a step, of events in every other step at least."""
        sums: dict[_Key, list[float]] = defaultdict(lambda: [0.0] * 3)
        for step in self._steps:
            for key, entry in step.events.items():
                if key[0] == kind and (among is None or key in among):
                    sums[key] = [a + b for a, b in zip(sums[key], entry)]
        means = [(key, [number / self._count for number in entry]) for key, entry in sums.items()]
        return [(key, mean) for key, mean in means if mean[0] >= 0.5]
