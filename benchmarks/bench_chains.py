"""Pointwise chains against eager torch and torch.compile: gated linear units, bias + activation +
dropout, gates over space, residual branches. Rivals take turns within one test."""

from __future__ import annotations

import torch

from benchmarks.harness.cases import LAYOUTS, Case, Options, dtype_name, grid, joined
from benchmarks.harness.race import Race
from fusedtrain.advisor.bench.chains import CHAINS, PASSES, contest

FAMILY = "chains"
SIZES = {"cpu": (2**22, 2**24), "cuda": (2**22, 2**26)}
QUICK_SIZE = 2**16
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
FIRST_OPS = (
    "swiglu", "se_gate", "layer_scale_drop_path_add", "bias_gelu_dropout", "stylegan_lrelu"
)  # fmt: skip


def _row(numel: int, dtype: torch.dtype, op: str, layout: str, part: str) -> Case:
    name = joined(op, part, dtype_name(dtype), layout, f"2^{numel.bit_length() - 1}")
    shape = CHAINS[op].shapes_for(numel)[0]
    return Case(name, op, part, dtype, shape, contest, (op, numel, layout), layout=layout)


FIRST = [
    _row(2**26, torch.bfloat16, op, "channels_last" if CHAINS[op].image else "", PASSES[1])
    for op in FIRST_OPS
]


def select(options: Options) -> list[Case]:
    """The cases of a run."""
    sizes = (QUICK_SIZE,) if options.quick else SIZES[options.device]
    choices = [
        (op, layout, part)
        for op, chain in CHAINS.items()
        for layout in (LAYOUTS if chain.image else ("",))
        for part in PASSES
    ]
    return grid(options, _row, sizes, DTYPES[options.device], choices, rivalled=PASSES[1:])


def test_chain(race: Race, case: Case) -> None:
    """One row of the results."""
    race.op(FAMILY, case, kernel="gated")
