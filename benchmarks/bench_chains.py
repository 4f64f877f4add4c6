"""Pointwise chains against eager torch and torch.compile: gated linear units, bias + activation +
dropout, gates over space, residual branches. Rivals take turns within one test."""

from __future__ import annotations

import torch

from benchmarks.harness.cases import LAYOUTS, Case, Options, dtype_name, joined
from benchmarks.harness.race import Race
from fusedtrain.advisor.bench.chains import CHAINS, PASSES, contest

FAMILY = "chains"
SIZES = {"cpu": (2**22, 2**24), "cuda": (2**22, 2**26)}
QUICK_SIZE = 2**16
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}
FIRST_OPS = (
    "swiglu", "se_gate", "layer_scale_drop_path_add", "bias_gelu_dropout", "stylegan_lrelu"
)  # fmt: skip


def _row(
    op: str, numel: int, dtype: torch.dtype, layout: str, part: str, compiled: bool = False
) -> Case:
    name = joined(op, part, dtype_name(dtype), layout, f"2^{numel.bit_length() - 1}")
    shape = CHAINS[op].shapes_for(numel)[0]
    arguments = (op, numel, layout)
    return Case(
        name, op, part, dtype, shape, contest, arguments, layout=layout, compiled=compiled
    )  # fmt: skip


FIRST = [
    _row(op, 2**26, torch.bfloat16, "channels_last" if CHAINS[op].image else "", PASSES[1])
    for op in FIRST_OPS
]


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
                    for part in PASSES:
                        common = part == PASSES[1] and dtype == dtypes[0]
                        rival = options.full or (common and size == sizes[-1])
                        compiled = options.compiled and rival
                        cases.append(_row(op, size, dtype, layout, part, compiled))
    return [case for case in cases if options.wants(case.op)]


def test_chain(race: Race, case: Case) -> None:
    """One row of the results."""
    race.op(FAMILY, case, kernel="gated")
