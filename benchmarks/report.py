"""Show benchmark results as Markdown: what is slower than a rival, and all rows.

python -m benchmarks.report RESULTS.json [...] [--family NAME] [--svg CHART.svg] [--fail-slower]
python -m benchmarks.report --docs    # writes docs/charts, README's table, docs/benchmarks.md

The documentation site shows all rows on the pages of docs/benchmarks/ (tools/site_pages.py).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.charts import BOTH, charts, chosen, draw, facts, times
from benchmarks.harness.rows import Row, load
from benchmarks.harness.store import FAMILIES
from fusedtrain._text import time_text

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks" / "results"
NOT_STORED = ("-quick", "-some", "-user")  # results of runs that the docs do not show
COMMAND = "python -m benchmarks.report"
BEGIN, END = f"<!-- generated: {COMMAND} --docs -->", "<!-- end -->"
# The line of a page of docs/benchmarks/ in whose place the site has the family's rows.
ROWS = re.compile(r"^All rows: .* `" + re.escape(COMMAND) + r" .* --family (\w+)`\.$", re.M)
# Families of ops on tensors: eager torch alone must not be faster. Below LARGE a call's fixed cost
# decides: the target there is in microseconds, not percent.
OPS = ("activations", "batch_norm", "chains", "depthwise", "few_bit", "images", "pool")
LARGE = 2**20
ORDER = ("no gradients", "forward", BOTH, "backward", "step", "check", "clip", "ema", "zero",
         "train", "tune", "inference")  # fmt: skip
LEGEND = (
    "A rival's column has its time, that time / fusedtrain's (the median over rounds that time "
    "both; above 1 fusedtrain is faster), and the ratio's 99 % interval. GB/s: of the bytes that "
    "the row must move at least; %: of `x.clone()`, and of a copy into memory that exists, in the "
    "same rounds. host: the same call on one element a tensor. launches: kernels on CUDA, "
    "operators on a CPU. In brackets: the rivals. \\*: the machine was busy, do not quote the row."
)


class Limits(NamedTuple):
    """How much slower than a rival a row may be."""

    tolerance: float = 0.05
    overhead_us: float = 5.0  # a call of a small op on the CPU


LIMITS = Limits()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files of rows")
    parser.add_argument("--docs", action="store_true", help="write what the docs show")
    parser.add_argument("--family", action="append", help="only this one (repeatable)")
    parser.add_argument("--svg", type=Path, help="draw the times into this file")
    parser.add_argument("--tolerance", type=float, default=0.05, help="slower than this is flagged")
    parser.add_argument("--overhead-us", type=float, default=5.0, help="CPU, below 2^20: let pass")
    parser.add_argument("--fail-slower", action="store_true", help="exit 1 if a row is flagged")
    options = parser.parse_args(arguments)
    if options.docs == bool(options.results):
        parser.error("either --docs, which takes the stored results, or files of results")
    if options.docs:
        for path, text in docs().items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
        return 0
    parts = {
        family: rows
        for family, rows in read(options.results).items()
        if family in (options.family or FAMILIES)
    }
    if not parts:
        print(f"no benchmark rows in {', '.join(map(str, options.results))}", file=sys.stderr)
        return 2
    limits = Limits(options.tolerance, options.overhead_us)
    for rows in parts.values():
        print(f"{summary(rows, limits)}\n\n{table(rows)}\n")
    print(LEGEND)
    if options.svg:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        panels = [times(f"{family}: {machine}", [*rows]) for family, of_family in parts.items()
                  for machine, rows in groupby(of_family, lambda row: row.machine)]  # fmt: skip
        options.svg.write_text(draw([p for p in panels if p.groups]), encoding="utf-8")
        print(f"chart: {options.svg}", file=sys.stderr)
    slower = any(loses_to(row, limits) for rows in parts.values() for row in rows)
    return int(options.fail_slower and slower)


def read(results: Sequence[Path]) -> dict[str, list[Row]]:
    """The rows of each family that has some, in a readable order."""

    def place(row: Row) -> Any:
        step = row.get("job", row.get("pass", ""))
        number = ORDER.index(step) if step in ORDER else len(ORDER)
        return row.family, row.machine, row.model, row.dtype, row.numel, row.op, row.layout, number

    rows = sorted(load(results), key=place)
    return {family: [*members] for family, members in groupby(rows, lambda row: row.family)}


def stored() -> dict[str, list[Row]]:
    """The rows that the docs show."""
    return read([path for path in STORED.glob("*.json") if not path.stem.endswith(NOT_STORED)])


# --- what is slower ---


def loses_to(row: Row, limits: Limits = LIMITS) -> str | None:
    """The rival, if it is surely faster by more than the row may be slower."""
    tolerance, rivals = limits.tolerance, [*row.ratio]
    if row.family in OPS:
        rivals = ["eager"]
    elif row.family == "memory":  # recomputing takes time by design
        tolerance, rivals = 0.1, ["store"]
    elif row.family == "apex":
        rivals = [who for who in rivals if who != "max_grad_norm"]
    rivals = [who for who in rivals if who in row.ratio]
    rival = min(rivals, key=row.ratio.__getitem__, default=None)
    share = row.get("at_most", 1.0)
    if rival is None or row.ratio[rival] * share * (1 + tolerance) >= 1:
        return None
    if row.ratio_interval[rival][1] * share >= 1 and row.family != "memory":
        return None
    more_us = (row.ns["fusedtrain"] - row.ns[rival]) / 1e3
    small = row.family in OPS and row.device_type == "cpu" and row.numel < LARGE
    return None if small and more_us <= limits.overhead_us else rival


def rivals_of(row: Row) -> list[str]:
    """Rivals with a ratio, in the order of their times in the JSON."""
    return [who for who in row.ns if who in row.ratio]


def name_of(row: Row) -> str:
    """The row in tables and summaries."""
    return ", ".join(filter(None, facts(row)[:-1]))


def summary(rows: Sequence[Row], limits: Limits = LIMITS) -> str:
    """Counts, geometric means, and the rows that are slower than they may be."""
    lines = []
    for machine, members in groupby(rows, lambda row: row.machine):
        of_machine = [*members]
        noisy = sum(row.noisy for row in of_machine)
        lines.append(f"{rows[0].family}, {machine}: {len(of_machine)} rows, {noisy} noisy")
        ratios: dict[str, list[float]] = {}
        for row in of_machine:
            if row.numel >= LARGE or not row.numel:
                for who in rivals_of(row):
                    ratios.setdefault(who, []).append(row.ratio[who])
        lines += [
            f"  vs {who}{' at 2^20 and above' * (rows[0].numel > 0)}: {geometric_mean(values):.2f}x"
            f" (geometric mean of {len(values)}), from {min(values):.2f}x to {max(values):.2f}x"
            for who, values in ratios.items()
        ]
        shares = [row["at_most"] * min(row.ratio.values(), default=0) for row in of_machine
                  if "at_most" in row.extra]  # fmt: skip
        met = sum(share >= 1 for share in shares)
        lines += [f"  targets met: {met} of {len(shares)}"] * bool(shares)
    slower = [(row, rival) for row in rows if (rival := loses_to(row, limits))]
    lines.append(f"Slower than a rival beyond noise (> {limits.tolerance:.0%}): {len(slower)} rows")
    lines += [
        f"  {name_of(row)}: {row.ratio[rival]:.2f}x {rival}, "
        f"{time_text(row.ns['fusedtrain'] / 1e9)} against {time_text(row.ns[rival] / 1e9)}"
        f"{' (noisy)' * row.noisy}"
        for row, rival in slower
    ]
    return "\n".join(lines)


# --- tables ---

# Columns of numbers that each contestant has: in a row's JSON, heading, text of a number.
EACH: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("kept", "kept", lambda size: f"{size / 1e6:.4g} MB" if size > 1e3 else f"{size:.3g} B"),
    ("saved", "kept", lambda size: f"{size / 1e6:.4g} MB"),
    ("peak", "peak", lambda size: f"{size / 1e6:.4g} MB"),
    ("fits", "largest batch", "{:.0f}".format),
    ("host_ns", "host", lambda ns: time_text(ns / 1e9)),
    ("counts", "launches", "{:.0f}".format),
    ("graph_ns", "in a CUDA graph", lambda ns: time_text(ns / 1e9)),
)


def cells(row: Row) -> dict[str, str]:
    """The cells of a row by their columns."""
    cell = {"row": name_of(row)}
    cell["fusedtrain"] = time_text(row.ns["fusedtrain"] / 1e9) + " \\*" * row.noisy
    for who in rivals_of(row):
        ratio = "{:.2f}x ({:.2f}-{:.2f})".format(row.ratio[who], *row.ratio_interval[who])
        cell[who] = f"{time_text(row.ns[who] / 1e9)}, {ratio}"
    if "gb_per_s" in row.extra:
        names = ("percent_of_copy", "percent_of_preallocated_copy")
        percent = ", ".join(f"{row[name]:.0f} %" for name in names if name in row.extra)
        cell["GB/s"] = f"{row['gb_per_s']['fusedtrain']:.1f} ({percent})"
        cell["B/element"] = f"{row['bytes'] / row.numel:.3g}"
    for name, heading, form in EACH:
        values = row.get(name, {})
        if "fusedtrain" in values:
            rivals = [f"{w} {form(v)}" for w, v in values.items() if w in row.ratio]
            cell[heading] = f"{form(values['fusedtrain'])} ({', '.join(rivals)})"
    if "at_most" in row.extra:
        cell["at most, of the rival"] = f"{row['at_most']:.2f}x"
    return cell | ({"what changed": row["note"]} if row.get("note", "") else {})


def table(rows: Sequence[Row]) -> str:
    """A Markdown table for each machine, without the columns that none of its rows has."""
    texts = []
    for machine, of_machine in groupby(rows, lambda row: row.machine):
        members = [*of_machine]
        lines = [cells(row) for row in members]
        rivals = [who for row in members for who in rivals_of(row)]
        columns = [*dict.fromkeys(["row", "fusedtrain", *rivals, *(n for c in lines for n in c)])]
        texts += [f"{rows[0].family}, {machine}", ""]
        texts += [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
        texts += [f"| {' | '.join(line.get(name, '') for name in columns)} |" for line in lines]
        texts.append("")
    return "\n".join(texts).strip()


# --- the docs ---


def with_rows(text: str) -> str:
    """A page of docs/benchmarks/ as the site shows it: with all rows of its families.

    Raises:
        ValueError: the page names a family without stored rows.
    """
    parts = stored() if ROWS.search(text) else {}

    def section(place: re.Match[str]) -> str:
        if place[1] not in parts:
            raise ValueError(f"no stored rows of {place[1]}")
        return f"## All rows\n\n{table(parts[place[1]])}\n\n{LEGEND}"

    return ROWS.sub(section, text)


def docs() -> dict[Path, str]:
    """Files that --docs writes, each with its text."""
    parts, folder = stored(), ROOT / "docs"
    files = {folder / "charts" / f"{n}.svg": draw(p) for n, p in charts(parts).items()}
    return files | texts(parts)


def texts(parts: Mapping[str, Sequence[Row]]) -> dict[Path, str]:
    """README with its table, and docs/benchmarks.md with what is slower."""
    slower = "\n\n".join(map(summary, parts.values()))
    made = {
        ROOT / "README.md": headlines(parts),
        ROOT / "docs" / "benchmarks.md": f"```text\n{slower}\n```",
    }
    return {p: replace_generated(p.read_text(encoding="utf-8"), t) for p, t in made.items()}


def replace_generated(text: str, fresh: str) -> str:
    """The text with another one between its two marks."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"there are no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{fresh}\n{END}{after}"


