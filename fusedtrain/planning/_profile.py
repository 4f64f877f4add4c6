"""One training step on the example: its outputs that can be recomputed, what backward needs of
them and when, their costs, and the memory beside them."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._graph.hooks import observing
from .._recompute.plan import op_name
from .._recompute.recipes import Saved, Scope, lasting, mark, tagged
from .._recompute.torch_calls import TorchCall, TorchCalls
from .._torch_private import (
    StorageWeakRef,
    current_autograd_node,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from ._meter import Meter, synchronize

_REPEATS = 3  # of an op that is timed
_STATE = torch.get_rng_state().nbytes  # of a CPU's generator


@dataclass
class Step:
    """An output that can be recomputed. `storage`: its number; `inputs`: numbers of steps that it
    is computed from; `reads`: storages of other tensors that it is computed from. `made` and
    `died`: the moments between which the forward's Python holds the output. `inside`: bytes that
    functions within the op save, which recomputing the output does not spare."""

    op: str
    module: str
    storage: int
    inputs: list[int]
    reads: list[int]
    made: int
    died: int = -1
    milliseconds: float = 0.0
    stays: bool = True  # no later write to what the output is computed from matters
    inside: int = 0


@dataclass
class Save:
    """A tensor that autograd saves: the step that made it, or -1, and its storage. `made`: moment.
    `node`: number of the backward node that takes it, in backward's order; -1 if none does.
    `module`: the module that ran."""

    step: int
    storage: int
    made: int
    node: int = -1
    module: str = ""


@dataclass
class Profile:
    """A moment is the number of saves before it, and counts the nodes of backward from there on."""

    steps: list[Step] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)  # by storage; 0 for parameters and inputs
    nodes: int = 0  # of backward, that take saved tensors
    totals: list[int] = field(default_factory=list)  # the most allocated, by moment


class Running(NamedTuple):
    """A forward that is about to run, and its input tensors. It returns output and loss, as a
    training loop holds both during backward."""

    forward: Callable[[], tuple[Any, Tensor]]
    inputs: list[Tensor]


class _Mark:
    """The number of a step, where a recipe would be."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


