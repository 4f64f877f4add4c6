"""Batch norm, and group norm, with what follows it against eager torch and torch.compile of that.

The standard shapes, in every layout and dtype; and every distinct batch norm of real networks
(``shapes.py``) against eager. Rivals take turns within one test.
"""

from __future__ import annotations

import itertools

import torch

from benchmarks.harness import shapes
from benchmarks.harness.cases import LAYOUTS, Case, Options, dtype_name, joined
from benchmarks.harness.race import Race
from fusedtrain._text import shape_text
from fusedtrain.advisor.bench.norms import OPS, PASSES, STANDARD, contest

FAMILY = "batch_norm"
Shape = tuple[int, ...]
SHAPES: dict[str, tuple[Shape, ...]] = {
    "cpu": ((16, 96, 56, 56), (32, 96, 56, 56)),
    "cuda": ((32, 96, 56, 56), (256, 96, 56, 56)),  # the smaller fits into the L2 cache
}
GROUP_SHAPES = ((4, 64, 128, 128), (8, 256, 32, 32))  # of blocks of a diffusion model
QUICK_SHAPE = (2, 16, 14, 14)
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# In which a device trains. The others only at the last shape; torch.compile, which takes 5 s and
# more a row on the CPU, there in the first, forward+backward. --full has all with all.
DTYPES = {"cpu": ALL_DTYPES[:2], "cuda": (torch.bfloat16, torch.float16, torch.float32)}
# Layers of networks. On CUDA smaller batches would stay in the L2 cache.
LAYER_BATCHES = {"cpu": (8, 32), "cuda": (256,)}
# The last one is one launch a pass.
FIRST_SHAPES = ((256, 64, 56, 56), (256, 1024, 14, 14), (256, 2048, 7, 7), (64, 2048, 7, 7))


def _row(
    op: str, shape: Shape, dtype: torch.dtype, layout: str, part: str, *, model: str = "",
    compiled: bool = False,
) -> Case:  # fmt: skip
    """A row; `model`: the network that has this layer."""
    name = joined(model, op, part, dtype_name(dtype), layout, shape_text(shape))
    return Case(
        name, op, part, dtype, shape, contest, (op, shape, layout), layout=layout, model=model,
        compiled=compiled,
    )  # fmt: skip


FIRST = [
    _row("bn_relu", shape, torch.bfloat16, layout, part)
    for shape in FIRST_SHAPES
    for layout in LAYOUTS
    for part in PASSES
]


def select(options: Options) -> list[Case]:
    """The cases of a run, those that share tensors together."""
    cases: list[Case] = []
    if options.quick and not options.models:
        cases = [
            _row(op, QUICK_SHAPE, torch.float32, layout, PASSES[1])
            for layout in LAYOUTS
            for op in options.ops or ("bn_silu", "bn_add_relu")
            if op in STANDARD
        ]
    elif not options.models:
        cases = _standard(options)
    if not options.quick or options.models:
        cases += _of_networks(options)
    if options.quick and options.models:
        cases = cases[:2]
    return [case for case in cases if not options.ops or case.op in options.ops]


def _standard(options: Options) -> list[Case]:
    first, *others = DTYPES[options.device]
    last = SHAPES[options.device][-1]
    cases = []
    for shape in SHAPES[options.device]:
        for dtype in ALL_DTYPES if options.full else (first, *others):
            if not options.full and dtype != first and shape != last:
                continue
            for layout in LAYOUTS:
                for op in STANDARD:
                    for part in PASSES:
                        trains = part == PASSES[1] and not OPS[op].frozen
                        rival = options.full or (trains and dtype == first and shape == last)
                        compiled = options.compiled and rival
                        cases.append(_row(op, shape, dtype, layout, part, compiled=compiled))
    groups = itertools.product(GROUP_SHAPES, (first, *others), LAYOUTS, PASSES[1:])
    return cases + [_row("gn_silu", *group) for group in groups]


def _of_networks(options: Options) -> list[Case]:
    dtype = DTYPES[options.device][0]
    return [
        _row(
            layer.op, (batch, *layer[1:]), dtype, layout, part, model=network,
            compiled=options.compiled and options.full,
        )
        for network in shapes.NORM_NETWORKS
        if not options.models or network in options.models
        for layer in shapes.distinct_norms(network)
        for batch in LAYER_BATCHES[options.device]
        for layout in LAYOUTS
        for part in (PASSES if options.full else PASSES[1:])
    ]  # fmt: skip


def test_batch_norm(race: Race, case: Case) -> None:
    """One row of the results."""
    race.op(FAMILY, case, kernel="batch_norm_act")