# --- README's rows: words, family, fields of the only row, what is compared in place of time ---

EPYC: dict[str, object] = {"device": "AMD EPYC", "dtype": "float32"}
BN: dict[str, object] = {
    "op": "bn_silu",
    "layout": "contiguous",
    "shape": [32, 96, 56, 56],
    "model": "",
    "pass": BOTH,
}
STEPS = (
    ("EfficientNet-B0", "efficientnet_b0", "contiguous"),
    ("EfficientNet-B0", "efficientnet_b0", "channels_last"),
)
GPU: dict[str, object] = {
    "device": "NVIDIA H200",
    "dtype": "bfloat16 AMP",
    "job": "train",
    "batch": 128,
}
HEADLINES: tuple[tuple[str, str, dict[str, object], str], ...] = (
    ("EfficientNet-B0, `memory=\"recompute\"`: largest batch in the memory of eager's", "memory",
     {**EPYC, "model": "efficientnet_b0"}, "fits"),
    ("AdamW step with inf check and clipping, ResNet-50's parameters", "amp_step",
     {**EPYC, "model": "resnet50", "op": "adamw", "job": "clip"}, ""),
    ("batch norm + SiLU, [32, 96, 56, 56], forward and backward", "batch_norm", EPYC | BN, ""),
    ("Mish, 2^23 elements, forward and backward", "activations",
     {**EPYC, "op": "mish", "numel": 2**23, "pass": BOTH}, ""),
    *((f"a whole training step, {name}, {layout}", "conv_bn",
       {**EPYC, "model": model, "job": "train", "layout": layout}, "")
      for name, model, layout in STEPS),
    ("bfloat16 autocast: a step of a small GPT with dropout", "transformers",
     {**EPYC, "model": "gpt", "dtype": "bfloat16 AMP"}, ""),
    *((f"bfloat16 autocast, channels_last, batch 128: a step of {name} {how}", "conv_bn",
       {**GPU, "model": model}, field)
      for name, model in (("EfficientNet-B0", "efficientnet_b0"), ("ResNet-50", "resnet50"))
      for how, field in (("as a CUDA graph", "graph_ns"), ("in a loop", ""))),
)  # fmt: skip


def headlines(parts: Mapping[str, Sequence[Row]]) -> str:
    """README's table."""
    lines = [
        "| float32, or as said | fusedtrain | rival | gain (99 % interval) | measured |",
        "|---|---:|---:|---:|---|",
    ]
    for words, family, fields, field in HEADLINES:
        rows = chosen(parts[family], **fields)
        if len(rows) != 1:
            raise ValueError(f"{len(rows)} rows, not 1: {words}")
        row, rival = rows[0], "fused" if family == "amp_step" else "eager"
        ours, theirs = ((row[field] if field else row.ns)[who] for who in ("fusedtrain", rival))
        gain = f"{theirs / ours:.2f}x" if field != "fits" else f"{ours / theirs:.2f}x"
        if not field:
            gain = "{:.2f}x ({:.2f}-{:.2f})".format(row.ratio[rival], *row.ratio_interval[rival])
        values = [f"{n} images" if field == "fits" else time_text(n / 1e9) for n in (ours, theirs)]
        who = "torch, `fused=True`" if rival == "fused" else "eager torch"
        where = f"{row.device}, {row.date[:10]}"
        lines.append(f"| {words} | {values[0]} | {values[1]}, {who} | {gain} | {where} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
