"""The model of a job, trained in one of several ways; the memory and the time of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..._graph.forward import set_recomputing
from ..._graph.kept import bytes_of
from ..._recompute import MemoryPlan, fingerprint
from ..._recompute.record import synchronize
from ..._torch_private import compiled_within, pytree
from ...conversion import convert, revert
from ...planning._meter import Meter, Running, autocast_to
from .._memory import SHARE, available_memory
from ..tuning._job import Job, target_of
from ._affine import PROBES, predicted
from ._checkpoint import blocks_of, checkpoint_blocks, restore_blocks
from ._losses import Draw, Outcome, usual_loss

Way = str | MemoryPlan  # eager, convert, recompute, checkpoint, or a plan
WAYS = ("eager", "convert", "recompute")
# Rivals of plans on a curve: one block of so many is checkpointed; budgets of torch.compile.
CHECKPOINTS = {"checkpoint": 1, "checkpoint, every 2nd block": 2, "checkpoint, every 4th block": 4}
COMPILED = {f"torch.compile, budget {budget}": budget for budget in (1.0, 0.5, 0.25, 0.0)}
_SHARE_OF_GPU = 0.9  # of the free memory, which other steps have cut into pieces


class Trainer:
    """Steps of the model that `build_model` makes, on batches of `draw`. `loss`: of both; None: the
    usual one. `dtype`: of autocast, if any."""

    def __init__(
        self, job: Job, build_model: Callable[[], nn.Module], draw: Draw, loss: Outcome | None,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.job, self._draw, self._dtype = job, draw, dtype
        self._loss = loss or usual_loss
        model = build_model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{job.model} returned {type(model).__name__}, not a module")
        self.model = model.to(job.device)
        if not model.training:  # otherwise parts may be frozen
            model.train()
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
        self._drawn: tuple[int, Any] | None = None
        self._target = self._probed() if loss is None else None
        self._data_bytes = {number: bytes_of(self._data(number)) for number in reversed(PROBES)}
        self._step(self._data(PROBES[0]))  # the optimizer makes its states
        if not any(p.grad is not None for p in self.model.parameters()):
            raise ValueError("step: the loss depends on no parameter of the model that it is given")
        self._optimizer.zero_grad()
        states = list(self._optimizer.state.values())
        self._states = bytes_of([*self.model.parameters(), *self.model.buffers(), states])
        self.available = self._available()

    def switch(self, way: Way) -> None:
        """Makes the model train in this way from now on."""
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
        return self._states + round(predicted(self._data_bytes, batch))

    def peak(self, batch: int) -> int:
        """The most bytes at a moment of a step, `fixed` included."""
        data = self._data(batch)
        self._optimizer.zero_grad()  # gradients of an earlier step would be freed under the meter
        with Meter(self.device) as meter:
            self._step(data)
        self._optimizer.zero_grad()
        return meter.peak + self.fixed(batch)

    def seconds(self, batch: int) -> float:
        """The time of a step."""
        data = self._data(batch)
        synchronize(self.device)
        begun = time.perf_counter()
        self._step(data)
        synchronize(self.device)
        return time.perf_counter() - begun

    def forget(self) -> None:
        """Frees the tensors of a step that did not fit."""
        self._optimizer.zero_grad()
        self._drawn = None
        torch.accelerator.empty_cache()

    def begin(self, batch: int) -> Running:
        """A forward that is about to run."""
        data = self._data(batch)
        inputs = [leaf for leaf in pytree.tree_leaves(data) if isinstance(leaf, Tensor)]
        return Running(lambda: self._outcome(data), inputs)

    def _step(self, data: Any) -> None:
        self._optimizer.zero_grad()
        output, loss = self._outcome(data)
        loss.backward()
        self._optimizer.step()
        del output  # training loops hold it as long

    def _outcome(self, data: Any) -> tuple[Any, Tensor]:
        containers = pytree.tree_map(lambda leaf: leaf, data)  # a step may pop labels
        with autocast_to(self._dtype, self.device.type):
            return self._loss(self._call, containers)

    def _probed(self) -> tuple[int, list[int]] | None:
        """Classes and the target's shape beside the batch, where a batch is inputs alone."""
        data = self._draw(PROBES[0])
        if not isinstance(data, Tensor):
            return None
        with torch.no_grad():
            return target_of(self.job, self.model(data), PROBES[0])

    def _data(self, batch: int) -> Any:
        if self._drawn is None or self._drawn[0] != batch:
            self._drawn = None  # two batches are never in memory together
            data = self._draw(batch)
            if self._target is not None:
                classes, rest = self._target
                data = data, torch.randint(classes, (batch, *rest), device=self.job.device)
            self._drawn = batch, data
        return self._drawn[1]

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
