"""The optimizer's step: the gate of its contestants, and the rows of the command `bench`.

The command times GradScaler's check for infs and the update, on as many tensors as a convolutional
network has; benchmarks/ times all jobs, rules and kinds of `steps.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._text import size_text
from . import steps
from ._match import EAGER, OURS, Entry, Match, Options
from .gate import NotTheJob, Tolerance, agrees
from .steps import (
    EMA_DECAY,
    FUSED,
    LR,
    MAX_NORM,
    RULES,
    Contestant,
    Kind,
    bytes_per_parameter,
    does,
    gradients,
    parameters,
    their_class,
    their_options,
)

GATE_SCALE, GATE_STEPS = 1024.0, (1.0, 0.5)
GATE_SHAPES = ((33, 5, 3, 3), (1,), (17,), (130, 31), ())
LARGE = (70, 64)
# Each of two steps rounds weights and states, which move a weight by 0.1.
TOLERANCE = {
    torch.float32: Tolerance(1e-5, 2e-6),
    torch.float16: Tolerance(2**-9, 2**-9),
    torch.bfloat16: Tolerance(2**-6, 2**-6),
}


def small_tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[list[Tensor]]:
    """Values and gradients."""
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(2)
    ]


def exact_steps(
    of: Any,
    options: Mapping[str, Any],
    values: Iterable[Tensor],
    grads: Iterable[Tensor],
    *,
    clip: bool,
) -> tuple[torch.optim.Optimizer, list[Tensor], list[Tensor]]:
    """The optimizer, its parameters and their averages after ``GATE_STEPS``, in float64."""
    wide = [g.cpu().double() for g in grads]
    params = parameters([v.cpu().double() for v in values], wide)
    optimizer = of(params, **options)
    averages = [p.detach().clone() for p in params]
    for factor in GATE_STEPS:
        for p, g in zip(params, wide, strict=True):
            p.grad = g * factor
        if clip:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(averages, params, strict=True):
                average.lerp_(p, 1 - EMA_DECAY)
    return optimizer, params, averages


def _check_states(
    who: str, kind: Kind, exact: torch.optim.Optimizer, expected: list[Tensor], entrant: Contestant
) -> None:
    """States may be small throughout (clipped, or squares): relative to the tensor's."""
    # Two steps of 8-bit codes: each rounds a number by 1.6 % of its group's largest.
    rtol = 0.04 if kind.codes else TOLERANCE[kind.weight].rtol
    if kind.codes and who != "fusedtrain":
        return  # of other formats parameters alone
    states: Any = [entrant.optimizer.state[p] for p in entrant.stepped]
    if kind.codes:
        states = list(entrant.optimizer.state_dict()["state"].values())
    for mine, wide in zip(states, expected, strict=True):
        for key, state in exact.state[wide].items():
            if isinstance(state, Tensor) and state.ndim and state.shape == wide.shape:
                limit = Tolerance(rtol, rtol * state.abs().max())
                agrees(f"state {key!r}", mine[key], state, limit)


def check(who: str, name: str, job: str, kind: Kind, device: str) -> None:
    """Raise NotTheJob unless two steps on small ugly tensors match the rival's class in float64.

    Parameters, averages and states are compared; gradients must be zeroed, and a step with an
    infinite gradient must change nothing.
    """
    rule = RULES[name]
    # States of smaller tensors are not in codes.
    of = (*GATE_SHAPES, LARGE) if kind.codes else GATE_SHAPES
    values, grads = ([t.to(device) for t in ts] for ts in small_tensors(of, kind.dtype))
    exact, expected, averages = exact_steps(
        their_class(rule),
        their_options(rule, job) | {"lr": rule.gate_lr},
        values,
        grads,
        clip=does(job, "clip") and not rule.clips,
    )
    scale = GATE_SCALE if does(job, "check") else 1.0
    params = parameters([v.clone() for v in values], [g.clone() for g in grads])
    entrant = steps.contestant(who, name, job, kind, params, lr=rule.gate_lr, scale=scale)
    for factor in GATE_STEPS:
        for grad, g in zip(gradients(entrant.params), grads, strict=True):
            grad.copy_(g * (factor * scale))
        entrant.call()
        if does(job, "zero") and any(bool(grad.any()) for grad in gradients(entrant.params)):
            raise NotTheJob("gradients are not zeroed")
    tolerance = TOLERANCE[kind.dtype]
    for p, wanted in zip(entrant.params, expected, strict=True):
        if kind.codes and p.shape == LARGE:
            # An element whose root is far below its neighbours' takes a smaller step: of the mean.
            off = (p.detach().double() - wanted.to(device)).abs().mean()
            if not off <= 2**-8:  # of two steps of 0.1
                raise NotTheJob("wrong parameter, of states in codes")
        else:
            agrees("parameter", p, wanted, tolerance)
    if does(job, "ema"):
        for average, wanted in zip(entrant.averages(), averages, strict=True):
            agrees("average", average, wanted, tolerance)
    _check_states(who, kind, exact, expected, entrant)
    if does(job, "check"):
        before = [p.detach().clone() for p in entrant.params]
        gradients(entrant.params)[-2].view(-1)[-1] = torch.inf
        entrant.call()
        if not all(map(torch.equal, entrant.params, before)):
            raise NotTheJob("a step with an infinite gradient was not skipped")


# --- the command `bench` ---


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
    """The rows of the family; where tensors are float16, of float32 parameters: GradScaler refuses
    float16 gradients."""
    count = options.elements(2**23, 2**25, 2**16)
    half = options.dtype == torch.float16
    kind = Kind(torch.float32 if half else options.dtype)
    for op in ("adamw",) if options.quick else ("adamw", "sgd"):
        name = f"{op} float32" if half else op
        make = partial(_match, replace(options, dtype=kind.dtype), op, kind, count)
        yield Entry("amp-step", name, "step", size_text(count), make)


def _match(options: Options, op: str, kind: Kind, count: int) -> Match:
    sizes, job = shapes(count), "check"
    values = [0.05 * options.random(*shape, seed=n) for n, shape in enumerate(sizes)]
    grads = [0.2 * value for value in values]
    # All work on the same parameters and gradients, each with states of its own.
    calls = {
        who: steps.contestant(who, op, job, kind, parameters(values, grads), lr=LR).call
        for who in (OURS, EAGER, FUSED)
    }
    moved = count * bytes_per_parameter(op, job, kind)

    def gate(who: str) -> None:
        check(who, op, job, kind, options.device)

    return Match(calls, gate, moved, copied(moved, options.device), in_place=True)


def copied(moved: int, device: str) -> Tensor:
    """The source of the copy that a step is compared with: it moves as many bytes, but not more
    than 2^28 each way, several times the largest caches."""
    return torch.ones(min(moved // 2, 2**28) // 4, device=device)