class _Profiler(Scope):
    """Notes the outputs that `Planned` could recompute. Nothing is recomputed here."""

    sees_torch = True

    def __init__(self, besides: Sequence[Tensor], meter: Meter | None) -> None:
        super().__init__()
        self.profile = Profile()
        self._meter = meter  # None: ops are timed
        self._saved_before = 0  # saves before the call that runs
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps the addresses of storages from being reused
        self._modules: list[str] = [""]
        self._nodes: list[Any] = []
        self._sources: list[tuple[Step, Tensor, int]] = []  # of a step: a tensor, its version
        for tensor in besides:
            self.profile.bytes[self._storage_of(tensor)] = 0

    def _storage_of(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            tensor = torch.empty(0)  # sparse ones count as nothing
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = len(self.profile.bytes)
            self.profile.bytes.append(storage.nbytes())
            self._alive.append(StorageWeakRef(storage))
        return self._storages[key]

    @property
    def _moment(self) -> int:
        return len(self.profile.saves) + len(self._nodes)

    def wants(self, function: Callable[..., Any]) -> bool:
        self._saved_before = len(self.profile.saves)
        return self._meter is None

    def tag(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        constants: tuple[Any, ...] = (),
        dropped: Sequence[Tensor | None] = (),
    ) -> None:
        inputs, reads = [], []
        for tensor in tensors:
            if tensor is None:
                continue
            source = tagged(tensor)
            if source is not None:
                recipe: Any = source[0].recipe
                inputs.append(recipe.number)
            else:
                reads.append(self._storage_of(tensor))
        if type(function) is TorchCall and function.is_random() and output.device.index is None:
            reads.append(len(self.profile.bytes))  # a recipe keeps the state
            self.profile.bytes.append(_STATE)
        number = len(self.profile.steps)
        step = Step(
            op_name(function), self._modules[-1], self._storage_of(output), inputs, reads,
            self._moment,
        )  # fmt: skip
        self.profile.steps.append(step)
        if type(function) is TorchCall:
            outside = {step.storage, *reads, *(self.profile.steps[i].storage for i in inputs)}
            saves = self.profile.saves[self._saved_before :]
            pieces = {save.storage for save in saves} - outside
            step.inside = sum(self.profile.bytes[piece] for piece in pieces)
        if type(function) is TorchCall and lasting(tensors, output, self._plain) is None:
            step.stays = False
        self._tags.append(mark(output, _Mark(number)))
        self._alive.append(weakref.ref(output, lambda _: self._note_death(step)))
        if self._meter is None:
            self._sources += [(step, t.detach(), t._version) for t in tensors if t is not None]
            step.milliseconds = _time(lambda: function(*tensors, *constants), output.device)

    def _note_death(self, step: Step) -> None:
        step.died = self._moment

    def pack(self, tensor: Tensor) -> Any:
        source = tagged(tensor)
        recipe: Any = None if source is None else source[0].recipe
        storage = self._storage_of(tensor)
        number = -1 if recipe is None else recipe.number
        save = Save(number, storage, self._moment, module=self._modules[-1])
        self.profile.saves.append(save)
        if recipe is None:
            self._note_saved(tensor)
        if self._meter is not None:
            self._meter.mark()
        return save, Saved.of(tensor)

    def unpack(self, packed: Any) -> Tensor:
        save, saved = packed
        node = current_autograd_node()
        if not self._nodes or self._nodes[-1] is not node:
            self._nodes.append(node)
            if self._meter is not None:
                self._meter.mark()
        save.node = len(self._nodes) - 1
        tensor: Tensor = saved.take()
        return tensor

    def finish(self) -> Profile:
        profile = self.profile
        profile.nodes = len(self._nodes)
        end = len(profile.saves) + profile.nodes
        for step in profile.steps:
            step.died = end if step.died < 0 else step.died
        for step, tensor, version in self._sources:
            step.stays = step.stays and tensor._version == version
        self._sources.clear()
        if self._meter is not None:
            profile.totals = self._meter.peaks
        self._alive.clear()
        self._nodes.clear()
        return profile

    @contextmanager
    def entered(self, model: nn.Module) -> Iterator[None]:
        names = {id(module): name for name, module in model.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(names.get(id(module), self._modules[-1]))

        def leave(*_: Any) -> None:
            self._modules.pop()

        def scope() -> _Profiler | None:
            top = top_saved_tensors_hooks(True)
            return self if top is not None and getattr(top[0], "__self__", None) is self else None

        push_saved_tensors_hooks(self.pack, self.unpack)
        try:
            with TorchCalls(scope), observing(enter, leave):
                yield
        finally:
            pop_saved_tensors_hooks()
            self.close()


def _time(call: Callable[[], Any], device: torch.device) -> float:
    """The median time in milliseconds."""
    times = []
    with torch.no_grad():
        for _ in range(_REPEATS):
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def profile(model: nn.Module, step: Callable[[], Running], device: torch.device) -> Profile:
    """The profile of a forward, which returns the loss, and its backward."""
    timed = _run(model, step(), None)
    measured = metered(model, step(), device)
    if [one.op for one in measured.steps] != [one.op for one in timed.steps]:
        raise RuntimeError("model: two forwards on the same example call different functions")
    for one, other in zip(measured.steps, timed.steps):
        one.milliseconds, one.stays = other.milliseconds, other.stays
    return measured


def metered(model: nn.Module, running: Running, device: torch.device) -> Profile:
    """The profile without times."""
    with Meter(device) as meter:
        measured = _run(model, running, meter)
    measured.totals = meter.peaks
    return measured


def structure(profile: Profile) -> tuple[list[str], int, int, int]:
    """Forwards with equal structures call the same functions."""
    ops = [step.op for step in profile.steps]
    return ops, len(profile.bytes), len(profile.totals), profile.nodes


def _run(model: nn.Module, running: Running, meter: Meter | None) -> Profile:
    model.zero_grad(set_to_none=True)
    besides = [*model.parameters(), *model.buffers(), *running.inputs]
    profiler = _Profiler(besides, meter)
    with profiler.entered(model):
        output, loss = running.forward()
    loss.backward()
    del output, loss
    result = profiler.finish()
    model.zero_grad(set_to_none=True)
    return result
