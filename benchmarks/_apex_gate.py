"""The gate of Apex's calls: nobody is timed who does not take the step, checked in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks._apex_contestants import MAX_NORM, Contestant, Data, Rule, norm_places
from benchmarks._guards import NotTheJob

# The second and third are a batch norm's, the last two biases.
SHAPES = ((33, 5, 3, 3), (33,), (33,), (130, 31), (1, 1), (17,), ())
STEPS = (1.0, 0.5)  # factors of the gradient
SCALE = 1024.0
DECAY = 0.01
# Of the largest change of a tensor. Who unscales and clips in float16 rounds gradients twice.
TOLERANCE, TOLERANCE_HALF = 1e-4, 2e-3


def tensors(device: str) -> Data:
    """Weights and gradients that float16 holds exactly."""
    generator = torch.Generator().manual_seed(0)
    values, grads = (
        [torch.randn(shape, generator=generator).half().float().to(device) for shape in SHAPES]
        for _ in range(2)
    )
    return Data(values, grads, norm_places(SHAPES), SCALE)


def _exact(rule: Rule, job: str, data: Data) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Weights and their states after the steps, by torch's own code in float64."""
    params = [nn.Parameter(value.cpu().double()) for value in data.values]
    options = {**rule.options, "weight_decay": DECAY}
    optimizer = rule.theirs(params, lr=rule.gate_lr, **options)
    for factor in STEPS:
        for p, g in zip(params, data.grads, strict=True):
            p.grad = g.cpu().double() * factor
        if job == "clip":
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()
    return [(p.detach(), _large(optimizer, p)) for p in params]


def _large(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """States as large as the parameter, but for weights."""
    found = optimizer.state[p].items()
    return {k: v for k, v in found if k not in ("step", "master_param") and v is not None}


def _stepped(contestant: Contestant) -> list[Tensor]:
    return [p for group in contestant.optimizer.param_groups for p in group["params"]]


def _same(what: str, actual: Tensor, expected: Tensor, limit: float) -> None:
    off = float((actual.detach().cpu().double() - expected).abs().max())
    if not off <= limit:
        raise NotTheJob(f"wrong {what}: off by {off:.2g}, allowed are {limit:.2g}")


def _play(contestant: Contestant, factor: float = 1.0, inf_in: int | None = None) -> None:
    contestant.ready()
    for g in contestant.grads:
        g.mul_(factor)
    if inf_in is not None:
        contestant.grads[inf_in].view(-1)[-1] = torch.inf
    contestant.call()


def _all(contestant: Contestant) -> list[Tensor]:
    """Everything that a skipped step leaves alone."""
    states = [_large(contestant.optimizer, p).values() for p in _stepped(contestant)]
    return [*contestant.params, *contestant.weights(), *(t for some in states for t in some)]


def check(contestant: Contestant, rule: Rule, job: str, data: Data) -> None:
    """Raise NotTheJob unless two steps match float64, and steps with infs are skipped.

    The contestant was made with ``gate_lr`` and ``DECAY``. The float16 parameters of the model
    must be the float32 weights, rounded; a skipped step must halve the scale.
    """
    for factor in STEPS:
        _play(contestant, factor)
    in_half = job == "clip" and any(p.dtype == torch.float16 for p in _stepped(contestant))
    tolerance = TOLERANCE_HALF if in_half else TOLERANCE
    exact = _exact(rule, job, data)
    both = zip(contestant.params, contestant.weights(), _stepped(contestant), exact, strict=True)
    for (p, weight, stepped, (expected, states)), start in zip(both, data.values, strict=True):
        moved = float((expected - start.cpu()).abs().max())
        _same("weight", weight, expected, tolerance * moved)
        if weight.dtype != torch.float32 or not torch.equal(p, weight.to(p.dtype)):
            raise NotTheJob("the model's parameters are not the float32 weights, rounded")
        own = _large(contestant.optimizer, stepped)
        for name, state in states.items():
            _same(f"state {name!r}", own[name], state, tolerance * float(state.abs().max()))
    for place in (0, 1):
        before, scale = [t.detach().clone() for t in _all(contestant)], contestant.scale()
        _play(contestant, inf_in=place)
        if not all(map(torch.equal, _all(contestant), before)):
            raise NotTheJob("a step with an infinite gradient was not skipped")
        if contestant.scale() != scale / 2:
            raise NotTheJob("an overflow did not halve the scale")
