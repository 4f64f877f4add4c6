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

import fusedtrain
from benchmarks.harness.shapes import Shape
from fusedtrain.advisor.bench.amp_step import GATE_SCALE, GATE_STEPS, exact_steps, small_tensors
from fusedtrain.advisor.bench.gate import NotTheJob, Tolerance, agrees
from fusedtrain.advisor.bench.steps import MAX_NORM, NEVER
from fusedtrain.apex import amp
from fusedtrain.apex.amp._functions import switch_autocast
from fusedtrain.apex.optimizers import FusedAdam, FusedSGD

SCALE = 2.0**16  # where amp starts
JOBS = {"step": "scale_loss and step", "clip": "and clip_grad_norm_ of the master parameters"}
# fusedtrain's own step, without Apex's calls; with the clipping inside it.
OWN, INSIDE = "own", "max_grad_norm"
# "masters": float16 parameters behind float32 copies, by hand.
RIVALS = ("fused", "foreach", "masters")


@dataclass(frozen=True)
class Rule:
    """An optimizer in its three forms, which take the same options."""

    apex: Any
    ours: Any
    theirs: Any
    options: Mapping[str, Any]
    states: int  # tensors as large as the parameters
    gate_lr: float  # moves a weight by about a tenth in one step


RULES = {
    "FusedSGD": Rule(
        FusedSGD, fusedtrain.optim.SGD, torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 1e-4}, 1, 0.1,
    ),
    "FusedAdam": Rule(
        FusedAdam, fusedtrain.optim.AdamW, torch.optim.AdamW,
        {"weight_decay": 1e-2}, 2, 0.1,
    ),
}  # fmt: skip


def norm_places(shapes: Sequence[Shape]) -> list[bool]:
    """Marks the parameters of batch norms: two vectors of one length, one after the other."""
    norms = [False] * len(shapes)
    for i, shape in enumerate(shapes[:-1]):
        if len(shape) == 1 and shape == shapes[i + 1] and not norms[i]:
            norms[i] = norms[i + 1] = True
    return norms


def bytes_moved(level: str, rule: Rule, shapes: Sequence[Shape]) -> int:
    """Bytes that the step must read and write at least, with clipping too.

    Gradients are read twice (a non-finite one, or the norm, must be known before the first write);
    float32 weights and states are read and written; float16 parameters are written besides.
    """
    total = 0
    for shape, norm in zip(shapes, norm_places(shapes), strict=True):
        half = level == "O2" and not norm
        total += prod(shape) * (2 * (2 if half else 4) + 8 + 8 * rule.states + 2 * half)
    return total


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
    who: str, level: str, rule: Rule, job: str, data: Data, *, lr: float, **options: Any
) -> Contestant:
    """One of `contestants`; ``options`` are put over the rule's."""
    options = {**rule.options, **options, "lr": lr}
    if who == "fusedtrain":
        return _through_amp(level, rule, job, data, options)
    if who in (OWN, INSIDE):
        return _fused(level, rule, job, data, options, inside=who == INSIDE)
    return _torchs(who, rule, job, data, options)


def _through_amp(
    level: str, rule: Rule, job: str, data: Data, options: dict[str, Any]
) -> Contestant:
    """fusedtrain by Apex's calls, with all defaults but a scale that does not grow."""
    model: Any = network(data.values, data.norms)
    optimizer = rule.apex(model.parameters(), **options)
    with contextlib.redirect_stdout(io.StringIO()):  # it tells its options
        model, optimizer = amp.initialize(
            model, optimizer, opt_level=level, max_loss_scale=data.scale
        )
    params = list(model.parameters())
    grads, kept = data.start(level)
    loss = torch.ones((), device=data.device)

    def call() -> None:
        with amp.scale_loss(loss, optimizer):
            _put(params, grads)
        if job == "clip":
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
        optimizer.step()

    return Contestant(
        call, _ready(level, optimizer, params, grads, kept), optimizer, params, grads,
        lambda: list(amp.master_params(optimizer)),
        lambda: float(amp.state_dict()["loss_scaler0"]["loss_scale"]),
    )  # fmt: skip


