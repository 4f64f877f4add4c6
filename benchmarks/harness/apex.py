"""Contestants of the benchmark of Apex's calls, their data, and the gate.

A contestant's call is what a training script does between the loss and the next forward, but for
``zero_grad`` and the backward pass itself, in whose place gradients that exist are handed to the
parameters.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.shapes import Shape
from fusedtrain.advisor.bench import steps
from fusedtrain.advisor.bench.amp_step import GATE_SCALE, GATE_STEPS, exact_steps, small_tensors
from fusedtrain.advisor.bench.gate import NotTheJob, Tolerance, agrees
from fusedtrain.advisor.bench.steps import KINDS, MAX_NORM, OWN, Kind, bytes_per_parameter
from fusedtrain.apex import amp
from fusedtrain.apex.amp._functions import switch_autocast
from fusedtrain.apex.optimizers import FusedAdam, FusedSGD

SCALE = 2.0**16  # where amp starts
JOBS = {"step": "scale_loss and step", "clip": "and clip_grad_norm_ of the master parameters"}
INSIDE = "max_grad_norm"  # `OWN` with the clipping inside it
# "masters": float16 parameters behind float32 copies, by hand.
RIVALS = ("fused", "foreach", "masters")
HALF = Kind(torch.float16, master=True)
# Apex's classes, and the names of their rules in `steps.RULES`.
RULES: Mapping[str, tuple[Any, str]] = {
    "FusedSGD": (FusedSGD, "sgd"),
    "FusedAdam": (FusedAdam, "adamw"),
}


def rule_of(name: str) -> steps.Rule:
    """The rule of one of Apex's classes."""
    return steps.RULES[RULES[name][1]]


def norm_places(shapes: Sequence[Shape]) -> list[bool]:
    """Marks the parameters of batch norms: two vectors of one length, one after the other."""
    norms = [False] * len(shapes)
    for i, shape in enumerate(shapes[:-1]):
        if len(shape) == 1 and shape == shapes[i + 1] and not norms[i]:
            norms[i] = norms[i + 1] = True
    return norms


def bytes_moved(level: str, rule: str, shapes: Sequence[Shape]) -> int:
    """Bytes that the step must read and write at least, with clipping too: see
    ``bytes_per_parameter``. Batch norms are float32 in both levels."""
    kinds = (
        HALF if level == "O2" and not norm else KINDS["float32"] for norm in norm_places(shapes)
    )
    pairs = zip(shapes, kinds, strict=True)
    return sum(prod(s) * bytes_per_parameter(RULES[rule][1], "clip", kind) for s, kind in pairs)


class _Weight(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value.clone())


def network(values: Sequence[Tensor], norms: Sequence[bool]) -> nn.Module:
    """A module with these parameters, in this order; ``norms`` are those of batch norms."""
    model = nn.ModuleList()
    rest = list(zip(values, norms, strict=True))
    while rest:
        value, norm = rest.pop(0)
        layer: nn.Module = _Weight(value)
        if norm:
            layer = nn.BatchNorm2d(value.numel(), device=value.device)
            with torch.no_grad():
                layer.weight.copy_(value)
                layer.bias.copy_(rest.pop(0)[0])
        model.append(layer)
    return model


@dataclass
class Data:
    """Weights that all contestants start from, and the gradients that they are given.

    Args:
        values: float32.
        grads: of the unscaled loss.
        norms: which parameters stay float32 under O2.
        scale: of the loss.
    """

    values: list[Tensor]
    grads: list[Tensor]
    norms: list[bool]
    scale: float
    _gradients: dict[str, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)

    def low(self, level: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """In the dtypes of a model under O1 or O2."""
        pairs = zip(tensors, self.norms, strict=True)
        return [t.half() if level == "O2" and not norm else t.clone() for t, norm in pairs]

    def start(self, level: str) -> tuple[list[Tensor], list[Tensor]]:
        """Scaled gradients as a backward pass leaves them, and copies to restore them from."""
        if level not in self._gradients:
            kept = self.low(level, [g * self.scale for g in self.grads])
            self._gradients[level] = ([g.clone() for g in kept], kept)
        return self._gradients[level]

    @property
    def device(self) -> torch.device:
        return self.values[0].device


@dataclass
class Contestant:
    """One who takes the step."""

    call: Callable[[], object]
    ready: Callable[[], object]  # before each call: not timed
    optimizer: torch.optim.Optimizer
    params: list[Tensor]  # of the model
    grads: list[Tensor]  # that they are given
    weights: Callable[[], list[Tensor]]  # in float32
    scale: Callable[[], float]


def contestants(level: str, job: str) -> list[str]:
    """All who can do the job."""
    masters = RIVALS[2:] if level == "O2" else ()
    return ["fusedtrain", OWN, *[INSIDE] * (job == "clip"), *RIVALS[:2], *masters]


def contestant(
    who: str, level: str, rule: str, job: str, data: Data, *, lr: float, **options: Any
) -> Contestant:
    """One of `contestants`; ``options`` are put over the rule's."""
    options = {**rule_of(rule).options, **options}
    if who == "fusedtrain":
        return _through_amp(level, rule, job, data, {**options, "lr": lr})
    level = level if who in (OWN, INSIDE, "masters") else "O1"  # the others step float32
    grads, kept = data.start(level)
    params = steps.parameters(data.low(level, data.values), grads)
    variant = {INSIDE: "fusedtrain", "masters": "foreach"}.get(who, who)
    job = "check" if job == "step" else "clip"
    kind = HALF if level == "O2" else KINDS["float32"]
    one = steps.contestant(
        variant, RULES[rule][1], job, kind, params, lr=lr, scale=data.scale, options=options
    )
    handed = [(p, p.grad) for p in (*params, *one.stepped)]
    loss = torch.ones((), device=data.device)

    def call() -> None:
        one.scaler.scale(loss)
        for p, grad in handed:  # as backward leaves them: it knows nothing of Python's `.grad`
            p.grad = grad
        one.call()

    def weights() -> list[Tensor]:
        return [one.optimizer.state[p].get("master_param", p) for p in one.stepped]

    ready = _ready("", one.optimizer, params, grads, kept)
    return Contestant(call, ready, one.optimizer, params, grads, weights, one.scaler.get_scale)


def _through_amp(
    level: str, rule: str, job: str, data: Data, options: dict[str, Any]
) -> Contestant:
    """fusedtrain by Apex's calls, with all defaults but a scale that does not grow."""
    model: Any = network(data.values, data.norms)
    optimizer = RULES[rule][0](model.parameters(), **options)
    with contextlib.redirect_stdout(io.StringIO()):  # it tells its options
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, max_loss_scale=data.scale
        )
    params = list(model.parameters())
    grads, kept = data.start(level)
    loss = torch.ones((), device=data.device)

    def call() -> None:
        with amp.scale_loss(loss, optimizer):
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
        if job == "clip":
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
        optimizer.step()

    return Contestant(
        call, _ready(level, optimizer, params, grads, kept), optimizer, params, grads,
        lambda: list(amp.master_params(optimizer)),
        lambda: float(amp.state_dict()["loss_scaler0"]["loss_scale"]),
    )  # fmt: skip


