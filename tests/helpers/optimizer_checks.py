"""Runs of an optimizer, each step beside the truth: a step in float64 by torch.optim, timm.optim or
Apex's formulas, from our own state."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedtrain.amp import GradScaler
from fusedtrain.optim import FusedOptimizer
from helpers.apex_truth import TRUTHS
from helpers.models import timm
from helpers.optimizer_runs import (
    ARRANGEMENTS,
    LAMBS,
    Iteration,
    Run,
    build,
    happen,
    simple,
    values,
)
from helpers.optimizers import CLASSES, NEWER, counterpart

NOVOGRADS = ("NovoGrad", "FusedNovoGrad")
SQUARES = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"}
# Error of a step computed in float32, in eps of float32 relative to max(|value|, |change|).
# 16-bit tensors get one rounding of their own on top.
ULPS = 5.0
FLOAT64 = 1e-13
_EPS = torch.finfo(torch.float32).eps


class Step(NamedTuple):
    """A parameter and its states after a step, in float64; Lion's sign may be open."""

    param: Tensor
    states: dict[str, Tensor]
    open: Tensor  # where rounding decides over the sign of an update


def true_step(
    optimizer: FusedOptimizer, group: dict[str, Any], p: Tensor, grad: Tensor, steps: int
) -> Step:
    """The parameter and its states after the next step.

    Args:
        grad: its gradient in float64, unscaled and clipped.
        steps: number of steps it had.
    """
    kind, state = type(optimizer).__name__, optimizer.state.get(p, {})
    master = state.get("master_param")
    start = p if master is None else master
    wide = start.detach().double().clone(memory_format=torch.contiguous_format).requires_grad_()
    options = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
    if kind == "NovoGrad":
        options = {k: v for k, v in options.items() if k not in NEWER}
    options["lr"] = float(options["lr"])
    if "foreach" in options:
        options["foreach"] = False
    if "max_grad_norm" in options:
        options["max_grad_norm"] = None
    if kind in TRUTHS:
        names = TRUTHS[kind].attributes
        options.update({name: getattr(optimizer, name) for name in names})
    if kind == "AdamW":
        del options["decoupled_weight_decay"]
    initial = options.pop("initial_accumulator_value", None)
    reference = counterpart(kind)([wide], **options)
    reference.defaults["lr"] = float(optimizer.defaults["lr"])
    states = {
        name: value.detach().double().clone(memory_format=torch.contiguous_format)
        for name, value in state.items()
        if name not in ("ema", "master_param") and value is not None
    }
    if kind in ("SGD", "SGDW", "LARS", "FusedSGD") and not steps:
        states = {}  # torch makes the buffer at the first step
    if kind == "NovoGrad" and not states:  # timm's are float32
        states = {"exp_avg": torch.zeros_like(wide)}
        for name in ("exp_avg_sq", "max_exp_avg_sq"):
            states[name] = torch.zeros((), dtype=torch.float64)
    if initial is not None and not states:  # Adagrad has its states from the beginning
        states = {"sum": torch.full_like(wide, initial)}
    if states:
        states["step"] = torch.tensor(float(steps))
    reference.param_groups[0]["step"] = torch.tensor(float(steps))  # Lamb's
    reference.state[wide].update(states)
    undecided = torch.zeros_like(wide, dtype=torch.bool)
    if kind == "Lion":
        beta = options["betas"][0]
        momentum = beta * states.get("exp_avg", torch.zeros_like(wide)).abs()
        ahead = beta * states.get("exp_avg", torch.zeros_like(wide))
        ahead = ahead - (1 - beta) * grad if options["maximize"] else ahead + (1 - beta) * grad
        undecided = (ahead != 0) & (ahead.abs() < 4 * _EPS * momentum)
    wide.grad = grad.clone(memory_format=torch.contiguous_format)  # timm writes into it
    reference.step()
    new = {k: torch.as_tensor(v) for k, v in reference.state[wide].items() if v is not None}
    new.pop("step", None)
    return Step(wide.detach(), new, undecided)


