"""A plan of what backward recomputes, for a budget of memory.

`_recompute` records, plans and replays; this package runs the model for it: `_meter` measures a
step and records its outputs, `_batches` plans for batches that need not fit.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._graph.compiled import original_of, without_compiled_code
from .._graph.example import arguments_of, example_for
from .._graph.forward import set_recomputing
from .._graph.kept import bytes_of
from .._graph.state import duplicate, restored
from .._graph.tracer import same_generators
from .._recompute.plan import MemoryPlan, PlannedStep, fingerprint
from .._recompute.record import Record, synchronize
from .._recompute.search import Search
from .._recompute.simulate import peak_lines
from .._text import FEW_BYTES, bytes_in, memory_text
from .._torch_private import profiler_is_running, pytree
from ..conversion import check_dropout, convert, revert
from ._meter import (
    Meter,
    Running,
    autocast_dtype,
    autocast_to,
    metered,
    recorded,
    without_autocast,
)

__all__ = ["MemoryPlan", "PlannedStep", "plan_memory"]

_STEPS, _SECONDS = 3, 1.0  # that are timed: more where they are fast
_FRACTION = "a fraction of eager's peak is a float, such as 0.6"

Loss = Callable[[Any], Tensor]


def plan_memory(
    model: nn.Module,
    example_inputs: Any,
    budget: int | float | str,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dropout: str = "torch",
) -> MemoryPlan:
    """Finds what backward has to recompute for a training step to fit a budget of memory, in the
    least time. Losses and gradients keep the bits of `convert(model)`.

    Runs copies of the model on the example: which functions it calls, how long each takes, which
    outputs backward needs, and what is allocated besides. Convolutions, products, norms,
    activations, poolings, sums, concatenations and dropout can be recomputed; what other
    functions save is kept. Chooses by simulation, measures the choice, and tries again with a
    smaller budget if its peak is above. Call it within `torch.autocast` if training runs there.
    The model, its gradients and the random generators do not change.

    Args:
        model: in its mode of training, on its device; converted or not.
        example_inputs: a tensor, a shape, arguments or a function, as for
            :func:`fusedtrain.convert`. The plan is for this batch; another one has its own peak.
        budget: the most that torch's tensors may take at a moment of the step: bytes, or text with
            a unit (kB, MB, GB, kiB, MiB, GiB). Parameters, buffers, inputs, gradients
            and the optimizer's states are within. A float from 0 to 1 is a fraction of eager
            PyTorch's peak beside parameters, buffers, inputs and states.
        loss: makes the loss of the model's output. None: the sum of all its floating tensors.
        optimizer: the optimizer that will train; its states count, also before its first step.
        dropout: as in `convert`, which has to be told the same.

    Returns:
        a :class:`MemoryPlan` for `convert(model, example_inputs, memory=plan)`; prints as a table.

    Raises:
        TypeError: `model` is no module, or another type of example, budget, loss or optimizer.
        ValueError: no plan has so low a peak; the message says the lowest. A budget that is no
            size, another `dropout`, an example without a loss that can be differentiated.

    The model's errors are passed on.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv:1604.06174), for the
    segments from which the search starts.

    Example:
        >>> import fusedtrain, torch
        >>> from torch.nn import BatchNorm2d, Conv2d, SiLU
        >>> layers = [(Conv2d(8, 8, 3, padding=1), BatchNorm2d(8), SiLU()) for _ in range(4)]
        >>> model = torch.nn.Sequential(*sum(layers, ()))
        >>> x = torch.randn(2, 8, 32, 32)
        >>> plan = fusedtrain.plan_memory(model, x, 0.8)
        >>> plan.peak <= 0.8 * plan.eager_peak
        True
        >>> report = fusedtrain.convert(model, x, memory=plan)
    """
    _check(model, loss, optimizer)
    check_dropout(dropout)
    if profiler_is_running():
        raise RuntimeError("plan_memory: torch's profiler runs, and the plan needs it: plan before")
    allowed = _bytes_of(budget)
    original = original_of(model, "plan_memory")
    example = example_for(original, example_inputs)
    twin = duplicate(original)
    revert(twin)
    device = next((t.device for t in twin.parameters()), torch.device("cpu"))
    dtype = autocast_dtype(device.type)

    def begin(samples: int | None = None) -> Running:
        arguments = arguments_of(example)
        if samples is not None:
            arguments = pytree.tree_map(partial(_first, samples), arguments)
        inputs = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]

        def forward() -> tuple[Any, Tensor]:
            with autocast_to(dtype, device.type):
                output = twin(*arguments[0], **arguments[1])
                return output, _loss_of(output, loss)

        return Running(forward, inputs)

    steps = _Steps(twin, begin, device)
    with (
        restored(original), same_generators(), without_compiled_code(twin), torch.enable_grad(),
        without_autocast(device.type),
    ):  # fmt: skip
        _show("eager PyTorch on the example")
        eager = steps.peak()
        nothing = MemoryPlan(
            fingerprint(twin), 0, 0, 0, 0, 0, 0.0, 0.0, device.type, dropout=dropout
        )
        convert(twin, memory=nothing, dropout=dropout)
        _show("the functions of a step")
        record = recorded(twin, begin, device)
        search = Search(record)
        search.run(lambda done, of: _show(f"choices, {done} of {of}"))
        fixed = _fixed_bytes(twin, begin().inputs, optimizer)
        limit = int(allowed * eager) if isinstance(allowed, float) else allowed - fixed
        plan = search.plan(limit, device.type, steps.peak, _show)
        if plan.peak > limit:
            share = f"{math.ceil(100 * plan.peak / max(eager, 1)) / 100:.2f} of eager's"
            in_bytes = isinstance(allowed, int)
            lowest = search.lowest_text(plan.peak, fixed if in_bytes else 0)
            few = f" ({allowed} are bytes; {_FRACTION})"
            raise ValueError(
                f"budget: no plan needs less than {lowest}. The lowest peak is {share} "
                f"{memory_text(eager)}{few if in_bytes and allowed < FEW_BYTES else ''}"
            )
        _show("the time of steps")
        milliseconds, extra = steps.timed(plan)
        _show("half of the example")
        batch = _batch_of(begin().inputs)
        half = steps.half(batch, record)
    _show("")
    choice = [step.recompute for step in plan.steps]
    return replace(
        plan, model=fingerprint(original), eager_peak=eager, milliseconds=milliseconds,
        extra_milliseconds=extra, batch=batch, dropout=dropout,
        lines=peak_lines(choice, (batch // 2, half), (batch, record)) if half else [],
    )  # fmt: skip


def _check(model: Any, loss: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss: expected a function of the output, got {type(loss).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )


def _bytes_of(budget: Any) -> int | float:
    """Bytes, or a fraction."""
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        order = "; the example comes before it" if isinstance(budget, Tensor) else ""
        kind = type(budget).__name__
        raise TypeError(f"budget: expected bytes, text as '4GiB', or a fraction, got {kind}{order}")
    if isinstance(budget, str):
        size = bytes_in(budget)
        if not size:
            raise ValueError(f"budget: {budget!r} is no size, like '800MB' or '4GiB'; {_FRACTION}")
        return size
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise ValueError(
            f"budget: a float is a fraction of eager's peak, between 0 and 1, not {budget}; bytes "
            "are an int"
        )
    if budget <= 0:
        raise ValueError(f"budget: must be positive, not {budget}")
    return budget


def _loss_of(output: Any, loss: Loss | None) -> Tensor:
    if loss is not None:
        value = loss(output)
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise ValueError("loss: must return a tensor with a gradient")
        return value
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError("model: no output requires a gradient; pass loss=, or unfreeze the model")
    return sum((leaf.float().sum() for leaf in leaves[1:]), leaves[0].float().sum())


def _step(model: nn.Module, running: Running) -> None:
    model.zero_grad(set_to_none=True)
    output, loss = running.forward()
    loss.backward()
    del output


class _Steps:
    """Steps of a model on the example. `begin(samples)`: a forward of so many samples that is about
    to run; without a number: of all."""

    def __init__(
        self, model: nn.Module, begin: Callable[..., Running], device: torch.device
    ) -> None:
        self.model, self.begin, self.device = model, begin, device

    def peak(self, plan: bool | MemoryPlan = False) -> int:
        """The peak of a step under a plan."""
        set_recomputing(self.model, plan)
        try:
            running = self.begin()
            with Meter(self.device) as meter:
                _step(self.model, running)
        finally:
            set_recomputing(self.model, False)
        self.model.zero_grad(set_to_none=True)
        return meter.peak

    def timed(self, plan: MemoryPlan) -> tuple[float, float]:
        """Milliseconds of a step, and what the plan adds: steps in turn, without their first."""
        times: list[tuple[float, float]] = []
        until = time.perf_counter() + _SECONDS
        while len(times) <= _STEPS or (len(times) < 4 * _STEPS and time.perf_counter() < until):
            alone = self._seconds(False)
            times.append((alone, self._seconds(plan) if plan.recomputed else alone))
        set_recomputing(self.model, False)
        self.model.zero_grad(set_to_none=True)
        extra = statistics.median(planned - alone for alone, planned in times[1:])
        return statistics.median(alone for alone, _ in times[1:]) * 1e3, max(extra, 0.0) * 1e3

    def _seconds(self, plan: bool | MemoryPlan) -> float:
        set_recomputing(self.model, plan)
        running = self.begin()
        start = time.perf_counter()
        _step(self.model, running)
        synchronize(self.device)
        return time.perf_counter() - start

    def half(self, batch: int, whole: Record) -> Record | None:
        """The record of half of the example; None if it tells nothing of other batches."""
        if batch < 2:
            return None
        try:
            half = metered(self.model, self.begin(batch // 2), self.device)
        except Exception:  # of the user's model or loss, which need not take another batch
            return None
        return half if half.is_like(whole) else None


def _batch_of(inputs: list[Tensor]) -> int:
    """The first dimension that all inputs share, or 0."""
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in inputs}
    return sizes.pop() if len(sizes) == 1 else 0


def _first(samples: int, leaf: Any) -> Any:
    return leaf[:samples] if isinstance(leaf, Tensor) else leaf


def _fixed_bytes(
    model: nn.Module, inputs: list[Tensor], optimizer: torch.optim.Optimizer | None
) -> int:
    """Bytes of parameters, buffers, inputs, and the optimizer's states after a step."""
    size = bytes_of([*model.parameters(), *model.buffers(), *inputs])
    if optimizer is None:
        return size
    if not optimizer.state:
        optimizer = copy.deepcopy(optimizer)  # with its parameters
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        try:
            optimizer.step()
        except TypeError as error:  # it wants a closure, as LBFGS does
            raise ValueError(
                "optimizer: its states are not known before its first step; take a step first"
            ) from error
    return size + bytes_of(list(optimizer.state.values()))


def _show(text: str) -> None:
    """Says on one line of a terminal what runs."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[Kplan_memory: {text}" if text else "\r\x1b[K")
        sys.stderr.flush()
