"""The optimizer's step of a mixed-precision training loop: GradScaler's unscaling and check for
infs, and the update, on as many tensors as a convolutional network has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch import Tensor

from ... import amp, optim
from ..._text import size_text
from ._match import EAGER, OURS, Entry, Match, Options
from .gate import NotTheJob, Tolerance, agrees

FUSED = "torch fused"
NEVER = 2**31 - 1  # growth interval: the scale stays, and so does what unscaling does
LR = 1e-6  # what is timed does not depend on it, and thousands of steps leave the weights sane
GATE_LR, GATE_SCALE, GATE_STEPS = 0.1, 1024.0, (1.0, 0.5)
GATE_SHAPES = ((33, 5, 3, 3), (1,), (17,), (130, 31), ())
# Each of two steps rounds weights and states, which move a weight by 0.1.
TOLERANCE = {
    torch.float32: Tolerance(1e-5, 2e-6),
    torch.float16: Tolerance(2**-9, 2**-9),
    torch.bfloat16: Tolerance(2**-6, 2**-6),
}


@dataclass(frozen=True)
class Rule:
    """An optimizer of torch.optim and of fusedtrain.optim; `states`: tensors as large as the
    parameters."""

    name: str
    options: Mapping[str, Any]
    states: int


RULES = {
    "adamw": Rule("AdamW", {"weight_decay": 1e-2}, 2),
    "sgd": Rule("SGD", {"momentum": 0.9, "weight_decay": 1e-4}, 1),
}


def shapes(count: int) -> list[tuple[int, ...]]:
    """3x3 convolutions of 64 to 512 channels, each with two vectors, and what is missing."""
    made: list[tuple[int, ...]] = []
    missing = count
    for channels in cycle((64, 128, 256, 512)):
        layer = [(channels, channels, 3, 3), (channels,), (channels,)]
        size = sum(map(prod, layer))
        if size > missing:
            break
        made += layer
        missing -= size
    return [*made, *([(missing,)] if missing else [])]


def entries(options: Options) -> Iterator[Entry]:
    """The rows of the family."""
    count = options.elements(2**23, 2**25, 2**16)
    for op in tuple(RULES)[: 1 if options.quick else None]:
        yield Entry("amp-step", op, "step", size_text(count), partial(_match, options, op, count))


def _step(who: str, rule: Rule, params: Sequence[Tensor], lr: float, scale: float) -> Any:
    """The call that takes one step on the gradients of the parameters."""
    device = params[0].device.type
    optimizer: Any
    if who == OURS:
        optimizer = getattr(optim, rule.name)(params, lr=lr, **rule.options)
    else:
        extra = {"fused": True} if who == FUSED else {}
        optimizer = getattr(torch.optim, rule.name)(params, lr=lr, **rule.options, **extra)
    make: Any = amp.GradScaler if who == OURS else torch.amp.GradScaler
    scaler = make(device, init_scale=scale, growth_interval=NEVER)
    scaler.scale(torch.ones((), device=device))  # makes its tensors

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return step


def parameters(values: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Parameters in the memory of ``values``, with ``grads`` as their gradients."""
    params: list[Tensor] = [torch.nn.Parameter(value) for value in values]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def check(who: str, op: str, options: Options) -> None:
    """Raise NotTheJob unless two steps are torch's in float64."""
    rule = RULES[op]
    values = [options.random(*shape, seed=n) for n, shape in enumerate(GATE_SHAPES)]
    grads = [options.random(*shape, seed=9 + n) for n, shape in enumerate(GATE_SHAPES)]
    wide = parameters([v.double() for v in values], [g.double() for g in grads])
    exact = getattr(torch.optim, rule.name)(wide, lr=GATE_LR, **rule.options)
    params = parameters([v.clone() for v in values], [g.clone() for g in grads])
    step = _step(who, rule, params, GATE_LR, GATE_SCALE)
    for factor in GATE_STEPS:
        for param, wider, grad in zip(params, wide, grads, strict=True):
            assert param.grad is not None
            param.grad.copy_(grad * (factor * GATE_SCALE))
            wider.grad = (grad * factor).double()
        step()
        exact.step()
    for param, wider in zip(params, wide, strict=True):
        agrees("parameter", param, wider, TOLERANCE[options.dtype])
    before = [param.detach().clone() for param in params]
    assert params[0].grad is not None
    params[0].grad.view(-1)[0] = torch.inf
    step()
    if not all(map(torch.equal, params, before)):
        raise NotTheJob("a step with an infinite gradient was not skipped")


def _match(options: Options, op: str, count: int) -> Match:
    rule = RULES[op]
    sizes = shapes(count)
    values = [0.05 * options.random(*shape, seed=n) for n, shape in enumerate(sizes)]
    grads = [0.2 * value for value in values]
    # All work on the same parameters and gradients, each with states of its own.
    calls = {
        who: _step(who, rule, parameters(values, grads), LR, 1.0) for who in (OURS, EAGER, FUSED)
    }
    item = options.dtype.itemsize
    # The update reads gradient, weight and states and writes weight and states; the check for infs
    # must be done before the first write, and reads the gradients once more.
    moved = item * count * (2 + 2 * (1 + rule.states))
    source = torch.ones(min(moved // 2, 2**28) // item, dtype=options.dtype, device=options.device)
    return Match(calls, lambda who: check(who, op, options), moved, source, in_place=True)
