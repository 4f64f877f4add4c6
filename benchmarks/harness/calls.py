"""Calls on tensors of 64 numbers, where the host's work is all the time, and their gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness.cases import Work
from fusedtrain.advisor.bench import EAGER, OURS, Contest, chains, norms
from fusedtrain.advisor.bench.clock import Function
from fusedtrain.advisor.bench.gate import FORWARD, NotTheJob, agrees

CHANNELS = 16
SHAPE = (1, CHANNELS, 2, 2)
NO_GRADIENTS, FORWARD_PASS, BOTH = "no gradients", "forward", "forward+backward"
PASSES = (NO_GRADIENTS, FORWARD_PASS, BOTH)


@dataclass(frozen=True)
class Call:
    """A fused call and the calls that it replaces.

    Args:
        contest: makes the contestants, for a layout.
        at_most: fusedtrain's time over eager's, forward, and forward and backward.
        drops: whether elements are dropped at random.
    """

    contest: Callable[[Work, str], Contest]
    at_most: tuple[float, float] = (1.0, 1.0)
    drops: bool = False

    def target(self, pass_name: str) -> float:
        return self.at_most[pass_name == BOTH]


def _chain(ours: Function, eager: Function, *more: tuple[int, ...], **options: Any) -> Call:
    """A function; `more`: shapes of the tensors behind the first."""
    undropped = options.pop("undropped", None)
    chain = chains.Chain(ours, eager, lambda _: (SHAPE, *more), (2, 3), undropped=undropped)

    def contest(work: Work, layout: str) -> Contest:
        return chains.contest_of(work, chain, 0, layout, trains=True)

    return Call(contest, drops=undropped is not None, **options)


def _norm(name: str, makers: norms.Makers = norms.CONTESTANTS) -> Call:
    def contest(work: Work, layout: str) -> Contest:
        return norms.contest(work, name, SHAPE, layout, makers, trains=True)

    return Call(contest)


def _function(op: norms.NormOp, channels: int, device: str, *, fused: bool) -> norms.Contestant:
    """The layer's numbers, given to a function."""
    norm, act = norms.eager(op, channels, device).norm, op.act.lower()
    weight, bias, mean, var = norm.weight, norm.bias, norm.running_mean, norm.running_var
    activation = getattr(T, act)

    def ours(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return F.batch_norm_act(x, mean, var, weight, bias, True, activation=act, residual=residual)

    def eager(x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = T.batch_norm(x, mean, var, weight, bias, True)
        if residual is not None:
            out += residual
        result: Tensor = activation(out, inplace=True)
        return result

    return norms.Contestant(norm, ours if fused else eager)


_FUNCTIONS = {OURS: partial(_function, fused=True), EAGER: partial(_function, fused=False)}


def _biased(x: Tensor, bias: Tensor) -> Tensor:
    return T.gelu(x + bias.view(1, -1, 1, 1))


CALLS: dict[str, Call] = {
    **{name: _norm(name) for name in ("bn_relu", "bn_silu", "bn_add_relu")},
    **{
        f"batch_norm_act {name}": _norm(f"bn_{name.replace(' ', '_')}", _FUNCTIONS)
        for name in ("relu", "silu", "add relu")
    },
    **{
        name: _chain(getattr(F, name), getattr(T, name), at_most=(1.0, 1.35))
        for name in ("silu", "gelu", "mish", "hardswish", "leaky_relu")
    },
    "glu": _chain(partial(F.glu, dim=1), partial(T.glu, dim=1)),
    "gate": _chain(
        lambda x, gate: F.gated(x, gate, "sigmoid"),
        lambda x, gate: x * gate.sigmoid(),
        (1, CHANNELS, 1, 1),
    ),
    "bias_gelu_dropout": _chain(
        lambda x, bias: F.bias_act_dropout(x, bias, "gelu", chains.P, dim=1),
        lambda x, bias: T.dropout(_biased(x, bias), chains.P),
        (CHANNELS,),
        undropped=_biased,
    ),
}


def check(call: Call, contest: Contest, who: str) -> None:
    """Raise NotTheJob unless the contestant's numbers are right, also without gradients."""
    contest.gate(who)
    forward = contest.call(contest.functions[who], "forward")
    with torch.no_grad():
        plain: Any = forward()
    output: Any = forward()
    if plain.requires_grad or not output.requires_grad:
        raise NotTheJob("the output requires a gradient where it must not, or not where it must")
    if not call.drops:
        agrees("output without gradients", plain, output, FORWARD[torch.float32])
