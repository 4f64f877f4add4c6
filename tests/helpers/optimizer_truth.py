"""One step in float64 by torch.optim, timm.optim or Apex's formulas, from our own state."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedtrain.optim import FusedOptimizer
from helpers.apex_truth import TRUTHS
from helpers.optimizers import NEWER, counterpart

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
