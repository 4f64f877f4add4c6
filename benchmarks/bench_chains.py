"""Pointwise chains against eager torch and torch.compile: gated linear units, bias + activation +
dropout, gates over space, residual branches. Rivals take turns within one test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness import ops
from benchmarks.harness.cases import LAYOUTS, Options, dtype_name
from benchmarks.harness.clock import Call
from benchmarks.harness.guards import (
    CHAIN,
    NotTheJob,
    admit,
    agrees,
    first_call,
    refuse_the_reference,
)
from benchmarks.harness.race import Function, Race, compiled

FAMILY = "chains"
REPORT = ops.report(FAMILY)
PASSES = ("forward", "forward+backward")
SIZES = {"cpu": (2**22, 2**24), "cuda": (2**22, 2**26)}
QUICK_SIZE = 2**16
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
GATE = 2**19  # elements that the gate looks at
IMAGE = 96 * 56 * 56
P = 0.1  # of dropout


@dataclass(frozen=True)
class Chain:
    """A chain of pointwise operators. `shapes`: of its tensors, for so many elements of the first;
    the last `constants` of them get no gradient. `tensors`: how many of the first one's size must
    be read and written, forward, and backward more."""

    ours: Function
    eager: Function
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    tensors: tuple[float, float]
    constants: int = 0
    image: bool = False  # [N, C, H, W], in both layouts
    drops: bool = False


def _tokens(numel: int) -> tuple[int, ...]:
    return (numel // 4096, 4096)


def _images(numel: int) -> tuple[int, ...]:
    return (numel // (96 * 56 * 56), 96, 56, 56)


def _packed(function: Callable[[Tensor], Tensor]) -> Function:
    def run(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, -1)
        return function(gate) * value

    return run


def _patches(numel: int) -> tuple[int, ...]:
    return (max(1, numel // (196 * 768)), 196, 768)


def _residual(r: Tensor, x: Tensor, gamma: Tensor, keep: Tensor) -> Tensor:
    return r + x * gamma * keep.view(-1, 1, 1)


# Packed: reads the two halves and writes one; backward reads them and the gradient, writes both.
CHAINS = {
    "swiglu": Chain(
        F.swiglu, _packed(T.silu), lambda n: (_tokens(n),), (1.5, 2.5)
    ),
    "geglu": Chain(
        F.geglu, _packed(T.gelu), lambda n: (_tokens(n),), (1.5, 2.5)
    ),
    "bias_gelu": Chain(
        lambda x, b: F.bias_act_dropout(x, b, "gelu"),
        lambda x, b: T.gelu(x + b),
        lambda n: (_tokens(n), (4096,)),
        (2, 3),
    ),
    "bias_gelu_dropout": Chain(
        lambda x, b: F.bias_act_dropout(x, b, "gelu", P),
        lambda x, b: T.dropout(T.gelu(x + b), P),
        lambda n: (_tokens(n), (4096,)),
        (2, 3),
        drops=True,
    ),
    "dropout": Chain(
        lambda x: F.dropout(x, P), lambda x: T.dropout(x, P), lambda n: (_tokens(n),), (2, 2),
        drops=True,
    ),
    "se_gate": Chain(
        lambda x, s: F.gated(x, s, "sigmoid"),
        lambda x, s: x * s.sigmoid(),
        lambda n: (_images(n), (*_images(n)[:2], 1, 1)),
        (2, 3),
        image=True,
    ),
    "layer_scale_drop_path_add": Chain(
        F.residual_add,
        _residual,
        lambda n: (_patches(n), _patches(n), (768,), _patches(n)[:1]),
        (3, 3),
        constants=1,
    ),
    "stylegan_lrelu": Chain(
        lambda x, b: F.bias_act(x, b, dim=1, act="lrelu", clamp=256.0),
        lambda x, b: (T.leaky_relu(x + b.view(1, -1, 1, 1), 0.2) * 2**0.5).clamp(-256, 256),
        lambda n: (_images(n), (96,)),
        (2, 3),
        image=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row."""

    op: str
    size: int
    dtype: torch.dtype
    layout: str
    pass_name: str
    compiled: bool
    model: str = ""

    def __str__(self) -> str:
        exponent = self.size.bit_length() - 1
        parts = (self.op, self.pass_name, dtype_name(self.dtype), self.layout, f"2^{exponent}")
        return "-".join(filter(None, parts))