def _fused(
    level: str, rule: Rule, job: str, data: Data, options: dict[str, Any], *, inside: bool
) -> Contestant:
    """fusedtrain's optimizer and GradScaler."""
    params: list[Tensor] = [nn.Parameter(value) for value in data.low(level, data.values)]
    grads, kept = data.start(level)
    if level == "O2":
        options = {**options, "master_weights": True, "state_dtype": torch.float32}
    if inside:
        options = {**options, "max_grad_norm": MAX_NORM}
    optimizer = rule.ours(params, **options)
    call, scale = _scaled(
        fusedtrain.amp.GradScaler, optimizer, params, grads, data, clip=job == "clip" and not inside
    )
    return Contestant(
        call, _ready("", optimizer, params, grads, kept), optimizer, params, grads,
        lambda: [optimizer.state[p].get("master_param", p) for p in params], scale,
    )  # fmt: skip


def _torchs(who: str, rule: Rule, job: str, data: Data, options: dict[str, Any]) -> Contestant:
    """torch's optimizer and GradScaler in float32; as "masters" behind a float16 model, by hand."""
    level = "O2" if who == "masters" else "O1"
    params: list[Tensor] = [nn.Parameter(value) for value in data.low(level, data.values)]
    grads, kept = data.start(level)
    pairs = [(nn.Parameter(v.clone()), p) for v, p in zip(data.values, params, strict=True)
             if p.dtype == torch.float16]  # fmt: skip
    low = [p for _, p in pairs]
    masters: list[Tensor] = [master for master, _ in pairs]
    master_of = {id(p): master for master, p in pairs}
    stepped = [master_of.get(id(p), p) for p in params]
    variant = {"fused": True} if who == "fused" else {"foreach": True}
    optimizer = rule.theirs(stepped, **options, **variant)
    wide = [torch.empty_like(master) for master in masters]
    narrow = [g for g in grads if g.dtype == torch.float16]

    def before() -> None:
        if masters:
            torch._foreach_copy_(wide, narrow)
            _put(masters, wide)

    @torch.no_grad()
    def after() -> None:
        if masters:
            torch._foreach_copy_(low, masters)

    call, scale = _scaled(
        torch.amp.GradScaler, optimizer, params, grads, data, before, after, clip=job == "clip"
    )
    ready = _ready("", optimizer, params, grads, kept)
    return Contestant(call, ready, optimizer, params, grads, lambda: stepped, scale)


def _nothing() -> None:
    pass


def _scaled(
    of: Any,
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    grads: list[Tensor],
    data: Data,
    before: Callable[[], None] = _nothing,
    after: Callable[[], None] = _nothing,
    *,
    clip: bool,
) -> tuple[Callable[[], None], Callable[[], float]]:
    """The step under a GradScaler, and its scale."""
    scaler = of(data.device.type, init_scale=data.scale, growth_interval=NEVER)
    loss = torch.ones((), device=data.device)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]

    def call() -> None:
        scaler.scale(loss)
        _put(params, grads)
        before()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(stepped, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        after()

    return call, scaler.get_scale


def _put(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """As backward leaves them: it knows nothing of Python's ``.grad``."""
    for p, g in zip(params, grads, strict=True):
        p.grad = g


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


def check(entrant: Contestant, rule: Rule, job: str, data: Data) -> None:
    """Raise NotTheJob unless two steps match float64, and steps with infs are skipped.

    The contestant was made with ``gate_lr`` and ``DECAY``. The float16 parameters of the model
    must be the float32 weights, rounded; a skipped step must halve the scale.
    """
    for factor in GATE_STEPS:
        _play(entrant, factor)
    in_half = job == "clip" and any(p.dtype == torch.float16 for p in _stepped(entrant))
    tolerance = TOLERANCE_HALF if in_half else TOLERANCE
    options = {**rule.options, "weight_decay": DECAY, "lr": rule.gate_lr}
    exact, weights, _ = exact_steps(
        rule.theirs, options, data.values, data.grads, clip=job == "clip"
    )
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
