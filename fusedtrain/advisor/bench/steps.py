"""Contestants of the optimizer's step, and the bytes that it must move.

A contestant is a call that does one job to tensors which exist: what stands between ``backward()``
and the next ``forward()`` in a mixed-precision training loop.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ... import amp, optim
from ..._torch_private import foreach_copy_, foreach_zero_
from ._match import EAGER

FUSED = "torch fused"
OWN = "own"  # ours, in the loop that a user writes around torch's
NEVER = 2**31 - 1  # growth interval: the scale stays, and so does what unscaling does
LR = 1e-6  # what is timed does not depend on it, and thousands of steps leave the weights sane
# Each job does what those before it do, and one thing more.
JOBS = {
    "step": "optimizer.step()",
    "check": "GradScaler: unscale, look for infs and NaNs, step, new scale",
    "clip": "and clip the norm of all gradients",
    "ema": "and average the weights",
    "zero": "and zero the gradients, which stay where they are",
}
MAX_NORM = 1.0
EMA_DECAY = 0.999


def does(job: str, part: str) -> bool:
    """Whether `part` belongs to the job."""
    names = list(JOBS)
    return names.index(part) <= names.index(job)


@dataclass(frozen=True)
class Kind:
    """The dtypes of a row."""

    dtype: torch.dtype  # of parameters and gradients
    master: bool = False  # float32 weights and states beside them
    codes: bool = False  # ours has states of 8 bits and masters of 24 bits in their place

    @property
    def weight(self) -> torch.dtype:
        """Dtype of the tensors that the update works on: parameters or their masters."""
        return torch.float32 if self.master else self.dtype


KINDS = {
    "float32": Kind(torch.float32),
    "bfloat16": Kind(torch.bfloat16),
    "bfloat16+master": Kind(torch.bfloat16, master=True),
    "bfloat16+q8": Kind(torch.bfloat16, master=True, codes=True),
}


@dataclass(frozen=True)
class Rule:
    """An optimizer: ours, whose class it replaces, and what its update needs at least."""

    ours: str  # in fusedtrain.optim
    theirs: str  # module.Class
    options: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]  # rivals: further options of their class
    states: int  # tensors as large as the parameters
    gate_lr: float  # moves a weight by about a tenth in one step
    gradient_norms: bool = False  # known before the first write: gradients are read twice
    parameter_norms: bool = False  # parameters are read twice
    trial: bool = False  # the norm of the update is needed: states are read twice
    clips: bool = False  # by its own option max_grad_norm


_TORCH = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
_TIMM: dict[str, dict[str, Any]] = {"timm": {}}
_TIMM_FOREACH = {"timm": {"foreach": False}, "timm foreach": {"foreach": True}}
_MOMENTUM = {"momentum": 0.9, "weight_decay": 1e-4}
_DECAY = {"weight_decay": 1e-2}
# Rivals of any rule that can also be had beside them; Rule.options must suit.
DEEPSPEED = "deepspeed cpu"
FLOAT32_STATES = "fusedtrain float32 states"  # and float32 masters
# Others with states of 8 bits: package, types of devices. torchao's has no masters.
TORCHAO, FLASHOPTIM = "torchao AdamW8bit", "flashoptim"
CODED = {TORCHAO: ("torchao", ("cpu", "cuda")), FLASHOPTIM: ("flashoptim", ("cuda",))}

RULES = {
    "adamw": Rule("AdamW", "torch.optim.AdamW", _DECAY, _TORCH, 2, 0.1),
    "sgd": Rule("SGD", "torch.optim.SGD", _MOMENTUM, _TORCH, 1, 0.1),
    "lars": Rule(
        "LARS", "timm.optim.Lars", _MOMENTUM, _TIMM, 1, 50.0,
        gradient_norms=True, parameter_norms=True,
    ),
    "lamb": Rule(
        "LAMB", "timm.optim.Lamb", _DECAY, _TIMM, 2, 0.1,
        parameter_norms=True, trial=True, clips=True,
    ),
    "rmsprop_tf": Rule("RMSpropTF", "timm.optim.RMSpropTF", _MOMENTUM, _TIMM, 2, 0.1),
    "novograd": Rule(
        "NovoGrad", "timm.optim.NvNovoGrad", _DECAY, _TIMM, 1, 1.0, gradient_norms=True
    ),
    "sgdw": Rule("SGDW", "timm.optim.SGDW", _MOMENTUM, _TIMM_FOREACH, 1, 0.1),
    "nadamw": Rule("NAdamW", "timm.optim.NAdamW", _DECAY, _TIMM_FOREACH, 2, 0.1),
    "lion": Rule("Lion", "timm.optim.Lion", _DECAY, _TIMM_FOREACH, 1, 0.1),
}  # fmt: skip


def bytes_per_parameter(name: str, job: str, kind: Kind) -> int:
    """Bytes that the job has to read and write for each parameter, whoever does it.

    Tensors as large as the parameters are counted, one read or write each where it cannot be
    avoided without holding the whole gradient on chip:

    - the update reads gradient, weight and states and writes weight and states; with masters, the
      master is the weight, and the parameter is written besides;
    - a check for infs, or a norm of gradients, must be known before the first write and reads all
      gradients once more: one sweep serves both, and the norms of single tensors too;
    - a rule that needs norms of parameters or of its own update (LARS, LAMB) reads these tensors
      once more;
    - an average is read and written in float32; zeroing writes the gradient.

    AdamW in float32: 28 the step, 32 with check and clipping, 40 with the average, 44 zeroing. With
    states of 8 bits a weight is parameter and correction, and a state a code and 1/32 of a scale.
    """
    rule = RULES[name]
    gradient = kind.dtype.itemsize
    weight: float = kind.weight.itemsize
    state: float = weight
    if kind.codes:
        weight, state = kind.dtype.itemsize + 1, 1.125
    total: float = gradient + 2 * (weight + rule.states * state)
    total += kind.dtype.itemsize if kind.master and not kind.codes else 0
    total += gradient if rule.gradient_norms or does(job, "check") else 0
    total += weight if rule.parameter_norms else 0
    total += rule.states * state if rule.trial else 0
    total += 2 * torch.float32.itemsize if does(job, "ema") else 0
    total += gradient if does(job, "zero") else 0
    return round(total)


@dataclass
class Contestant:
    """One who does the job: calling it takes one step on ``params``."""

    call: Callable[[], object]
    optimizer: torch.optim.Optimizer
    params: list[Tensor]  # of the model
    stepped: list[Tensor]  # of the optimizer: the same, or their masters
    scaler: Any  # the GradScaler, which the job "step" does not call
    _averages: list[Tensor] = field(default_factory=list)

    def averages(self) -> list[Tensor]:
        """The averaged weights; the weights where none are averaged."""
        optimizer = self.optimizer
        ours = optimizer if isinstance(optimizer, optim.FusedOptimizer) else None
        if ours is not None and ours.ema_decay is not None:
            return [average for _, average in ours.averaged_parameters()]
        return self._averages or self.params


def gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of the parameters that have one."""
    return [p.grad for p in params if p.grad is not None]