def select(options: Options) -> list[Case]:
    """The cases of a run. torch.compile takes part in forward+backward of the first dtype, at the
    larger size; --full has it everywhere."""
    if options.models:
        return []
    dtypes, sizes = DTYPES[options.device], SIZES[options.device]
    cases = []
    for size in (QUICK_SIZE,) if options.quick else sizes:
        for dtype in dtypes[:1] if options.quick else dtypes:
            for op, chain in CHAINS.items():
                for layout in LAYOUTS if chain.image else ("",):
                    for pass_name in PASSES:
                        common = pass_name == PASSES[1] and dtype == dtypes[0]
                        rival = options.full or (common and size == sizes[-1])
                        compiled = options.compiled and rival
                        cases.append(Case(op, size, dtype, layout, pass_name, compiled))
    return [case for case in cases if options.wants(case.op)]


@lru_cache(maxsize=1)
def _tensors(op: str, size: int, dtype: torch.dtype, layout: str, device: str) -> tuple[Any, ...]:
    """The arguments, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    chain = CHAINS[op]
    shapes = chain.shapes(max(size, IMAGE) if chain.image else size)
    made = []
    for shape in shapes:
        t = torch.randn(shape, generator=generator).to(device, dtype)
        kind = LAYOUTS.get(layout, torch.contiguous_format)
        made.append(t.contiguous(memory_format=kind) if t.dim() == 4 else t)
    grad = torch.randn(chain.eager(*made).shape, generator=generator).to(device, dtype)
    if grad.dim() == 4:
        grad = grad.contiguous(memory_format=LAYOUTS[layout])
    return tuple(made), grad


def check(chain: Chain, function: Function, tensors: tuple[Tensor, ...], grad: Tensor) -> None:
    """Raise NotTheJob unless forward and gradients are those of eager torch in float64."""
    wide = tuple(t.double() for t in tensors)
    call = partial(first_call, constants=chain.constants)
    exact = chain.eager
    if chain.drops:
        plain: Function = T.gelu if len(tensors) > 1 else torch.Tensor.clone
        undropped = plain(sum(wide))
        # Where it is 0, an output of 0 does not tell whether it was dropped.
        grad = torch.where(undropped == 0, 0, grad)
        results = call(function, tensors, grad)
        # Whatever the mask: the rate, and that forward and backward have the same one.
        kept = (results[0] != 0) | (undropped == 0)
        rate = 1 - float(kept.double().mean())
        if abs(rate - P) > 0.01:
            raise NotTheJob(f"drops {rate:.3f} of the elements, not {P}")
        mask = kept.double() / (1 - P)

        def masked(*arguments: Tensor) -> Tensor:
            return plain(sum(arguments)) * mask

        exact = masked
    else:
        results = call(function, tensors, grad)
    truth = call(exact, wide, grad.double())
    for number, (actual, expected) in enumerate(zip(results, truth, strict=True)):
        what = f"gradient {number}" if number else "output"
        agrees(what, actual, expected, CHAIN[grad.dtype])


def _entrants(case: Case, tensors: tuple[Tensor, ...], grad: Tensor) -> dict[str, Function]:
    """The contestants that passed the gate."""
    chain = CHAINS[case.op]
    contestants: dict[str, Function] = {"fusedtrain": chain.ours, "eager": chain.eager}
    if case.compiled:
        contestants["compile"] = compiled(chain.eager)
    few = max(1, GATE // (tensors[0].numel() // len(tensors[0])))
    batch = len(tensors[0])
    # Biases are not split, even if they are as many as the rows. Stochastic depth's numbers are.
    split = [t.dim() > 1 or i >= len(tensors) - chain.constants for i, t in enumerate(tensors)]
    part = tuple(
        t[:few] if is_split and len(t) == batch else t
        for t, is_split in zip(tensors, split, strict=True)
    )

    def gate(who: str, function: Function) -> None:
        whole = who == "compile"  # which compiles for one size
        check(chain, function, tensors if whole else part, grad if whole else grad[:few])

    return admit(contestants, gate, str(case))


def _call(function: Function, case: Case, tensors: tuple[Tensor, ...], grad: Tensor) -> Call:
    if case.pass_name == "forward":
        return lambda: function(*tensors)
    trained = len(tensors) - CHAINS[case.op].constants
    leaves = [t.detach().requires_grad_(i < trained) for i, t in enumerate(tensors)]
    return lambda: torch.autograd.grad(function(*leaves), leaves[:trained], grad)


def test_chain(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("gated", race.device)
    tensors, grad = _tensors(case.op, case.size, case.dtype, case.layout, race.device)
    entrants = _entrants(case, tensors, grad)
    if race.is_off():
        return
    forward, backward = CHAINS[case.op].tensors
    race.tensors(
        {who: _call(function, case, tensors, grad) for who, function in entrants.items()},
        tensors[0],
        family=FAMILY,
        op=case.op,
        pass_name=case.pass_name,
        tensors=forward if case.pass_name == "forward" else forward + backward,
        shape=list(tensors[0].shape),
        layout=case.layout,
    )