def excess(
    actual: Tensor,
    expected: Tensor,
    before: Tensor,
    rough: float = 0.0,
    dtype: Any = None,
    parts: Tensor | float = 0.0,
) -> float:
    """Largest error in units of what is allowed; inf for a nan.

    Args:
        expected, before: what the tensor should be, and what it was, in float64.
        rough: further error, relative to the largest change.
        dtype: that the error is judged by, where it is not the tensor's.
        parts: size of what may have cancelled in the change.
    """
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return 0.0
    info = torch.finfo(dtype or actual.dtype)
    change = (expected - before).abs()
    scale = torch.maximum(expected.abs(), change) + parts
    allowed = scale * (FLOAT64 if info.bits == 64 else ULPS * _EPS)
    allowed = allowed + rough * change.amax() + torch.finfo(torch.float32).smallest_normal
    if info.bits == 16:
        allowed = allowed + info.eps / 2 * expected.abs() + info.smallest_normal * info.eps / 2
    difference = (actual.detach().double() - expected).abs()
    # Numbers that overflow float16 do so in both.
    difference[actual.double() == expected.to(actual.dtype).double()] = 0
    worst = (difference / allowed).max().item()
    return worst if worst == worst else float("inf")


class Checked:
    """A run, step by step beside the truth."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.generator = torch.Generator().manual_seed(run.seed)
        self.params: list[Tensor] = []
        for one in run.ones:
            start = values(self.generator, one.shape, 1.0).to(one.dtypes[0])
            p = torch.nn.Parameter(ARRANGEMENTS[one.arrangement](start))
            p.grad_dtype = one.dtypes[1]
            self.params.append(p)
        self.optimizer = build(run, self.params)
        self.group = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}
        self.steps = dict.fromkeys(map(id, self.params), 0)
        self.scaler = GradScaler("cpu", **run.scaler) if run.scaler else None
        self.applied = self.skipped = 0

    def all(self) -> None:
        for iteration in self.run.iterations:
            happen(iteration.event, self.optimizer, self.params)
            if iteration.event == "reload":
                self.group = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}
            self.give_gradients(iteration)
            if any(p.grad is not None for p in self.params):
                self.step(iteration)

    def give_gradients(self, iteration: Iteration) -> None:
        scale = self.scaler.get_scale() if self.scaler else 1.0
        for number, (one, p) in enumerate(zip(self.run.ones, self.params)):
            p.grad = None
            if number in iteration.missing:
                continue
            grad = values(self.generator, one.shape, one.size * scale)
            if self.run.zeros and grad.dim():
                grad[::3] = 0
            if number in iteration.bad and grad.numel():
                grad.view(-1)[grad.numel() // 2] = iteration.bad[number]
            p.grad = ARRANGEMENTS[one.grad_arrangement](grad.to(one.dtypes[1]))

    def true_gradients(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Unscaled, and clipped as well, by the id of the parameter."""
        inverse = 1.0
        if self.scaler and not self.unscaled:
            assert self.scaler._scale is not None
            inverse = self.scaler._scale.double().reciprocal().float().item()
        grads = {
            id(p): p.grad.double().contiguous() * inverse for p in self.params if p.grad is not None
        }
        clipped = {}
        options = self.run.fused
        norm = torch.stack([g.norm() for g in grads.values()]).norm()
        self.norm = norm
        most = options.get("max_grad_norm", 1.0 if self.run.name in LAMBS else None)
        for p in self.params:
            if id(p) not in grads:
                continue
            master = self.optimizer.state.get(p, {}).get("master_param")
            start = (p if master is None else master).detach().double()
            like = torch.nn.Parameter(start.contiguous())
            like.grad = grads[id(p)].clone()
            if options.get("agc"):
                agc = importlib.import_module(timm().__name__ + ".utils.agc").adaptive_clip_grad
                agc(like, options["agc"], eps=options["agc_eps"])
            elif most is not None:
                eps = 0.0 if self.run.name in LAMBS else 1e-6
                like.grad *= (most / (norm + eps)).clamp(max=1)
            clipped[id(p)] = like.grad
        return grads, clipped

    def step(self, iteration: Iteration) -> None:
        optimizer, scaler = self.optimizer, self.scaler
        self.unscaled = bool(scaler) and iteration.unscale_first
        if scaler:
            scaler.scale(torch.zeros(()))  # makes the scale
        if self.unscaled:
            assert scaler is not None
            scaler.unscale_(optimizer)
        grads, clipped = self.true_gradients()
        skip = bool(scaler) and not all(g.isfinite().all() for g in grads.values())
        before = {id(p): snapshot(optimizer, p) for p in self.params}
        original = {id(p): p.grad.clone() for p in self.params if p.grad is not None}
        truths = {
            id(p): true_step(
                optimizer, self.group[id(p)], p, clipped[id(p)], self.steps[id(p)]
            )
            for p in self.params
            if p.grad is not None and not skip
        }  # fmt: skip
        if scaler is None:
            optimizer.step()
        else:
            expected_scale = self.next_scale(skip)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == expected_scale
        self.applied += not skip
        self.skipped += skip
        assert bool(optimizer.last_step_skipped) == skip
        assert int(optimizer.applied_steps) == self.applied
        assert int(optimizer.skipped_steps) == self.skipped
        if optimizer.grad_norm is not None and not skip and self.norm != 0:
            assert abs(optimizer.grad_norm.item() / self.norm.item() - 1) < 1e-6
        if scaler and not self.unscaled and optimizer.grad_norm is not None:
            for p, number in optimizer.nonfinite_gradients():
                assert number == (~grads[id(p)].float().isfinite()).sum()
        for p in self.params:
            self.steps[id(p)] += p.grad is not None and not skip
            if p.grad is not None:
                expected = grads[id(p)] if skip else clipped[id(p)]
                self.compare_gradient(p, original[id(p)], expected)
            if id(p) in truths:
                self.compare(p, truths[id(p)], before[id(p)])
            else:
                self.unchanged(p, before[id(p)], not skip)

    def next_scale(self, skip: bool) -> float:
        """Follows the rules of torch's GradScaler, with hysteresis and a bound."""
        attributes, options = self.__dict__, self.run.scaler
        assert self.scaler is not None
        assert options is not None
        scale = self.scaler.get_scale()
        left = attributes.setdefault("left", options["hysteresis"])
        good = attributes.setdefault("good", 0)
        if skip:
            attributes["good"], attributes["left"] = 0, max(left - 1, 0)
            scale *= options["backoff_factor"] if attributes["left"] == 0 else 1
        else:
            attributes["good"], attributes["left"] = good + 1, options["hysteresis"]
            if attributes["good"] == options["growth_interval"]:
                scale *= options["growth_factor"]
                attributes["good"] = 0
        scale = torch.tensor(scale, dtype=torch.float32).item()
        return min(scale, options["max_scale"] or float("inf"))

    @property
    def rough(self) -> float:
        """Error of float64 parameters from numbers that are measured or kept in float32."""
        clips = "max_grad_norm" in self.run.fused or self.run.name in (*LAMBS, *NOVOGRADS)
        return 4 * torch.finfo(torch.float32).eps if clips else 0.0

    def near(self, *arguments: Any, what: str, **more: Any) -> None:
        worst = excess(*arguments, **more)
        assert worst <= 1, f"{what}: error {worst:.3g} times what is allowed"

    def compare(self, p: Tensor, truth: Step, before: dict[str, Tensor]) -> None:
        state = self.optimizer.state[p]
        single = self.run.name in NOVOGRADS
        rough = self.rough
        exact = before.get("master_param", before["param"])
        new = state.get("master_param", p).detach().clone()
        expected = torch.where(truth.open, new.double(), truth.param)
        self.near(new, expected, exact, rough, what="parameter")
        if "master_param" in state:
            assert torch.equal(p.detach(), new.to(p.dtype))
        if "step" in state:
            assert state["step"] == self.steps[id(p)]
        decay = self.group[id(p)]["weight_decay"]  # its part cancels with the gradient's
        for name, value in truth.states.items():
            old = before.get(name, torch.zeros_like(value))
            if self.steps[id(p)] == 1 and name == "square_avg" and self.run.name == "RMSpropTF":
                old = torch.ones_like(value)
            scalar = value.dim() == 0 and p.dim() != 0
            dtype = torch.float32 if scalar or (single and name != "exp_avg") else None
            mine = state[name]
            if dtype is None:
                usual = p.dtype
                if self.run.name == "FusedAdam":
                    usual = torch.promote_types(p.dtype, torch.float32)
                assert mine.dtype == (self.run.fused["state_dtype"] or usual)
            parts = decay * (exact.abs() if value.dim() else exact.norm())
            parts = parts**2 if name in SQUARES else parts
            self.near(mine, value.view_as(mine), old, rough, what=name, dtype=dtype, parts=parts)
        if "ema" in state:
            decay = self.run.fused["ema_decay"]
            old = before.get("ema", before["param"])
            average = old + (1 - decay) * (expected - old)
            # of a parameter that is itself rounded
            rough = 2 * rough + (0 if p.dtype == torch.float64 else 1e-6)
            self.near(state["ema"], average, old, rough, what="ema")
        else:
            assert self.run.fused["ema_decay"] is None

    def unchanged(self, p: Tensor, before: dict[str, Tensor], applied: bool) -> None:
        now = snapshot(self.optimizer, p)
        for name, old in before.items():
            if name == "ema" and applied:
                decay = self.run.fused["ema_decay"]
                average = old + (1 - decay) * (before["param"] - old)
                self.near(self.optimizer.state[p]["ema"], average, old, what="ema")
            else:
                assert torch.equal(now[name], old), name

    def compare_gradient(self, p: Tensor, original: Tensor, expected: Tensor) -> None:
        assert p.grad is not None
        kind = self.run.fused["gradient_writeback"]
        if kind == "zero":
            assert torch.count_nonzero(p.grad) == 0
        elif kind == "none":
            assert torch.equal(p.grad.nan_to_num(7), original.nan_to_num(7))
        else:
            finite = expected.isfinite()
            assert not p.grad[~finite].isfinite().any()
            left, expected = p.grad[finite], expected[finite]
            self.near(left, expected, torch.zeros_like(expected), self.rough, what="gradient")


def snapshot(optimizer: FusedOptimizer, p: Tensor) -> dict[str, Tensor]:
    states = {"param": p, **optimizer.state.get(p, {})}
    return {k: v.detach().double().clone() for k, v in states.items() if v is not None}


def results(name: str, steps: int = 2) -> list[Tensor]:
    """Parameters, states and the norm after steps over several chunks."""
    clip = {"agc": 0.05} if name in ("Adam", "LARS") else {"max_grad_norm": 0.5}
    options: dict[str, Any] = (
        {"weight_decay": 0.0} if "weight_decay" in CLASSES[name].values else {}
    )
    options |= {"momentum": 0.9} if "momentum" in CLASSES[name].values else {}
    run = simple(name, options, clip)
    run.ones[0].shape = (3, 6000)
    run.ones[1].shape = (40001,)
    checked = Checked(run)
    tensors = []
    for _ in range(steps):
        checked.give_gradients(Iteration())
        checked.optimizer.step()
        assert checked.optimizer.grad_norm is not None
        tensors.append(checked.optimizer.grad_norm)
    for p in checked.params:
        tensors += [p.detach(), *(v for v in checked.optimizer.state[p].values())]
    return [t.clone() for t in tensors]
