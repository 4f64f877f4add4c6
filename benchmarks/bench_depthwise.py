"""Depthwise convolutions against torch's own, and torch.compile. Rivals take turns within one test.

The layers are those of networks. The percentages of a copy's speed count what a pass must read and
write: input and output; in backward the same of gradients, and the input for the weight's. Layers,
contestants and gate are in fusedtrain.advisor.bench.depthwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from benchmarks.harness.cases import LAYOUTS, Options, Work, dtype_name
from benchmarks.harness.guards import refuse_the_reference
from benchmarks.harness.race import PASSES, Race
from fusedtrain.advisor.bench import Contest
from fusedtrain.advisor.bench.depthwise import Layer, contest
from fusedtrain.ops import depthwise

FAMILY = "depthwise"
OP = "depthwise_conv"
BATCH = {"cpu": 8, "cuda": 64}
CUDA_GATE = 4  # images that the gate looks at: the CPU computes them in float64
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16, torch.float32),
}

NETWORKS = {
    "EfficientNet-B0": (
    Layer(32, 112, 3), Layer(96, 112, 3, 2), Layer(144, 56, 3), Layer(144, 56, 5, 2),
    Layer(240, 28, 5), Layer(240, 28, 3, 2), Layer(480, 14, 3), Layer(480, 14, 5),
    Layer(672, 14, 5), Layer(672, 14, 5, 2), Layer(1152, 7, 5), Layer(1152, 7, 3),
    ),
    "MobileNetV4-conv-small": (
    Layer(32, 28, 5, 2), Layer(192, 14, 3), Layer(384, 14, 5), Layer(576, 7, 5),
    ),
    "ConvNeXt-T": (
    Layer(96, 56, 7), Layer(192, 28, 7), Layer(384, 14, 7), Layer(768, 7, 7),
    ),
    "RepLKNet": (Layer(128, 56, 31),),
    "Conformer, 1-d": (Layer(256, 512, 31, dims=1),),
    "X3D, 3-d": (Layer(54, 28, 3, dims=3),),
}  # fmt: skip
LAYERS = tuple(layer for layers in NETWORKS.values() for layer in layers)
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


FIRST = [Case(Layer(144, 56, 3), 256, torch.bfloat16, name, PASSES[2], False) for name in LAYOUTS]


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


@lru_cache(maxsize=1)
def _contest(
    layer: Layer, batch: int, dtype: torch.dtype, layout: str, device: str, with_compile: bool
) -> Contest:
    """All passes."""
    gate = 0
    if device != "cpu":  # where torch's kernels run until ours are measured
        depthwise._EVERYWHERE = True
        gate = CUDA_GATE
    return contest(Work(device, dtype, compiled=with_compile), layer, batch, layout, gate)


def test_depthwise(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference(OP, race.device)
    layer, dtype, layout = case.layer, case.dtype, case.layout
    made = _contest(layer, case.batch, dtype, layout, race.device, case.compiled)
    x = made.source
    race.match(
        made,
        case.pass_name,
        f"{layer.name}, {dtype_name(dtype)}, {layout}, {list(x.shape)}",
        family=FAMILY,
        op=layer.name,
        shape=list(x.shape),
        layout=layout,
    )
