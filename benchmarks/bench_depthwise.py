"""Depthwise convolutions against torch's own, and torch.compile. Rivals take turns within one test.

The layers are those of networks. The percentages of a copy's speed count what a pass must read and
write: input and output; in backward the same of gradients, and the input for the weight's. Layers,
contestants and gate are in fusedtrain.advisor.bench.depthwise.
"""

from __future__ import annotations

import torch

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


def _contest(work: Work, layer: Layer, batch: int, layout: str) -> Contest:
    if work.device == "cpu":
        return contest(work, layer, batch, layout)
    depthwise._EVERYWHERE = True  # where torch's kernels run until ours are measured
    return contest(work, layer, batch, layout, CUDA_GATE)


def _row(batch: int, dtype: torch.dtype, layer: Layer, layout: str, part: str) -> Case:
    shape = (batch, layer.channels, *[layer.side] * layer.dims)
    window = f"k{layer.kernel}s{layer.stride}"
    return Case(
        joined(window, part, dtype_name(dtype), layout, shape_text(shape)), OP, part, dtype, shape,
        _contest, (layer, batch, layout), layer.name, layout,
    )  # fmt: skip


FIRST = [_row(256, torch.bfloat16, Layer(144, 56, 3), name, PASSES[2]) for name in LAYOUTS]


def select(options: Options) -> list[Case]:
    """The cases of a run; those of a layer together."""
    layers = QUICK if options.quick else LAYERS
    choices = [
        (layer, layout, part)
        for layer in layers
        for layout in (LAYOUTS if layer.dims == 2 else ("contiguous",))
        for part in PASSES
    ]
    return grid(options, _row, (BATCH[options.device],), DTYPES[options.device], choices)


def test_depthwise(race: Race, case: Case) -> None:
    """One row of the results."""
    race.op(FAMILY, case, kernel=OP)