def _scaler(of: Any, device: str, scale: float) -> Any:
    scaler = of(device, init_scale=scale, growth_interval=NEVER)
    scaler.scale(torch.ones((), device=device))  # makes its tensors
    return scaler


def parameters(values: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Parameters in the memory of ``values``, with ``grads`` as their gradients."""
    params: list[Tensor] = [torch.nn.Parameter(value) for value in values]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def _our_optimizer(
    rule: Rule, job: str, kind: Kind, params: list[Tensor], lr: float, more: Mapping[str, Any]
) -> Any:
    options: dict[str, Any] = {"max_grad_norm": MAX_NORM if does(job, "clip") else None}
    if does(job, "ema"):
        options["ema_decay"] = EMA_DECAY
    if does(job, "zero"):
        options["gradient_writeback"] = "zero"
    if kind.codes:
        options |= {"master_weights": "split24", "state_dtype": "q8"}
    elif kind.master:
        options |= {"master_weights": True, "state_dtype": torch.float32}
    return getattr(optim, rule.ours)(params, lr=lr, **{**rule.options, **more}, **options)


def ours(
    name: str, job: str, kind: Kind, params: list[Tensor], *, lr: float, scale: float = 1.0,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Contestant:  # fmt: skip
    """fusedtrain's optimizer and GradScaler; ``options`` are put over the rule's."""
    optimizer = _our_optimizer(RULES[name], job, kind, params, lr, options)
    scaler = _scaler(amp.GradScaler, params[0].device.type, scale)
    call = optimizer.step
    if does(job, "check"):

        def call() -> None:
            scaler.step(optimizer)
            scaler.update()

    return Contestant(call, optimizer, params, params, scaler)


def rivals(name: str, kind: Kind, device: str) -> list[str]:
    """Names of those who can do the rule's step on such parameters."""
    names = [v for v in RULES[name].variants if not (kind.master and v == "single")]
    if name == "adamw" and device == "cpu" and kind is KINDS["float32"]:
        names += [DEEPSPEED] * (importlib.util.find_spec("deepspeed") is not None)
    if kind.codes:
        names.append(FLOAT32_STATES)
        for who, (package, devices) in CODED.items():
            if name == "adamw" and device in devices and importlib.util.find_spec(package):
                names.append(who)
    return names


def contestant(
    who: str, name: str, job: str, kind: Kind, params: list[Tensor], *, lr: float,
    scale: float = 1.0, **more: Any,
) -> Contestant:  # fmt: skip
    """ "fusedtrain", "own" or one of ``rivals``; ``more``: see ``ours``."""
    if who == FLOAT32_STATES:
        kind = KINDS["bfloat16+master"]
    if who in ("fusedtrain", FLOAT32_STATES):
        return ours(name, job, kind, params, lr=lr, scale=scale, **more)
    return rival(who, name, job, kind, params, lr=lr, scale=scale, **more)


def rival(
    variant: str, name: str, job: str, kind: Kind, params: list[Tensor], *, lr: float,
    scale: float = 1.0, options: Mapping[str, Any] = MappingProxyType({}),
) -> Contestant:  # fmt: skip
    """torch's or timm's optimizer, in the loop that a user writes around it.

    With masters it is the usual recipe: 16-bit gradients are copied to float32, weights back.
    The average of 16-bit parameters has their dtype, as a copy of the model has (ours: float32).
    """
    rule = RULES[name]
    stepped, grads = params, gradients(params)
    by_hand = kind.master and variant not in (OWN, *CODED)
    if by_hand:
        low = [p for p in params if p.dtype != torch.float32]
        masters = [p.detach().float() for p in low]
        master_of = dict(zip(map(id, low), masters, strict=True))
        stepped = [master_of.get(id(p), p) for p in params]
        for master in masters:
            master.grad = torch.empty_like(master)
        narrow, wide = gradients(low), gradients(masters)
    if variant == OWN:
        optimizer = _our_optimizer(rule, "check", kind, params, lr, options)
    else:
        optimizer = _their_optimizer(variant, rule, job, stepped, {**options, "lr": lr})
    of = amp.GradScaler if variant == OWN else torch.amp.GradScaler
    scaler = _scaler(of, params[0].device.type, scale)
    clip = partial(torch.nn.utils.clip_grad_norm_, stepped, MAX_NORM, foreach=variant != "single")
    clips = does(job, "clip") and not rule.clips
    averages = [p.detach().clone() for p in stepped] if does(job, "ema") else []
    average = get_ema_multi_avg_fn(EMA_DECAY)
    checks, averages_too, zeroes = does(job, "check"), does(job, "ema"), does(job, "zero")

    @torch.no_grad()
    def call() -> None:
        if by_hand:
            foreach_copy_(wide, narrow)
        if clips:
            scaler.unscale_(optimizer)
            clip()
        if checks:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if by_hand:
            foreach_copy_(low, masters)
        if averages_too:
            average(averages, stepped, None)
        if zeroes and by_hand:
            foreach_zero_(grads)
        elif zeroes:
            optimizer.zero_grad(set_to_none=False)

    return Contestant(call, optimizer, params, stepped, scaler, averages)


def _their_optimizer(
    variant: str, rule: Rule, job: str, params: Sequence[Tensor], more: Mapping[str, Any]
) -> torch.optim.Optimizer:
    options = {**rule.options, **more}
    if variant == DEEPSPEED:
        of_deepspeed = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        return of_deepspeed(params, adamw_mode=True, **options)
    if variant == TORCHAO:
        return importlib.import_module("torchao.optim").AdamW8bit(params, **options)
    if variant == FLASHOPTIM:  # masters of 24 bits are its default
        return importlib.import_module("flashoptim").FlashAdamW(params, **options)
    variants = {EAGER: {}, FUSED: {"fused": True}, **rule.variants}
    return their_class(rule)(params, **their_options(rule, job) | options | dict(variants[variant]))


def their_options(rule: Rule, job: str) -> dict[str, Any]:
    """Options of all variants."""
    clips = {"max_grad_norm": MAX_NORM if does(job, "clip") else None} if rule.clips else {}
    return {**rule.options, **clips}


def their_class(rule: Rule) -> Any:
    """The class that the rule's rivals are of. Raises ImportError where it is not installed."""
    module, _, name = rule.theirs.rpartition(".")
    return getattr(importlib.import_module(module), name)
