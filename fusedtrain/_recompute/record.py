"""The record of one forward and backward: outputs that can be recomputed, tensors that backward
needs of them and when, their costs, and the memory beside them."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import StorageWeakRef, current_autograd_node
from .plan import PlannedStep, op_name
from .recipes import Saved, tagged
from .torch_calls import TorchCall, TorchScope

_REPEATS = 3  # of an op that is timed
_STATE = torch.get_rng_state().nbytes  # of a CPU's generator


def synchronize(device: torch.device) -> None:
    """Waits for an accelerator."""
    if device.index is not None:
        torch.accelerator.synchronize(device)


@dataclass
class Output:
    """An output that can be recomputed. `storage`: its number; `inputs`: numbers of outputs that it
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
    """A tensor that autograd saves: the output that it is, or -1, and its storage. `made`: moment.
    `node`: number of the backward node that takes it, in backward's order; -1 if none does.
    `module`: the module that ran."""

    output: int
    storage: int
    made: int
    node: int = -1
    module: str = ""


@dataclass
class Record:
    """One forward and backward, by moments: a moment is the number of saves before it, and counts
    the nodes of backward from there on."""

    outputs: list[Output] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)  # by storage; 0 for parameters and inputs
    nodes: int = 0  # of backward, that take saved tensors
    totals: list[int] = field(default_factory=list)  # the most allocated, by moment

    def is_like(self, other: Record) -> bool:
        """Whether both forwards call the same functions."""
        return self._structure() == other._structure()

    def _structure(self) -> tuple[list[str], int, int, int]:
        ops = [output.op for output in self.outputs]
        return ops, len(self.bytes), len(self.totals), self.nodes

    def steps(self, choice: Sequence[bool]) -> list[PlannedStep]:
        """Steps of a plan that recomputes the chosen outputs."""
        return [
            PlannedStep(o.op, o.module, self.bytes[o.storage], round(o.milliseconds, 4), chosen)
            for o, chosen in zip(self.outputs, choice)
        ]

    def between(self, other: Record, share: float) -> Record:
        """The record of another batch: bytes and milliseconds on the line from this record (share
        0) through one of a larger batch (share 1)."""

        def at(low: float, high: float) -> float:
            return max(low + (high - low) * share, 0)

        return replace(
            other,
            bytes=[round(at(*pair)) for pair in zip(self.bytes, other.bytes)],
            totals=[round(at(*pair)) for pair in zip(self.totals, other.totals)],
            outputs=[
                replace(high, milliseconds=at(low.milliseconds, high.milliseconds))
                for low, high in zip(self.outputs, other.outputs)
            ],
        )


class Recorder(TorchScope):
    """Notes the outputs that `Planned` could recompute. Nothing is recomputed here: the number of
    an output stands where a recipe would be.

    `besides`: tensors that do not count. `mark`: called when a moment ends; None: ops are timed.
    `enter` and `leave` are hooks for the calls of the model's modules.
    """

    def __init__(
        self, model: nn.Module, besides: Iterable[Tensor], mark: Callable[[], None] | None
    ) -> None:
        super().__init__()
        self.record = Record()
        self._end_moment = mark
        self._names = {id(module): name for name, module in model.named_modules()}
        self._saved_before = 0  # saves before the call that runs
        self._storages: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps the addresses of storages from being reused
        self._modules: list[str] = [""]
        self._nodes: list[Any] = []
        self._sources: list[tuple[Output, Tensor, int]] = []  # of an output: a tensor, its version
        for tensor in besides:
            self.record.bytes[self._storage_of(tensor)] = 0

    def enter(self, module: nn.Module, _: Any) -> None:
        self._modules.append(self._names.get(id(module), self._modules[-1]))

    def leave(self, *_: Any) -> None:
        self._modules.pop()

    def _storage_of(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            tensor = torch.empty(0)  # sparse ones count as nothing
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = len(self.record.bytes)
            self.record.bytes.append(storage.nbytes())
            self._alive.append(StorageWeakRef(storage))
        return self._storages[key]

    @property
    def _moment(self) -> int:
        return len(self.record.saves) + len(self._nodes)

    def wants(self, function: Callable[..., Any]) -> bool:
        self._saved_before = len(self.record.saves)
        return self._end_moment is None

    def tag(
        self,
        output: Tensor,
        function: Callable[..., Tensor],
        tensors: Sequence[Tensor | None],
        constants: tuple[Any, ...] = (),
        dropped: Sequence[Tensor | None] = (),
    ) -> None:
        record, present = self.record, [t for t in tensors if t is not None]
        numbers = [_number_of(tensor) for tensor in present]
        inputs = [number for number in numbers if number >= 0]
        reads = [self._storage_of(t) for t, number in zip(present, numbers) if number < 0]
        call = function if isinstance(function, TorchCall) else None
        if call is not None and call.is_random() and output.device.index is None:
            reads.append(len(record.bytes))  # a recipe keeps the state
            record.bytes.append(_STATE)
        storage = self._storage_of(output)
        one = Output(op_name(function), self._modules[-1], storage, inputs, reads, self._moment)
        one.stays = self.lasting(function, tensors, output) is not None
        if call is not None:
            outside = {storage, *reads, *(record.outputs[i].storage for i in inputs)}
            pieces = {save.storage for save in record.saves[self._saved_before :]} - outside
            one.inside = sum(record.bytes[piece] for piece in pieces)
        self._mark(output, len(record.outputs))
        record.outputs.append(one)
        self._alive.append(weakref.ref(output, lambda _: self._note_death(one)))
        if self._end_moment is None:
            self._sources += [(one, t.detach(), t._version) for t in present]
            one.milliseconds = _time(lambda: function(*tensors, *constants), output.device)

    def _note_death(self, output: Output) -> None:
        output.died = self._moment

    def pack(self, tensor: Tensor) -> Any:
        number = _number_of(tensor)
        save = Save(number, self._storage_of(tensor), self._moment, module=self._modules[-1])
        self.record.saves.append(save)
        if number < 0:
            self._note_saved(tensor)
        if self._end_moment is not None:
            self._end_moment()
        return save, Saved.of(tensor)

    def unpack(self, packed: Any) -> Tensor:
        save, saved = packed
        node = current_autograd_node()
        if not self._nodes or self._nodes[-1] is not node:
            self._nodes.append(node)
            if self._end_moment is not None:
                self._end_moment()
        save.node = len(self._nodes) - 1
        tensor: Tensor = saved.take()
        return tensor

    def finish(self) -> Record:
        """The record, after backward."""
        record = self.record
        record.nodes, end = len(self._nodes), self._moment
        for output in record.outputs:
            output.died = end if output.died < 0 else output.died
        for output, tensor, version in self._sources:
            output.stays = output.stays and tensor._version == version
        self._sources.clear()
        self._alive.clear()
        self._nodes.clear()
        return record


def _number_of(tensor: Tensor) -> int:
    """The number of the output that a tensor is, or is a view of; else -1."""
    source = tagged(tensor)
    number: Any = -1 if source is None else source[0].recipe
    return int(number)


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
