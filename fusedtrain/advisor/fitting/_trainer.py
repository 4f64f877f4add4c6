"""The model of a job, trained in one of several ways; the memory and the time of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..._graph.forward import set_recomputing
from ..._recompute import MemoryPlan, fingerprint
from ..._torch_private import compiled_within
from ...conversion import convert, revert
from ...planning._meter import Meter
from ...planning._profile import Running
from .._memory import SHARE, available_memory, fixed_bytes
from ..tuning._job import Job
from ._checkpoint import blocks_of, checkpoint_blocks, restore_blocks

Way = str | MemoryPlan  # eager, convert, recompute, checkpoint, or a plan
WAYS = ("eager", "convert", "recompute")
# Rivals of plans on a curve: one block of so many is checkpointed; budgets of torch.compile.
CHECKPOINTS = {"checkpoint": 1, "checkpoint, every 2nd block": 2, "checkpoint, every 4th block": 4}
COMPILED = {f"torch.compile, budget {budget}": budget for budget in (1.0, 0.5, 0.25, 0.0)}
PROBES = (2, 4)  # samples, of which memory is extrapolated: batch norm cannot train with one
_SHARE_OF_GPU = 0.9  # of the free memory, which other steps have cut into pieces


class Trainer:
    """`build_model` makes the model, which returns a tensor [batch, classes, ...]."""

    def __init__(self, job: Job, build_model: Callable[[], nn.Module]) -> None:
        self.job = job
        model = build_model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{job.model} returned {type(model).__name__}, not a module")
        self.model = model.to(job.device).train()
        revert(self.model)
        self.fingerprint = fingerprint(self.model)
        self.device = next((p.device for p in model.parameters()), torch.device(job.device))
        # Weights stay: many steps on the same samples would end in NaN, or in zero gradients.
        optimizers = {
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9),
            "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=0.0),
        }
        self._optimizer = optimizers[job.optimizer]()
        self._converted = False
        self._checkpointed: list[nn.Module] = []
        self._call: Callable[..., Any] = self.model
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._samples: tuple[Tensor, Tensor] | None = None
        self._target: tuple[int, list[int]] = self._probed()
        self._step(*self._data(PROBES[0]))  # the optimizer makes its states
        self._optimizer.zero_grad()
        self._states = fixed_bytes(self.model, self._optimizer)
        self._each = sum(tensor.nbytes for tensor in self._data(PROBES[0])) // PROBES[0]
        self.available = self._available()

    def switch(self, way: Way) -> None:
        """From now on the model trains in this way."""
        restore_blocks(self._checkpointed)
        self._checkpointed = []
        self._call = self.model
        if isinstance(way, str) and way not in WAYS[1:]:
            revert(self.model)
            self._converted = False
            if way in CHECKPOINTS:
                self._checkpointed = blocks_of(self.model)[:: CHECKPOINTS[way]]
                checkpoint_blocks(self._checkpointed)
            if way in COMPILED:
                if way not in self._compiled:
                    self._compiled[way] = compiled_within(self.model, COMPILED[way])
                self._call = self._compiled[way]
            return
        if not self._converted:
            convert(self.model, memory="recompute")
            self._converted = True
        set_recomputing(self.model, way if isinstance(way, MemoryPlan) else way == "recompute")

    def fixed(self, batch: int) -> int:
        """Bytes of parameters, buffers, the optimizer's states, inputs and targets."""
        return self._states + self._each * batch

    def peak(self, batch: int) -> int:
        """The most bytes at a moment of a step, `fixed` included."""
        data = self._data(batch)
        self._optimizer.zero_grad()  # gradients of an earlier step would be freed under the meter
        with Meter(self.device) as meter:
            self._step(*data)
        self._optimizer.zero_grad()
        return meter.peak + self.fixed(batch)

    def seconds(self, batch: int) -> float:
        """The time of a step."""
        data = self._data(batch)
        self._synchronize()
        begun = time.perf_counter()
        self._step(*data)
        self._synchronize()
        return time.perf_counter() - begun

    def forget(self) -> None:
        """Frees what a step that did not fit has left."""
        self._optimizer.zero_grad()
        self._samples = None
        torch.accelerator.empty_cache()

    def begin(self, batch: int) -> Running:
        """A forward that is about to run."""
        inputs, targets = self._data(batch)
        return Running(lambda: self._outcome(inputs, targets), [inputs, targets])

    def _step(self, inputs: Tensor, targets: Tensor) -> None:
        self._optimizer.zero_grad()
        output, loss = self._outcome(inputs, targets)
        loss.backward()
        self._optimizer.step()
        del output  # training loops hold it as long

    def _outcome(self, inputs: Tensor, targets: Tensor) -> tuple[Any, Tensor]:
        output = self._call(inputs)
        logits = getattr(output, "logits", output)
        return output, nn.functional.cross_entropy(logits, targets)

    def _probed(self) -> tuple[int, list[int]]:
        """Classes and the target's shape beside the batch."""
        with torch.no_grad():
            output = self.model(self._inputs(PROBES[0]))
        output = getattr(output, "logits", output)
        if not isinstance(output, Tensor) or output.dim() < 2 or len(output) != PROBES[0]:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"{self.job.model}: for {PROBES[0]} samples the model returns {shape}; fit trains "
                "classifiers, which return a tensor [batch, classes, ...]"
            )
        return output.shape[1], list(output.shape[2:])

    def _inputs(self, batch: int) -> Tensor:
        shape = (batch, *self.job.input)
        if self.job.tokens:
            return torch.randint(self.job.tokens, shape, device=self.job.device)
        return torch.randn(shape, device=self.job.device)

    def _data(self, batch: int) -> tuple[Tensor, Tensor]:
        if self._samples is None or len(self._samples[0]) != batch:
            self._samples = None  # two batches are never in memory together
            classes, rest = self._target
            targets = torch.randint(classes, (batch, *rest), device=self.job.device)
            self._samples = self._inputs(batch), targets
        return self._samples

    def _synchronize(self) -> None:
        if self.device.index is not None:
            torch.accelerator.synchronize(self.device)

    def _available(self) -> int | None:
        """Bytes that a step may take here, `fixed` of the smallest batch included."""
        if self.device.index is not None:
            torch.accelerator.empty_cache()
            free = int(_SHARE_OF_GPU * torch.cuda.mem_get_info(self.device)[0])
        else:
            memory = available_memory()
            if memory is None:
                return None
            free = int(SHARE * memory)
        return free + self.fixed(PROBES[0])
