"""The process of a trial: builds what its configuration says, and takes steps when it is asked.

Requests and answers are lines of JSON on stdin and stdout. The user's code prints to stderr.
"""

from __future__ import annotations

import gc
import json
import linecache
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._graph.kept import bytes_of, kept_bytes
from .._views import users_part
from ..bench.clock import device_name
from ._job import LIBRARIES, Job, load_function, random_inputs, split, target_of
from ._recipe import loader_call, model_source, trial
from ._switches import BATCH, Config, plain

_FIRST_SCALE = 2.0**10  # of a GradScaler: its own 2**16 skips steps, whose losses then differ
_FILE = "<recipe>"
PROBED = 2  # samples, of which memory is extrapolated: batch norm cannot train with one


class Trial:
    """A model that is trained by a configuration. `facts`: those of a process that has probed."""

    def __init__(self, job: Job, config: Config, facts: dict[str, Any]) -> None:
        self.job, self.config, self._facts = job, config, facts
        self._build_model = model_function(job)
        self._batches: Iterator[Any] | None = None

    def build(self, seed: int = 0, rounding: float = 0.0) -> None:
        """The model with its initial weights, each off by up to ``rounding`` of its size.

        ``seed`` is that of dropout; initial weights are the same in all processes.
        """
        random.seed(0)
        torch.manual_seed(0)
        code = trial(self.job, self.config, self.job.lr)
        linecache.cache[_FILE] = (len(code), None, code.splitlines(True), _FILE)
        self.names: dict[str, Any] = {"build_model": self._checked_model}
        exec(compile(code, _FILE, "exec"), self.names)
        if rounding:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in self.names["model"].parameters():
                    noise = torch.empty(p.shape).uniform_(-rounding, rounding, generator=generator)
                    p.mul_(1 + noise.to(p))
        if "scaler" in self.names:
            scaler = self.names["scaler"]
            scaler.load_state_dict({**scaler.state_dict(), "scale": _FIRST_SCALE})
        torch.manual_seed(seed)

    def _checked_model(self) -> nn.Module:
        model = self._build_model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{self.job.model} returned {type(model).__name__}, not a module")
        return model

    def probe(self) -> dict[str, Any]:
        """Facts that must be known before the first trial."""
        self.build()
        model = self.names["model"]
        inputs = self._inputs(PROBED)
        outputs: list[Any] = []
        kept = kept_bytes(
            lambda: outputs.append(model(inputs)), (*model.parameters(), *model.buffers(), inputs)
        )
        classes, target_shape = target_of(self.job, outputs[0], PROBED)
        convolutions = any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())
        cuda = self.job.device == "cuda"
        self._facts = {
            "target_shape": target_shape,
            "classes": classes,
            "convolutions": convolutions and len(self.job.input) == 3,
            "kept_per_sample": kept / PROBED,
            "fixed": bytes_of([*model.parameters(), *model.buffers()]),
            "capability": list(torch.cuda.get_device_capability()) if cuda else [0, 0],
            "memory": torch.cuda.mem_get_info()[0] if cuda else None,
            "device": device_name(self.job.device),
        }
        return self._facts

    def losses(self, steps: int, seed: int = 0, rounding: float = 0.0) -> dict[str, Any]:
        """Builds, and takes the first steps on random samples that are the same in all trials."""
        begun = time.perf_counter()
        self.build(seed, rounding)
        data = self._samples(self.config[BATCH])
        losses = [float(self.names["step"](*data))]
        first = time.perf_counter() - begun
        begun = time.perf_counter()
        losses += [float(self.names["step"](*data)) for _ in range(steps - 1)]
        each = (time.perf_counter() - begun) / max(steps - 1, 1)
        return {"losses": losses, "first_step": first, "step": each}

    def memory(self) -> dict[str, Any]:
        """Takes a step, and counts its memory."""
        model, data = self.names["model"], self._samples(self.config[BATCH])
        step: Callable[..., Tensor] = self.names["step"]
        if self.job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step(*data)
            torch.cuda.synchronize()
            return {"memory": torch.cuda.max_memory_allocated(), "kept": 0}
        tensors = [*model.parameters(), *model.buffers()]
        kept = kept_bytes(lambda: step(*data), (*tensors, *data))
        states = list(self.names["optimizer"].state.values())
        return {"memory": kept + bytes_of([tensors, states]), "kept": kept}

    def turn(self, steps: int) -> dict[str, Any]:
        """Seconds for a step, on average of so many; memory of the allocator is given back."""
        cuda = self.job.device == "cuda"
        if cuda:  # fills the allocator's cache again
            self._one()
            torch.cuda.synchronize()
        gc.collect()
        gc.disable()
        begun = time.perf_counter()
        for _ in range(steps):
            self._one()
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / steps
        gc.enable()
        if cuda:  # the rival needs it
            torch.cuda.empty_cache()
        return {"seconds": seconds}

    def fits(self, batch: int) -> dict[str, Any]:
        """Whether a step of this batch size fits into the memory of the GPU."""
        try:
            self.names["step"](*self._samples(batch))
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            self.names["optimizer"].zero_grad()
            return {"fits": False}
        finally:
            self._data = None
            torch.cuda.empty_cache()
        return {"fits": True}

    # --- samples ---

    def _one(self) -> None:
        data = self._next_batch() if self.job.loader else self._samples(self.config[BATCH])
        self.names["step"](*data)

    _data: tuple[Tensor, Tensor] | None = None

    def _samples(self, batch: int) -> tuple[Tensor, Tensor]:
        if self._data is None or len(self._data[0]) != batch:
            generator = torch.Generator().manual_seed(2)
            shape = (batch, *self._facts["target_shape"])
            targets = torch.randint(self._facts["classes"], shape, generator=generator)
            self._data = (self._inputs(batch), targets.to(self.job.device))
        return self._data

    def _inputs(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return random_inputs(self.job, batch, generator).to(self.job.device)

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """The next batch of the user's loader, which begins again at its end."""
        for _ in range(2):
            if self._batches is None:
                names = {"build_loader": load_function(self.job.loader)}
                self._batches = iter(eval(loader_call(self.config), names))
            batch = next(self._batches, None)
            if batch is not None:
                inputs, targets = batch
                if len(inputs) == self.config[BATCH]:
                    return inputs, targets
            self._batches = None
        raise ValueError(f"{self.job.loader}: it has no batch of {self.config[BATCH]} samples")


def model_function(job: Job) -> Callable[[], Any]:
    """The function that builds the model of a job."""
    if split(job.model)[0] not in LIBRARIES:
        return load_function(job.model)
    names: dict[str, Any] = {}
    exec(model_source(job), names)
    return names["build_model"]


# --- the protocol ---


def main(argv: Sequence[str]) -> int:
    """``argv[0]`` is the task in JSON: the job, the configuration, and what is known."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = json.loads(argv[0])
    sys.path[:] = dict.fromkeys([*task["path"], *sys.path])
    job = Job.from_json(task["job"])
    state: Trial | None = None
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            if state is None:
                state = Trial(job, task["config"] or plain(job.batch), task["facts"])
            answer = getattr(state, name)(**request)
        except BaseException as error:
            answer = _failure(error)
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _failure(error: BaseException) -> dict[str, Any]:
    lines = traceback.format_exception(type(error), error, users_part(error.__traceback__))
    return {
        "error": traceback.format_exception_only(error)[-1].strip(),
        "traceback": "".join(lines),
        "out_of_memory": isinstance(error, (torch.OutOfMemoryError, MemoryError)),
    }
