"""Rows of the benchmarks: which are measured, what the rows of ops on tensors have."""

from __future__ import annotations

import importlib
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks import (
    bench_depthwise,
    bench_pool,
    report,
)
from benchmarks.harness import store
from benchmarks.harness.cases import Options, Work
from benchmarks.harness.race import contest_of
from benchmarks.harness.store import FAMILIES
from fusedtrain.advisor.bench import EAGER, OURS
from helpers.benchmarks import measured

pytestmark = pytest.mark.filterwarnings("ignore:no torchvision rival")
BOTH = "forward+backward"
QUICK_OPS = {
    "activations": ("mish",),
    "batch_norm": ("bn_add_relu",),
    "chains": ("se_gate", "geglu"),
    "depthwise": (),
    "few_bit": (),
    "images": (),
    "pool": (),
}


def family(name: str) -> Any:
    return importlib.import_module(f"benchmarks.bench_{name}")


def test_stored_rows_are_selected() -> None:
    """Names and facts of stored rows are those of the cases: a run replaces the rows."""
    checked = Counter[str]()
    for entry in store.read(report.STORED / "amd-epyc.json")["benchmarks"]:
        row, (file, _, name) = entry["extra_info"], entry["fullname"].partition("::")
        (bench,) = (b for b in FAMILIES if file.endswith(f"/bench_{b}.py"))
        case = _cases(bench)[name.partition("[")[2].removesuffix("]")]
        facts = {"op": getattr(case, "label", "") or case.op}
        if bench not in ("depthwise", "memory", "transformers"):  # some were measured without
            facts["compiled"] = getattr(case, "compiled", False)
        for fact in ("layout", "model", "kind", "job", "target", "part", "pass_name", "shape"):
            if hasattr(case, fact):
                facts[fact] = getattr(case, fact)
        stored = (
            {"layout": "", "model": ""}
            | row
            | {"compiled": "compile" in row["ns"], "kind": row["dtype"]}
        )
        stored |= {"part": row.get("pass"), "pass_name": row.get("pass")}
        stored |= {"op": row.get("op", row.get("job", bench)), "target": row.get("at_most")}
        stored["shape"] = (*row.get("shape", (row.get("numel"),)),)
        assert {fact: stored[fact] for fact in facts} == facts, entry["fullname"]
        checked[bench] += 1
    assert checked.total() > 1000
    assert {*FAMILIES} - {*checked} == {"apex"}  # of another CPU


@cache
def _cases(name: str) -> dict[str, Any]:
    """The cases of a run on the CPU, and of the network that only --model has there."""
    runs = Options(), Options(models=("vit_l_16",))
    return {str(case): case for run in runs for case in family(name).select(run)}


# A quarter as many outputs as inputs, of 4 bits; eager: the input and 8 bytes an output.
KEPT = {
    "gelu q8": {OURS: 1, EAGER: 4, "exact": 4},
    "relu q1": {OURS: 0.125, EAGER: 4, "exact": 4},
    "max_pool2d 3x3/2": {OURS: pytest.approx(0.125, rel=0.04), EAGER: 6},
}
STEM, HALVED = bench_pool.Layer(64, 112, 3, 2, 1), bench_pool.Layer(8, 14, 2, 2)
IMAGES = (2, 8, 14, 14)


@pytest.mark.parametrize(
    ("name", "arguments", "dtype", "forward", "both"),
    [
        ("activations", ("mish", 64), torch.float32, 2, 5),
        ("batch_norm", ("bn_relu", IMAGES, "contiguous"), torch.float32, 3, 8),
        ("batch_norm", ("bn_silu", IMAGES, "contiguous"), torch.bfloat16, 3, 8),
        ("batch_norm", ("bn_add_relu", IMAGES, "contiguous"), torch.float32, 4, 11),
        ("batch_norm", ("bn_add", IMAGES, "contiguous"), torch.float32, 4, 9),
        ("batch_norm", ("bn", IMAGES, "contiguous"), torch.float32, 3, 8),
        ("batch_norm", ("frozen_bn_relu", IMAGES, "contiguous"), torch.float32, 2, 5),
        ("chains", ("swiglu", 2**14, ""), torch.float32, 1.5, 4),
        ("depthwise", (bench_depthwise.Layer(8, 14, 3, 2), 2, "contiguous"), torch.float32,
         1.25, 3.5),
        ("few_bit", ("gelu", "q8", 64), torch.float32, 2.25, 4.5),
        # Input, a quarter as many outputs, and 2 or 4 bits of each.
        ("pool", (HALVED, 2, "contiguous"), torch.float32, 1 + 0.25 + 0.25 * 2 / 32, 2.53125),
        ("pool", (STEM, 1, "contiguous"), torch.bfloat16, 1 + 0.25 + 0.25 * 4 / 16, 2.625),
        ("images", (1, "contiguous", "contiguous"), torch.float32, 1.25, 1.25),
    ],
)  # fmt: skip
def test_least_bytes(
    name: str, arguments: tuple[Any, ...], dtype: torch.dtype, forward: float, both: float
) -> None:
    bench = family(name)
    make = bench._contest if name == "depthwise" else bench.contest
    made = make(Work("cpu", dtype), *arguments)
    size = made.source.nbytes
    assert (made.bytes("forward") / size, made.bytes(BOTH) / size) == (forward, both)


@pytest.mark.parametrize("name", QUICK_OPS)
def test_rows(name: str) -> None:
    bench = family(name)
    options = Options(quick=True, compiled=False, ops=QUICK_OPS[name])
    for case in bench.select(options):
        row = measured(bench, case)
        assert (row.op, row["pass"], row.dtype, row.layout) == (
            *(case.label or case.op, case.part, "float32", case.layout),
        )
        assert row.get("shape", [row.numel]) == [*case.shape]
        made = contest_of(case.contest, case.arguments, Work("cpu", case.dtype))
        assert row["bytes"] == made.bytes(case.part)
        assert row["gb_per_s"][OURS] == row["bytes"] / row.ns[OURS]
        copy = 2 * 4 * row.numel / row.ns["copy_fresh"]
        assert row["percent_of_copy"] == pytest.approx(100 * row["gb_per_s"][OURS] / copy)
        rivals = set(made.functions) - {OURS}
        assert rivals >= {EAGER}
        assert set(row.ratio) == rivals
        assert row.get("kept", None) == KEPT.get(row.op)
    contest_of.cache_clear()