def _ready(
    level: str,
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    grads: list[Tensor],
    kept: list[Tensor],
) -> Callable[[], None]:
    """Gradients None, and their values restored, which unscaling and clipping write over.

    Autocast, which O1 switches on for the process, is on for the contestant under O1 alone.
    """
    device = params[0].device.type
    casts = frozenset({device} if level == "O1" else ())

    def ready() -> None:
        switch_autocast(casts)
        optimizer.zero_grad(set_to_none=True)
        for p in params:
            p.grad = None
        torch._foreach_copy_(grads, kept)
        if device == "cuda":  # the host's work is not to hide behind these copies
            torch.cuda.synchronize()

    return ready


# --- the gate ---

# The second and third are a batch norm's, the last two biases.
GATE_SHAPES = ((33, 5, 3, 3), (33,), (33,), (130, 31), (1, 1), (17,), ())
DECAY = 0.01
# Relative to a tensor's largest change. Unscaling and clipping in float16 round gradients twice.
TOLERANCE, TOLERANCE_HALF = 1e-4, 2e-3


def gate_data(device: str) -> Data:
    """Weights and gradients that float16 holds exactly."""
    values, grads = (
        [t.float().to(device) for t in ts] for ts in small_tensors(GATE_SHAPES, torch.float16)
    )
    return Data(values, grads, norm_places(GATE_SHAPES), GATE_SCALE)


def _large(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    """States as large as the parameter, but for weights."""
    states = optimizer.state[p].items()
    return {k: v for k, v in states if k not in ("step", "master_param") and v is not None}


def _stepped(entrant: Contestant) -> list[Tensor]:
    return [p for group in entrant.optimizer.param_groups for p in group["params"]]


def _play(entrant: Contestant, factor: float = 1.0, inf_in: int | None = None) -> None:
    entrant.ready()
    for g in entrant.grads:
        g.mul_(factor)
    if inf_in is not None:
        entrant.grads[inf_in].view(-1)[-1] = torch.inf
    entrant.call()


def _all(entrant: Contestant) -> list[Tensor]:
    """Everything that a skipped step leaves alone."""
    states = [_large(entrant.optimizer, p).values() for p in _stepped(entrant)]
    return [*entrant.params, *entrant.weights(), *(t for some in states for t in some)]


def check(entrant: Contestant, rule: str, job: str, data: Data) -> None:
    """Raise NotTheJob unless two steps match float64, and steps with infs are skipped.

    The contestant was made with ``gate_lr`` and ``DECAY``. The float16 parameters of the model
    must be the float32 weights, rounded; a skipped step must halve the scale.
    """
    for factor in GATE_STEPS:
        _play(entrant, factor)
    in_half = job == "clip" and any(p.dtype == torch.float16 for p in _stepped(entrant))
    tolerance = TOLERANCE_HALF if in_half else TOLERANCE
    options = {**rule_of(rule).options, "weight_decay": DECAY, "lr": rule_of(rule).gate_lr}
    theirs = steps.their_class(rule_of(rule))
    exact, weights, _ = exact_steps(theirs, options, data.values, data.grads, clip=job == "clip")
    both = zip(entrant.params, entrant.weights(), _stepped(entrant), weights, strict=True)
    for (p, weight, stepped, wanted), start in zip(both, data.values, strict=True):
        moved = float((wanted.detach() - start.cpu()).abs().max())
        agrees("weight", weight, wanted, Tolerance(atol=tolerance * moved))
        if weight.dtype != torch.float32 or not torch.equal(p, weight.to(p.dtype)):
            raise NotTheJob("the model's parameters are not the float32 weights, rounded")
        states = _large(entrant.optimizer, stepped)
        for name, state in _large(exact, wanted).items():
            limit = Tolerance(atol=tolerance * float(state.abs().max()))
            agrees(f"state {name!r}", states[name], state, limit)
    for place in (0, 1):
        before, scale = [t.detach().clone() for t in _all(entrant)], entrant.scale()
        _play(entrant, inf_in=place)
        if not all(map(torch.equal, _all(entrant), before)):
            raise NotTheJob("a step with an infinite gradient was not skipped")
        if entrant.scale() != scale / 2:
            raise NotTheJob("an overflow did not halve the scale")
