"""Max pooling that keeps places of maxima against eager torch, which keeps indices and the input,
and torch.compile. Rivals take turns within one test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness.cases import (
    LAYOUTS,
    PASSES,
    Case,
    Options,
    Work,
    dtype_name,
    grid,
    joined,
)
from benchmarks.harness.race import Race
from fusedtrain._text import shape_text
from fusedtrain.advisor.bench import OURS, Contest, call_of, duel
from fusedtrain.advisor.bench.clock import Function
from fusedtrain.advisor.bench.gate import GRADIENT, Tolerance, agrees, first_call

FAMILY = "pool"
OP = "max_pool2d"
BATCH = {"cpu": 8, "cuda": 64}
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16, torch.float32),
}


@dataclass(frozen=True)
class Layer:
    """Square images and windows."""

    channels: int
    side: int
    kernel: int
    stride: int
    padding: int = 0

    @property
    def window(self) -> tuple[int, int, int]:
        return self.kernel, self.stride, self.padding

    def ours(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, *self.window)

    def eager(self, x: Tensor) -> Tensor:
        return T.max_pool2d(x, *self.window)

    @property
    def name(self) -> str:
        """The op, with its window."""
        return f"{OP} {self.kernel}x{self.kernel}/{self.stride}"

    def tensors(self, pass_name: str, dtype: torch.dtype) -> float:
        """Memory read and written at least, in sizes of the input: input, output and the codes of 2
        or 4 bits, and the same of gradients."""
        side = (self.side + 2 * self.padding - self.kernel) // self.stride + 1
        codes = (2 if self.kernel == 2 else 4) / 8 / dtype.itemsize
        each = 1 + (1 + codes) * side**2 / self.side**2
        return each * (1 + (pass_name == "forward+backward"))


LAYERS = (
    Layer(64, 112, 3, 2, 1),  # the stem of ResNets
    Layer(128, 56, 2, 2),  # VGGs
    Layer(512, 14, 2, 2),
    Layer(512, 14, 3, 1, 1),  # GoogLeNet's branches
    Layer(512, 7, 3, 1, 1),
)
QUICK = (Layer(16, 28, 3, 2, 1),)


def check(function: Function, layer: Layer, x: Tensor, gradient: Tensor, *, bits: bool) -> None:
    """Raise NotTheJob unless the output is eager torch's bit for bit, and the gradient what eager
    torch finds on the CPU in float32: with ``bits`` bit for bit, rounded once, else to within the
    rounding of every addition."""
    wide, grad = x.cpu().float(), gradient.cpu().float()
    exact, want = first_call(layer.eager, [wide], grad)
    y, dx = first_call(function, [x], gradient)
    agrees("output", y, exact, Tolerance())
    if bits:
        agrees("gradient", dx, want.to(x.dtype), Tolerance())
    else:
        # Eight additions at most, half an ulp of the sum so far each: that is this rtol.
        most = first_call(layer.eager, [wide], grad.abs())[1].double()
        agrees("gradient", dx, want, Tolerance(atol=GRADIENT[x.dtype].rtol * most))


def contest(work: Work, layer: Layer, batch: int, layout: str) -> Contest:
    """All passes."""
    x = work.random(batch, layer.channels, layer.side, layer.side, layout=layout)
    gradient = work.random(*layer.eager(x).shape, seed=1, layout=layout)

    def gate(who: str, function: Function) -> None:
        check(function, layer, x, gradient, bits=who == OURS)

    def moved(part: str) -> float:
        return layer.tensors(part, work.dtype) * x.nbytes

    call = partial(call_of, tensors=[x], gradient=gradient, trains=True)
    return Contest(duel(work, layer.ours, layer.eager), gate, call, moved, x)


def _row(batch: int, dtype: torch.dtype, layer: Layer, layout: str, part: str) -> Case:
    shape = (batch, layer.channels, layer.side, layer.side)
    window = f"{layer.kernel}x{layer.kernel}s{layer.stride}"
    return Case(
        joined(window, part, dtype_name(dtype), layout, shape_text(shape)), OP, part, dtype, shape,
        contest, (layer, batch, layout), layer.name, layout, kept=True,
    )  # fmt: skip


FIRST = [_row(128, torch.bfloat16, LAYERS[0], name, PASSES[2]) for name in LAYOUTS]


def select(options: Options) -> list[Case]:
    """The cases of a run; those of a layer together."""
    layers = QUICK if options.quick else LAYERS
    choices = [(layer, layout, part) for layer in layers for layout in LAYOUTS for part in PASSES]
    return grid(options, _row, (BATCH[options.device],), DTYPES[options.device], choices)


def test_pool(race: Race, case: Case) -> None:
    """One row of the results."""
    race.op(FAMILY, case, kernel=OP)
