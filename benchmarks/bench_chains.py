"""Pointwise chains against eager torch and torch.compile: gated linear units, bias + activation +
dropout, gates over space, residual branches. Rivals take turns within one test."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.harness.cases import LAYOUTS, Options, Work, dtype_name
from benchmarks.harness.guards import refuse_the_reference
from benchmarks.harness.race import Race
from fusedtrain.advisor.bench.chains import CHAINS, PASSES, contest

FAMILY = "chains"
SIZES = {"cpu": (2**22, 2**24), "cuda": (2**22, 2**26)}
QUICK_SIZE = 2**16
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float16, torch.float32)}


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


FIRST = [
    Case(op, 2**26, torch.bfloat16, "channels_last" if CHAINS[op].image else "", PASSES[1], False)
    for op in (
        "swiglu",
        "se_gate",
        "layer_scale_drop_path_add",
        "bias_gelu_dropout",
        "stylegan_lrelu",
    )
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
                    for pass_name in PASSES:
                        common = pass_name == PASSES[1] and dtype == dtypes[0]
                        rival = options.full or (common and size == sizes[-1])
                        compiled = options.compiled and rival
                        cases.append(Case(op, size, dtype, layout, pass_name, compiled))
    return [case for case in cases if options.wants(case.op)]


def test_chain(race: Race, case: Case) -> None:
    """One row of the results."""
    refuse_the_reference("gated", race.device)
    work = Work(race.device, case.dtype, compiled=case.compiled)
    made = contest(work, case.op, case.size, case.layout)
    shape = list(made.source.shape)
    race.match(
        made, case.pass_name, str(case), family=FAMILY, op=case.op, shape=shape, layout=case.layout
    )
