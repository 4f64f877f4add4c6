"""Depthwise convolutions: their calls in a run, and their time in torch's kernels and in ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import nn as fused_nn
from ..._calls import autocasts
from ..._text import shape_text
from ...conversion import convert
from ...nn.depthwise import passes_of
from ._facts import Depthwise
from ._trials import least_in_turns

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_ROUNDS, _FEWEST, _BUDGET = 5, 2, 0.1  # of a layer; the budget in seconds


class DepthwiseCall(NamedTuple):
    """A call in training. `dtype`: of the convolution, which autocast may choose."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    input_trains: bool
    weight_trains: bool


CallsOfSteps = Counter[tuple[int, DepthwiseCall]]  # how often, by step


def call_of(layer: Any, x: Any) -> DepthwiseCall | None:
    """The call of a depthwise convolution of torch; None for other layers, and without gradients.
    A subclass is not what `convert` takes."""
    if type(layer) not in _KINDS or not layer.groups == layer.in_channels > 1:
        return None
    if not isinstance(x, Tensor) or not torch.is_grad_enabled():
        return None
    dtype = torch.get_autocast_dtype(x.device.type) if autocasts(x) else x.dtype
    last = x.dim() in _LAST and not x.is_contiguous()
    last = last and x.is_contiguous(memory_format=_LAST[x.dim()])
    return DepthwiseCall(tuple(x.shape), dtype, last, x.requires_grad, layer.weight.requires_grad)


def slow_layers(
    model: nn.Module, calls: Mapping[int, CallsOfSteps], steps: Collection[int]
) -> Depthwise | None:
    """The layers of a model that `convert` would change and whose kernels of some pass are then
    ours, without the model's line. `calls`: by identity of the layer, with the step; those of
    `steps` count."""
    counts: dict[nn.Module, Counter[DepthwiseCall]] = {}
    for layer in model.modules():
        for (step, call), count in calls.get(id(layer), {}).items():
            if step in steps and _gains(layer, call):
                counts.setdefault(layer, Counter())[call] += count
    if not counts:
        return None
    report = convert(model, dry_run=True)
    names = [c.name for c in report.converted if c.target.startswith("fusedtrain.nn.Depthwise")]
    timed: dict[Any, tuple[float, float]] = {}  # layers of the same sizes once
    rows = []
    for name in names:
        layer = model.get_submodule(name)
        for call, count in counts.get(layer, {}).items():
            key = (*_sizes(layer), call)
            if key not in timed:
                timed[key] = _seconds(layer, call)
            now, converted = (count / len(steps) * one for one in timed[key])
            rows.append((now - converted, now, converted, name, call))
    if not rows:
        return None
    _, _, _, name, call = max(rows, key=lambda row: row[0])
    return Depthwise(
        type(model).__name__,
        None,
        len({row[3] for row in rows}),
        f"{name or '(the model itself)'} ({shape_text(call.shape)})",
        sum(row[1] for row in rows),
        sum(row[2] for row in rows),
    )


def _sizes(layer: Any) -> tuple[Any, ...]:
    """The class, and its arguments up to `padding_mode`."""
    return (
        type(layer), layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride,
        layer.padding, layer.dilation, layer.groups, layer.bias is not None, layer.padding_mode,
    )  # fmt: skip


def _input(layer: Any, call: DepthwiseCall) -> Tensor:
    format = _LAST[len(call.shape)] if call.channels_last else torch.contiguous_format
    device = layer.weight.device
    return torch.empty(call.shape, dtype=call.dtype, device=device, memory_format=format)


def _gains(layer: Any, call: DepthwiseCall) -> bool:
    """Whether our kernel runs in a pass of the call."""
    use = passes_of(layer, _input(layer, call))
    return bool(
        use.forward
        or (use.grad_input and call.input_trains)
        or (use.grad_weight and call.weight_trains)
    )


def _seconds(layer: Any, call: DepthwiseCall) -> tuple[float, float]:
    """Forward and backward in torch's kernels and in ours."""
    kind, *sizes = _sizes(layer)
    ours = getattr(fused_nn, f"Depthwise{kind.__name__}")
    runs = {name: _run(cls, sizes, layer, call) for name, cls in (("now", kind), ("ours", ours))}
    for run in runs.values():
        run()
    times = least_in_turns(runs, _ROUNDS, _BUDGET, _FEWEST)
    return times["now"], times["ours"]


def _run(cls: Any, sizes: list[Any], layer: Any, call: DepthwiseCall) -> Callable[[], Any]:
    """Forward and backward of a new layer, which draws no random numbers."""
    twin = nn.utils.skip_init(cls, *sizes, device=layer.weight.device, dtype=call.dtype)
    twin.requires_grad_(call.weight_trains)
    x = _input(layer, call).fill_(0.5).requires_grad_(call.input_trains)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.fill_(0.1)
        gradient = torch.full_like(twin(x), 0.01)
    leaves = [t for t in (x, *twin.parameters()) if t.requires_grad]

    def run() -> None:
        output = twin(x)
        if leaves:
            torch.autograd.grad(output, leaves, gradient)

    return run
