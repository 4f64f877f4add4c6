"""``bench``: fusedtrain's kernels against eager torch, timed in turns, gated by float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import click
import torch

from .. import __version__, backend_info
from .._text import memory_text, time_text
from ..advisor._memory import machine_memory
from ..advisor.bench import (
    COPY,
    EAGER,
    FAMILIES,
    FRESH_COPY,
    OURS,
    Entry,
    Options,
    Result,
    measure,
    peak_operations,
)
from ..advisor.bench.clock import NORMAL, QUICK, device_name
from ._exit import Exit
from ._output import Column, Outputs, Report, Table, output_options, progress, today
from ._roofline import roofline

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = 0.05  # of --fail-slower
LEGEND = (
    "vs X: X's time / fusedtrain's, the median over rounds in which both took a turn; above 1 "
    "fusedtrain is faster. 99 %: the interval of vs eager.",
    "GB/s: the bytes that the job must read and write at least / time. % copy: of what a copy of "
    "that size reached in the same rounds (x.clone(); in amp-step, which allocates nothing, "
    "out.copy_(x)). GFLOP/s: eager torch's arithmetic / time; % matmul: of a matrix product's.",
)


class Size(click.ParamType[int]):
    """A number of elements: 4194304, 2^22, 4M, 64k."""

    name = "size"
    UNITS: Mapping[str, int] = {"k": 2**10, "m": 2**20, "g": 2**30}

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        text = str(value).lower()
        try:
            base, _, power = text.partition("^")
            if power:
                size = int(base) ** int(power)
            else:
                size = int(text.rstrip("kmg")) * self.UNITS.get(text[-1], 1)
        except ValueError:
            self.fail(f"{value} is no number of elements, like 4194304, 2^22 or 4M", param, ctx)
        if size < 1:
            self.fail(f"{value} is not positive", param, ctx)
        return size


@click.command(epilog="Exit codes: 0 done; 1 wrong numbers, or with --fail-slower slower; 2 wrong "
               "usage; 4 stopped early, what was measured is shown.")  # fmt: skip
@click.argument("families", nargs=-1, type=click.Choice([*FAMILIES, "all"]))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda if there]")
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="[default: float16 on cuda]")
@click.option("--size", type=Size(), help="Elements of the largest tensor: 2^22, 4M.")
@click.option("--quick", is_flag=True, help="A few small rows: seconds, to see that it works.")
@click.option("--compile", "compiled", is_flag=True, help="torch.compile takes part (slow).")
@click.option("--threads", type=click.IntRange(1), help="Threads of torch on the CPU.")
@click.option("--fail-slower", is_flag=True, help="Exit 1 if a row is slower than eager by 5 %.")
@output_options
def command(
    families: Sequence[str], device: str | None, dtype: str | None, size: int | None, quick: bool,
    compiled: bool, threads: int | None, fail_slower: bool, outputs: Outputs,
) -> int:  # fmt: skip
    """Times fusedtrain against eager torch, and shows how near each comes to a copy.

    FAMILIES: activations, norm, amp-step, conv, depthwise, chains; all of them by default.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda: torch sees no CUDA device")
    if threads:
        torch.set_num_threads(threads)
    kind = dtype or {"cpu": "float32", "cuda": "float16"}[device]
    there, bytes_each = machine_memory(), DTYPES[kind].itemsize
    if size and device == "cpu" and there and size * bytes_each > there:
        raise click.UsageError(
            f"--size {size}: a tensor takes {memory_text(size * bytes_each)}, and this machine has "
            f"{memory_text(there)}"
        )
    options = Options(device, DTYPES[kind], size or 0, quick, compiled)
    chosen = list(FAMILIES) if not families or "all" in families else list(families)
    results, peak, stopped = _measured(chosen, options)
    report = _report(results, peak, options, kind)
    if stopped:
        report.partial = f"stopped after {len(results)} rows"
    outputs.write(report)
    if stopped:
        return Exit.STOPPED
    slower = fail_slower and any(result.surely_slower(TOLERANCE) for result in results)
    return Exit.FOUND if slower or any(result.wrong for result in results) else Exit.DONE


def _measured(families: Sequence[str], options: Options) -> tuple[list[Result], float, bool]:
    """The rows, the operations per second of a matrix product, and whether it was stopped."""
    effort = QUICK if options.quick else NORMAL
    results: list[Result] = []
    peak = math.nan
    entries: list[Entry] = [entry for name in families for entry in FAMILIES[name](options)]
    with progress("bench", len(entries)) as begins:
        try:
            for entry in entries:
                begins(str(entry))
                results.append(measure(entry, options.device, effort))
            peak = peak_operations(options, effort)
        except KeyboardInterrupt:
            return results, peak, True
    return results, peak, False


