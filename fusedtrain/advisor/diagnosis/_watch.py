"""A run that is watched: where steps begin and end, how long they take, what is constructed.

The first steps are observed closely, which makes them slow; the others are timed, with nothing on
but hooks of the optimizer and of loaders.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.weak import WeakIdKeyDictionary

from ..._torch_private import DataLoaderIter
from .._views import Site, gradients_of, user_site
from ._facts import Kept
from ._graphs import kept_graphs
from ._modules import Calls, Mark
from ._operators import Operators
from ._patches import Patches
from ._scaling import Scaling

OBSERVED = 3  # steps


@dataclass
class LoaderRecord:
    site: Site | None
    loader: Callable[[], DataLoader[Any] | None]
    workers: int
    pinned: bool
    iterable: bool
    waits: list[float] = field(default_factory=list)


@dataclass
class OptimizerRecord:
    site: Site | None
    optimizer: torch.optim.Optimizer
    seconds: list[float] = field(default_factory=list)


@dataclass
class ScalerRecord:
    site: Site | None
    scaler: Any
    used: int = 0


@dataclass
class StepTimes:
    """Measurements of a whole step. `usual`: no evaluation within."""

    seconds: float
    busy: float  # of the main thread
    optimizer: float
    wait: float
    loading: float  # seconds of the processor within `wait`
    faults: int
    drain: float | None = None
    usual: bool = True


class Watch:
    """Between `start` and `stop` a thread is watched; `stop` leaves nothing behind.

    The thread is the one that calls `start`, unless another one takes the first step: the watch
    follows then, from the end of that step on. It does so again when the thread has ended.
    """

    def __init__(self, steps: int, *, assumed: bool, examples: bool) -> None:
        self.limit, self.assumed = steps, assumed
        self.taken = 0
        self.timed: list[StepTimes] = []
        self.unusual: set[int] = set()
        self.loaders: list[LoaderRecord] = []
        self.optimizers: dict[int, OptimizerRecord] = {}
        self.scalers: dict[int, ScalerRecord] = {}
        self.parallel: list[tuple[Site | None, nn.Module]] = []
        self.kept: Kept | None = None
        self.threads_site: Site | None = None
        # Keyed by identity: a module may hash what its __init__ has yet to set (torchmetrics).
        self.sites = WeakIdKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, LoaderRecord] = weakref.WeakKeyDictionary()
        self.zeros: list[float] = []
        self.calls = Calls(lambda: self.taken, examples)
        self.operators = Operators(self._gradients, self._reads_the_host)
        self.scaling = Scaling(self._known, self.operators.clipped)
        self.operators.clamps = self.scaling.clamped
        self._patches, self._closely = Patches(), Patches()  # for the run, for the first steps
        self._running = self._observing = False
        self._thread, self._followed = threading.current_thread(), False
        self.ignored = 0  # steps of threads that are not watched
        self._primary: torch.optim.Optimizer | None = None
        self._others: set[int] = set()  # optimizers that stepped since
        self._inside = 0  # of optimizers' steps
        self._loading = 0
        self._entered = self._began = self._began_busy = 0.0
        self._optimizer = self._wait = self._cpu = 0.0
        self._faults = 0
        self._addresses: tuple[int, set[int]] = (-1, set())

    # Start and stop.

    def start(self) -> None:
        patches = self._patches
        patches.later(register_optimizer_step_pre_hook(self._before_step).remove)
        patches.after(nn.Module, "__init__", self._module_made)
        patches.before(nn.Module, "train", self._mode_changes)
        patches.after(torch.optim.Optimizer, "__init__", self._optimizer_made)
        patches.after(DataLoader, "__init__", self._loader_made)
        patches.wrap(DataLoaderIter, "__init__", self._iterator_init)
        patches.wrap(DataLoaderIter, "__next__", self._next)
        patches.after(torch.amp.GradScaler, "__init__", self._scaler_made)
        patches.before(torch.amp.GradScaler, "scale", self._loss_scaled)
        patches.before(torch, "set_num_threads", self._threads_chosen)
        self.scaling.watch(patches)
        self._running = True
        self._observe(True)
        _watches.append(self)
        self._begin()

    def stop(self) -> None:
        if not self._running:
            return
        self._running = False
        with ExitStack() as every:  # each of them, even if another one raises
            every.callback(_watches.remove, self)
            every.callback(self._patches.undo)
            every.callback(self.calls.rest)
            every.callback(self.operators.leave)
            every.callback(self._observe, False)

    def _observe(self, on: bool) -> None:
        if on is self._observing:
            return
        self._observing = on
        if on:
            self.calls.listen()
            for name in ("__repr__", "tolist", "cpu"):
                self._closely.wrap(Tensor, name, self._waits(name))
            self.scaling.watch_clipping(self._closely)
            for name in ("empty_cache", "synchronize"):
                self._closely.wrap(torch.cuda, name, self._waits(f"torch.cuda.{name}"))
            self.operators.enter()
        else:
            self.operators.leave()
            self._closely.undo()
            self.calls.rest()

    # Steps.

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.current_thread() is not self._thread:
            return
        if not self._inside:
            self.scaling.step(optimizer)
            if self._observing and self.calls.autocast.get("float16"):
                with self.operators.paused():
                    self._count_zeros(optimizer)
            self._entered = time.perf_counter()
        self._inside += 1

    def after_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Called after each step of an optimizer; returns whether all was seen."""
        if threading.current_thread() is not self._thread:
            return self._step_of_another_thread()
        self._inside = max(self._inside - 1, 0)
        if self._inside:
            return False
        seconds = time.perf_counter() - self._entered
        record = self._record(optimizer)
        if not self._observing:
            record.seconds.append(seconds)
        self._optimizer += seconds
        # The optimizer that steps first ends a step; another one does if that one steps no more.
        if self._primary is None or id(optimizer) in self._others:
            self._primary = optimizer
        if optimizer is not self._primary:
            self._others.add(id(optimizer))
            return False
        self._others.clear()
        return self.taken >= self.limit or self._end_step()

    def _step_of_another_thread(self) -> bool:
        """Returns whether to give up: each step has a new thread, and none can be followed."""
        self.ignored += 1
        if not self._thread.is_alive() or not (self._followed or self.taken):
            self._thread, self._followed = threading.current_thread(), True
            self._inside, self._entered = 0, time.perf_counter()
            self.calls.follow()
            if self._observing:
                self.operators.leave()
                self.operators.enter()
            self._begin()
        return not self.taken and self.ignored >= self.limit

    def _record(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = OptimizerRecord(user_site(), optimizer)
        return self.optimizers[id(optimizer)]

    def _end_step(self) -> bool:
        """Returns whether that was the last step."""
        now = time.perf_counter()
        drain = None
        if not self._observing:
            if "cuda" in self.calls.devices:
                torch.cuda.synchronize()
                drain = time.perf_counter() - now
            seconds = time.perf_counter() - self._began
            usual = self.taken not in self.unusual
            faults = _minor_faults() - self._faults
            busy = time.thread_time() - self._began_busy
            step = StepTimes(
                seconds, busy, self._optimizer, self._wait, self._cpu, faults, drain, usual
            )
            self.timed.append(step)
        if self.kept is None:
            self._look_for_graphs()
        self.taken += 1
        self._addresses = (-1, set())
        if self._observing:
            self.operators.next_step()
            if self.taken >= min(OBSERVED, self.limit):
                self._observe(False)
        self._begin()
        return self.taken >= self.limit

    def _begin(self) -> None:
        self._optimizer = self._wait = self._cpu = 0.0
        self._faults = _minor_faults()
        self._began, self._began_busy = time.perf_counter(), time.thread_time()

    def _look_for_graphs(self) -> None:
        """Graphs of two steps that are alive two steps later belong to a loss that is kept."""
        alive = [mark for mark in (mark() for mark in self.calls.marks) if mark is not None]
        old: list[Mark] = [mark for mark in alive if mark.step <= self.taken - 2]
        if len({mark.step for mark in old}) >= 2:
            self.kept = kept_graphs(old)

    def _known(self) -> list[torch.optim.Optimizer]:
        return [record.optimizer for record in self.optimizers.values()]

    def _gradients(self) -> set[int]:
        """Addresses of the gradients, found once a step."""
        if self._addresses[0] != self.taken:
            gradients = (gradient for o in self._known() for gradient in gradients_of(o))
            self._addresses = (self.taken, {gradient.data_ptr() for gradient in gradients})
        return self._addresses[1]

    def _count_zeros(self, optimizer: torch.optim.Optimizer) -> None:
        grads = gradients_of(optimizer)
        total = sum(g.numel() for g in grads)
        if total:
            left = sum(int(torch.count_nonzero(g)) for g in grads)
            self.zeros.append(1 - left / total)

    def _reads_the_host(self) -> bool:
        """Optimizers count steps and loaders draw seeds in tensors of the CPU in any case."""
        return self._inside > 0 or self._loading > 0

    # Constructors and methods that the script calls.

    def _module_made(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        site = user_site(module)
        if site is not None:
            self.sites[module] = site
        if isinstance(module, nn.DataParallel):
            self.parallel.append((site, module))

    def _mode_changes(self, module: nn.Module, mode: bool = True) -> None:
        if id(module) in self.calls.roots and module.training != mode:
            self.unusual.add(self.taken)
            if not mode:
                self.calls.listen()
            elif not self._observing:
                self.calls.rest()

    def _optimizer_made(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        self.optimizers[id(optimizer)] = OptimizerRecord(user_site(optimizer), optimizer)

    def _loader_made(self, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        self.loaders.append(_loader_record(loader, user_site(loader)))

    def _iterator_init(self, original: Callable[..., None]) -> Callable[..., None]:
        def init(iterator: Any, loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            with self._within_loader():
                original(iterator, loader, *args, **kwargs)
            record = next((r for r in self.loaders if r.loader() is loader), None)
            if record is None:
                record = _loader_record(loader, user_site())
                self.loaders.append(record)
            self._iterators[iterator] = record

        return init

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def advance(iterator: Any) -> Any:
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                with self._within_loader():
                    return original(iterator)
            finally:
                seconds = time.perf_counter() - start
                self._wait += seconds
                self._cpu += time.thread_time() - cpu
                if iterator not in self._iterators:  # made before the watch began
                    self._iterators[iterator] = _iterator_record(iterator, user_site())
                    self.loaders.append(self._iterators[iterator])
                if not self._observing:
                    self._iterators[iterator].waits.append(seconds)

        return advance

    @contextmanager
    def _within_loader(self) -> Iterator[None]:
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1

    def _scaler_made(self, scaler: Any, *args: Any, **kwargs: Any) -> None:
        self.scalers[id(scaler)] = ScalerRecord(user_site(scaler), scaler)

    def _loss_scaled(self, scaler: Any, outputs: Any) -> None:
        record = self.scalers.setdefault(id(scaler), ScalerRecord(user_site(), scaler))
        if scaler.is_enabled():
            record.used += 1
            self.scaling.scale()

    def _threads_chosen(self, count: int) -> None:
        self.threads_site = user_site()

    def _waits(self, what: str) -> Callable[[Any], Any]:
        words = {"__repr__": "a tensor is printed", "cpu": ".cpu()", "tolist": ".tolist()"}

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                device = args[0].device.type if args and isinstance(args[0], Tensor) else "cuda"
                with self.operators.sync(words.get(what, what), device):
                    return original(*args, **kwargs)

            return call

        return make


def _loader_record(loader: DataLoader[Any], site: Site | None) -> LoaderRecord:
    iterable = isinstance(loader.dataset, IterableDataset)
    reference = weakref.ref(loader)
    return LoaderRecord(site, reference, loader.num_workers, loader.pin_memory, iterable)


def _iterator_record(iterator: Any, site: Site | None) -> LoaderRecord:
    iterable = isinstance(getattr(iterator, "_dataset", None), IterableDataset)
    workers, pinned = getattr(iterator, "_num_workers", 0), getattr(iterator, "_pin_memory", False)
    return LoaderRecord(site, lambda: None, workers, pinned, iterable)


def _minor_faults() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


_watches: list[Watch] = []


def _in_child() -> None:
    """A process that is forked, such as a loader's worker, is not watched."""
    for watch in list(_watches):
        watch.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
