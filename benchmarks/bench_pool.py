"""Max pooling that keeps places of maxima against eager torch, which keeps indices and the input,
and torch.compile. Rivals take turns within one test."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness.cases import LAYOUTS, Options, Work, dtype_name
from benchmarks.harness.guards import refuse_the_reference
from benchmarks.harness.race import PASSES, Race, call_of
from fusedtrain.advisor.bench import COMPILE, EAGER, OURS, Contest
from fusedtrain.advisor.bench.clock import Function, compiled
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


@dataclass(frozen=True)
class Case:
    """One row."""

    layer: Layer
    batch: int
    dtype: torch.dtype
    layout: str
    pass_name: str
    compiled: bool
    op: str = OP

    def __str__(self) -> str:
        layer = self.layer
        size = f"{self.batch}x{layer.channels}x{layer.side}x{layer.side}"
        window = f"{layer.kernel}x{layer.kernel}s{layer.stride}"
        return "-".join((window, self.pass_name, dtype_name(self.dtype), self.layout, size))


FIRST = [Case(LAYERS[0], 128, torch.bfloat16, name, PASSES[2], False) for name in LAYOUTS]


def select(options: Options) -> list[Case]:
    """The cases of a run; those of a layer together. torch.compile takes part in the first dtype;
    --full has it everywhere."""
    if not options.wants(OP) or options.models:
        return []
    dtypes = DTYPES[options.device]
    compiled = options.compiled and not options.quick
    return [
        Case(
            layer, BATCH[options.device], dtype, layout, pass_name,
            compiled and (options.full or dtype == dtypes[0]),
        )
        for dtype in (dtypes[:1] if options.quick else dtypes)
        for layer in (QUICK if options.quick else LAYERS)
        for layout in LAYOUTS
        for pass_name in PASSES
    ]  # fmt: skip


def tensors(
    layer: Layer, batch: int, dtype: torch.dtype, layout: str, device: str
) -> tuple[Tensor, Tensor]:
    """The input and the gradient of the output."""
    work = Work(device, dtype)
    x = work.random(batch, layer.channels, layer.side, layer.side, layout=layout)
    return x, work.random(*layer.eager(x).shape, seed=1, layout=layout)


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


@lru_cache(maxsize=1)
def _contest(
    layer: Layer, batch: int, dtype: torch.dtype, layout: str, device: str, with_compile: bool
) -> Contest:
    """All passes."""
    x, gradient = tensors(layer, batch, dtype, layout, device)

    def gate(who: str, function: Function) -> None:
        check(function, layer, x, gradient, bits=who == OURS)

    def moved(pass_name: str) -> float:
        return layer.tensors(pass_name, dtype) * x.nbytes

    functions: dict[str, Function] = {OURS: layer.ours, EAGER: layer.eager}
    if with_compile:
        functions[COMPILE] = compiled(layer.eager)
    return Contest(functions, gate, partial(call_of, x=x, gradient=gradient), moved, x)


def test_pool(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference(OP, race.device)
    layer, dtype, layout = case.layer, case.dtype, case.layout
    contest = _contest(layer, case.batch, dtype, layout, race.device, case.compiled)
    x = contest.source
    leaf = x.detach().requires_grad_()
    race.match(
        contest,
        case.pass_name,
        f"{layer.name}, {dtype_name(dtype)}, {layout}, {list(x.shape)}",
        family=FAMILY,
        op=layer.name,
        shape=list(x.shape),
        layout=layout,
        kept={who: partial(function, leaf) for who, function in contest.functions.items()},
    )