# --- the report ---


def _report(results: Sequence[Result], peak: float, options: Options, kind: str) -> Report:
    facts = {
        "device": device_name(options.device),
        "torch": torch.__version__,
        "fusedtrain": f"{__version__}; {_backends()}",
        "dtype": kind,
        "date": today(),
    }
    if options.device == "cpu":
        facts["threads"] = str(torch.get_num_threads())
    bandwidth = max((r.gb_per_s[COPY] for r in results if COPY in r.gb_per_s), default=math.nan)
    if not math.isnan(bandwidth):
        facts["copy"] = f"{bandwidth:.1f} GB/s, the best of all rows, into memory that exists"
    if not math.isnan(peak):
        facts["matrix product"] = f"{peak / 1e9:.4g} GFLOP/s"
    families = list(dict.fromkeys(result.entry.family for result in results))
    tables = [
        _table(name, [r for r in results if r.entry.family == name], peak) for name in families
    ]
    notes = list(LEGEND) if results else []
    for result in results:
        if result.wrong:
            notes.append(f"WRONG, not timed: {result.entry}: {result.wrong}")
        notes += [f"{result.entry}: {w} left out: {why}" for w, why in result.left_out.items()]
    points = [result for result in results if result.operations and not result.wrong]
    return Report(
        "fusedtrain bench",
        {
            "copy_gb_per_s": _number(bandwidth),
            "matmul_operations_per_s": _number(peak),
            "rows": [_json(result) for result in results],
        },
        tables,
        notes,
        facts,
        (lambda: roofline(points, bandwidth, peak, facts["device"])) if points else None,
    )


def _backends() -> str:
    backends = backend_info().backends.items()
    return ", ".join(f"{name} {backend}" for name, backend in backends if backend.loaded)


def _table(family: str, results: Sequence[Result], peak: float) -> Table:
    rivals = list(dict.fromkeys(who for result in results for who in result.ratio))
    layouts = any(result.entry.layout for result in results)
    columns = [Column("op", left=True), Column("part", left=True), Column("size", left=True)]
    columns += [Column("layout", left=True)] * layouts
    computes = family == "conv"  # convolutions wait for arithmetic, all others for memory
    speed = ("GFLOP/s", "% matmul") if computes else ("GB/s", "% copy")
    columns += map(Column, ("time", *speed))
    for rival in rivals:
        columns += [Column(f"vs {rival}"), *[Column("99 %")] * (rival == EAGER)]
    rows = []
    for result in results:
        entry = result.entry
        row = [entry.op, entry.part, entry.size, *[entry.layout] * layouts]
        if result.wrong:
            rows.append([*row, "WRONG", *[""] * (len(columns) - len(row) - 1)])
            continue
        row.append(time_text(result.ns[OURS] / 1e9))
        if computes:
            operations = result.operations / result.ns[OURS]  # 1e9 of them a second
            share = "" if math.isnan(peak) else f"{100e9 * operations / peak:.0f}"
            row += [f"{operations:.4g}", share]
        else:
            row += [f"{result.gb_per_s[OURS]:.1f}", f"{result.percent_of_copy:.0f}"]
        for rival in rivals:
            row.append(f"{result.ratio[rival]:.2f}" if rival in result.ratio else "")
            if rival == EAGER:
                interval = result.ratio_interval.get(rival)
                row.append(f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "")
        rows.append(row)
    return Table(family, columns, rows)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _json(result: Result) -> dict[str, Any]:
    entry = result.entry
    row: dict[str, Any] = {"family": entry.family, "op": entry.op, "part": entry.part}
    row |= {"size": entry.size, "layout": entry.layout or None}
    if result.wrong:
        return {**row, "wrong": result.wrong}
    return {
        **row,
        "ns": {who: ns for who, ns in result.ns.items() if who not in (COPY, FRESH_COPY)},
        "ns_interval": result.interval,
        "ratio": result.ratio,
        "ratio_interval": result.ratio_interval,
        "gb_per_s": result.gb_per_s,
        "percent_of_copy": result.percent_of_copy,
        "bytes": result.bytes,
        "operations": result.operations,
        "rounds": result.rounds,
        "left_out": result.left_out,
    }
