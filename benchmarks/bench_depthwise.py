"""Depthwise convolutions against torch's own, and torch.compile. Rivals take turns within one test.

The layers are those of networks. The percentages of a copy's speed count what a pass must read and
write: input and output; in backward the same of gradients, and the input for the weight's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as T
from torch import Tensor

import fusedtrain.functional as F
from benchmarks.harness import ops
from benchmarks.harness.cases import LAYOUTS, Options, Work, dtype_name
from benchmarks.harness.guards import refuse_the_reference
from benchmarks.harness.race import PASSES, Race, call_of
from fusedtrain.advisor.bench import COMPILE, EAGER, OURS, Contest
from fusedtrain.advisor.bench.clock import Function, compiled
from fusedtrain.advisor.bench.gate import GRADIENT, Tolerance, agrees, first_call
from fusedtrain.ops import depthwise

FAMILY = "depthwise"
REPORT = ops.report(FAMILY)
OP = "depthwise_conv"
BATCH = {"cpu": 8, "cuda": 64}
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16, torch.float32),
}
OURS_BY_DIMS = {1: F.depthwise_conv1d, 2: F.depthwise_conv2d, 3: F.depthwise_conv3d}
TORCHS_BY_DIMS = {1: T.conv1d, 2: T.conv2d, 3: T.conv3d}


@dataclass(frozen=True)
class Layer:
    """Images, rows or volumes of equal sides, a kernel of equal sides, padding of half of it."""

    channels: int
    side: int
    kernel: int
    stride: int = 1
    dims: int = 2

    @property
    def window(self) -> tuple[int, int]:
        return self.stride, self.kernel // 2

    def weight(self, work: Work) -> Tensor:
        shape = (self.channels, 1, *[self.kernel] * self.dims)
        return work.random(*shape, seed=2) / self.kernel ** (self.dims / 2)

    def ours(self, x: Tensor, weight: Tensor) -> Tensor:
        return OURS_BY_DIMS[self.dims](x, weight, None, *self.window)

    def eager(self, x: Tensor, weight: Tensor) -> Tensor:
        return TORCHS_BY_DIMS[self.dims](x, weight, None, *self.window, 1, self.channels)

    @property
    def name(self) -> str:
        return f"{self.dims}-d {self.kernel}/{self.stride}"

    def tensors(self, pass_name: str) -> float:
        """Memory read and written at least, in sizes of the input."""
        out = (1 / self.stride) ** self.dims
        return (1 + out) if pass_name == "forward" else (3 + 2 * out)


LAYERS = (
    # EfficientNet-B0 and MobileNetV3-L
    Layer(32, 112, 3), Layer(96, 112, 3, 2), Layer(144, 56, 3), Layer(144, 56, 5, 2),
    Layer(240, 28, 5), Layer(240, 28, 3, 2), Layer(480, 14, 3), Layer(480, 14, 5),
    Layer(672, 14, 5), Layer(672, 14, 5, 2), Layer(1152, 7, 5), Layer(1152, 7, 3),
    # MobileNetV4-conv-small
    Layer(32, 28, 5, 2), Layer(192, 14, 3), Layer(384, 14, 5), Layer(576, 7, 5),
    # ConvNeXt-T
    Layer(96, 56, 7), Layer(192, 28, 7), Layer(384, 14, 7), Layer(768, 7, 7),
    # RepLKNet, a Conformer, X3D
    Layer(128, 56, 31), Layer(256, 512, 31, dims=1), Layer(54, 28, 3, dims=3),
)  # fmt: skip
QUICK = (Layer(16, 28, 3, 2),)


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
        size = f"{self.batch}x{layer.channels}" + f"x{layer.side}" * layer.dims
        window = f"k{layer.kernel}s{layer.stride}"
        return "-".join((window, self.pass_name, dtype_name(self.dtype), self.layout, size))


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
        for layout in (LAYOUTS if layer.dims == 2 else ("contiguous",))
        for pass_name in PASSES
    ]  # fmt: skip


def check(function: Function, layer: Layer, x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    """Raise NotTheJob unless output and gradients are eager torch's of float64, to within rounding
    of the dtype, and float32's of the sums."""
    wide = [t.detach().cpu().double() for t in (x, weight)]
    exact = first_call(layer.eager, wide, gradient.cpu().double())
    got = first_call(function, [x, weight], gradient)
    # Sums of products, each term by its size.
    most = first_call(layer.eager, [t.abs() for t in wide], gradient.cpu().double().abs())
    for name, a, want, bound in zip(("output", "gradient", "gradient of the weight"), got, exact,
                                    most, strict=True):  # fmt: skip
        rtol = GRADIENT[x.dtype].rtol
        agrees(name, a, want, Tolerance(rtol=rtol, atol=rtol * bound))


@lru_cache(maxsize=1)
def _contest(
    layer: Layer, batch: int, dtype: torch.dtype, layout: str, device: str, with_compile: bool
) -> Contest:
    """All passes."""
    work = Work(device, dtype)
    x = work.random(batch, layer.channels, *[layer.side] * layer.dims, layout=layout)
    weight = layer.weight(work)
    gradient = work.random(*layer.eager(x, weight).shape, seed=1, layout=layout)

    def gate(who: str, function: Function) -> None:
        check(function, layer, x, weight, gradient)

    def moved(pass_name: str) -> float:
        return layer.tensors(pass_name) * x.nbytes

    if device != "cpu":  # where torch's kernels run until ours are measured
        depthwise._EVERYWHERE = True
    functions: dict[str, Function] = {OURS: layer.ours, EAGER: layer.eager}
    if with_compile:
        functions[COMPILE] = compiled(layer.eager)
    call = partial(call_of, x=x, gradient=gradient, weights=(weight,))
    return Contest(functions, gate, call, moved, x)


def test_depthwise(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference(OP, race.device)
    layer, dtype, layout = case.layer, case.dtype, case.layout
    contest = _contest(layer, case.batch, dtype, layout, race.device, case.compiled)
    x = contest.source
    race.match(
        contest,
        case.pass_name,
        f"{layer.name}, {dtype_name(dtype)}, {layout}, {list(x.shape)}",
        family=FAMILY,
        op=layer.name,
        shape=list(x.shape),
        layout=layout,
    )
