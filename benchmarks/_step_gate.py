"""The gate of the AMP step: nobody is timed who does not do the job, checked in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks._contestants import (
    EMA_DECAY,
    KINDS,
    MAX_NORM,
    RULES,
    Contestant,
    Kind,
    does,
    gradients,
    ours,
    parameters,
    rival,
    their_class,
)
from benchmarks._measure import Tolerance

SHAPES = ((33, 5, 3, 3), (1,), (17,), (130, 31), ())
STEPS = (1.0, 0.5)  # factors of the gradient
SCALE = 1024.0  # of the loss
# bfloat16 holds weights and states: each of two steps rounds both. A step moves a weight by 0.1.
TOLERANCE = {
    torch.float32: Tolerance(1e-5, 2e-6),
    torch.bfloat16: Tolerance(2**-6, 2**-6),
}


class NotTheJob(AssertionError):
    """The contestant's numbers are wrong: it is not timed."""


def _tensors(kind: Kind) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values, grads = (
        [torch.randn(shape, generator=generator).to(kind.dtype) for shape in SHAPES]
        for _ in range(2)
    )
    return values, grads


def _exact(
    name: str, job: str, kind: Kind
) -> tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]:
    """Parameters, averages and states after the steps, in float64 by the rival's own code."""
    values, grads = _tensors(kind)
    params = parameters([v.double() for v in values], [g.double() for g in grads])
    rule = RULES[name]
    options = dict(rule.options)
    if rule.clips:
        options["max_grad_norm"] = MAX_NORM if does(job, "clip") else None
    optimizer = their_class(rule)(params, lr=rule.gate_lr, **options)
    averages = [p.detach().clone() for p in params]
    for factor in STEPS:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.double() * factor
        if does(job, "clip") and not rule.clips:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(averages, params, strict=True):
                average.lerp_(p, 1 - EMA_DECAY)
    return params, averages, [optimizer.state[p] for p in params]


def _play(contestant: Contestant, job: str, kind: Kind) -> None:
    scale = SCALE if does(job, "check") else 1.0
    _, grads = _tensors(kind)
    own = gradients(contestant.params)
    for factor in STEPS:
        for grad, g in zip(own, grads, strict=True):
            grad.copy_(g * (factor * scale))
        contestant.call()
        if does(job, "zero") and any(bool(grad.any()) for grad in own):
            raise NotTheJob("gradients are not zeroed")


def _close(what: str, actual: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    try:
        torch.testing.assert_close(
            actual.detach().double().cpu(),
            expected.detach(),
            rtol=tolerance.rtol,
            atol=tolerance.atol,
        )
    except AssertionError as error:
        raise NotTheJob(f"wrong {what}: {error}") from None


def _skips(contestant: Contestant) -> None:
    """A step with one infinite gradient changes nothing."""
    before = [p.detach().clone() for p in contestant.params]
    gradients(contestant.params)[-2].view(-1)[-1] = torch.inf
    contestant.call()
    if not all(map(torch.equal, contestant.params, before)):
        raise NotTheJob("a step with an infinite gradient was not skipped")


def check(variant: str, name: str, job: str, kind_name: str, device: str) -> None:
    """Raise NotTheJob unless two steps of the contestant match float64.

    ``variant`` is "fusedtrain" or a rival's name. Parameters, averages and states are compared.
    """
    kind, lr = KINDS[kind_name], RULES[name].gate_lr
    values, grads = ([t.to(device) for t in ts] for ts in _tensors(kind))
    params, scale = parameters(values, grads), SCALE if does(job, "check") else 1.0
    if variant == "fusedtrain":
        contestant = ours(name, job, kind, params, lr=lr, scale=scale)
    else:
        contestant = rival(variant, name, job, kind, params, lr=lr, scale=scale)
    _play(contestant, job, kind)
    exact, averages, states = _exact(name, job, kind)
    tolerance = TOLERANCE[kind.dtype]
    for p, expected in zip(contestant.params, exact, strict=True):
        _close("parameter", p, expected, tolerance)
    if does(job, "ema"):
        for average, expected in zip(contestant.averages(), averages, strict=True):
            _close("average", average, expected, TOLERANCE[kind.dtype])
    for p, state in zip(contestant.stepped, states, strict=True):
        own = contestant.optimizer.state[p]
        for key, expected in state.items():
            if isinstance(expected, Tensor) and expected.ndim and expected.shape == p.shape:
                # States may be small throughout (clipped, or squares): relative to the tensor's.
                rtol = TOLERANCE[kind.weight].rtol
                limit = Tolerance(rtol, rtol * float(expected.abs().max()))
                _close(f"state {key!r}", own[key], expected, limit)
    if variant == "fusedtrain" and does(job, "check"):
        _skips(contestant)
