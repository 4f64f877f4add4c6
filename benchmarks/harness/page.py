"""docs/benchmarks.md, docs/benchmarks/ and README's rows: prose by hand, tables of the results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.harness.rows import Row
from benchmarks.harness.tables import Limits, Report, summary
from fusedtrain._text import time_text

COMMAND = "python -m benchmarks.report --docs"
BEGIN, END = f"<!-- generated: {COMMAND} -->", "<!-- end -->"
_PLACE = re.compile(r"^\{\{ (\w+)([ \w+]*) \}\}$", re.M)
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Part:
    """A family: how its rows are shown, and the rows."""

    report: Report
    rows: Sequence[Row]


def choose(part: Part, dtypes: Sequence[str], sizes: Sequence[int]) -> list[Row]:
    """The rows of a table, where the family leaves the choice."""
    chosen: dict[str, Sequence[object]] = {"dtype": dtypes, "numel": sizes}
    by = part.report.chosen_by
    return [row for row in part.rows if all(vars(row)[name] in chosen[name] for name in by)]


def render(templates: Mapping[str, str], parts: Mapping[str, Part]) -> dict[str, str]:
    """The pages: each line ``{{ FAMILY DTYPE ... SIZE ... }}`` becomes the family's section.

    Args:
        templates: the text of each page.
        parts: the families that have rows.

    Raises:
        ValueError: the templates name a family that has no rows, or lack one that has some.
    """
    places = {place[1] for text in templates.values() for place in _PLACE.finditer(text)}
    if places != parts.keys():
        difference = ", ".join(sorted(places ^ parts.keys()))
        raise ValueError(f"either the templates or the results lack: {difference}")

    def section(place: re.Match[str]) -> str:
        words = place[2].split()
        sizes = [int(word) for word in words if _NUMBER.fullmatch(word)]
        dtypes = [word for word in words if not _NUMBER.fullmatch(word)] or ["float32"]
        return _section(parts[place[1]], dtypes, sizes)

    return {name: _PLACE.sub(section, text) for name, text in templates.items()}


def _section(part: Part, dtypes: Sequence[str], sizes: Sequence[int]) -> str:
    """The rows that are slower than a rival, tables, legend."""
    report = part.report
    rows = choose(part, dtypes, sizes)
    slower = sum(report.loses_to(row, Limits()) is not None for row in part.rows)
    return "\n\n".join(
        [
            f"<details><summary>All {len(part.rows)} rows in numbers, and the {slower} that are "
            "slower than a rival</summary>",
            f"```text\n{summary(report, part.rows, Limits())}\n```",
            "</details>",
            report.markdown(report, rows).strip(),
            report.legend(rows),
        ]
    )


# --- README's rows ---


class Headline(NamedTuple):
    """A row of README's table.

    Args:
        what: was measured.
        family: that has the row.
        fields: by which the row is found; there must be one row.
        rival: whom it is compared with.
        counts: what is compared instead of time, and its unit ("ns": less is better).
    """

    what: str
    family: str
    fields: Mapping[str, object]
    rival: str
    counts: tuple[str, str] = ("", "")


_EPYC = {"device": "AMD EPYC", "dtype": "float32"}
_H200 = {"device": "NVIDIA H200", "dtype": "bfloat16 AMP", "job": "train", "batch": 128}
_BOTH = {"pass": "forward+backward"}
HEADLINES = (
    Headline(
        'EfficientNet-B0, `memory="recompute"`: largest batch in the memory of eager\'s',
        "memory", {**_EPYC, "model": "efficientnet_b0"}, "eager", ("fits", "images"),
    ),
    Headline(
        "AdamW step with inf check and clipping, ResNet-50's parameters", "amp_step",
        {**_EPYC, "model": "resnet50", "op": "adamw", "job": "clip"}, "fused",
    ),
    Headline(
        "batch norm + SiLU, [32, 96, 56, 56], forward and backward", "batch_norm",
        {**_EPYC, **_BOTH, "op": "bn_silu", "layout": "contiguous", "shape": [32, 96, 56, 56],
         "model": ""}, "eager",
    ),
    Headline(
        "Mish, 2^23 elements, forward and backward", "activations",
        {**_EPYC, **_BOTH, "op": "mish", "numel": 2**23}, "eager",
    ),
    *(
        Headline(
            f"a whole training step, {name}, {layout}", "conv_bn",
            {**_EPYC, "model": model, "job": "train", "layout": layout}, "eager",
        )
        for name, model in (("EfficientNet-B0", "efficientnet_b0"), ("ConvNeXt-T", "convnext_tiny"))
        for layout in ("contiguous", "channels_last")
        if (model, layout) != ("convnext_tiny", "contiguous")
    ),
    *(
        Headline(f"bfloat16 autocast, channels_last, batch 128: a step of {name}{how}", "conv_bn",
                 {**_H200, "model": model}, "eager", counts)
        for name, model in (("EfficientNet-B0", "efficientnet_b0"), ("ResNet-50", "resnet50"))
        for how, counts in ((" as a CUDA graph", ("graph_ns", "ns")), (" in a loop", ("", "")))
    ),
)  # fmt: skip
_RIVALS = {"eager": "eager torch", "fused": "torch, `fused=True`"}


def headlines(parts: Mapping[str, Part]) -> str:
    """README's table."""
    lines = [
        "| float32, or as said | fusedtrain | rival | gain (99 % interval) | measured |",
        "|---|---:|---:|---:|---|",
    ]
    for headline in HEADLINES:
        row = _only_row(headline, parts[headline.family].rows)
        what, unit = headline.counts
        if what:
            ours, theirs = row[what]["fusedtrain"], row[what][headline.rival]
            gain, cells = f"{ours / theirs:.2f}x", [f"{count} {unit}" for count in (ours, theirs)]
            if unit == "ns":
                gain = f"{theirs / ours:.2f}x"
                cells = [time_text(ns / 1e9) for ns in (ours, theirs)]
        else:
            low, high = row.ratio_interval[headline.rival]
            gain = f"{row.ratio[headline.rival]:.2f}x ({low:.2f}-{high:.2f})"
            cells = [time_text(row.ns[who] / 1e9) for who in ("fusedtrain", headline.rival)]
        rival = f"{cells[1]}, {_RIVALS[headline.rival]}"
        where = f"{row.device}, {row.date[:10]}"
        lines.append(f"| {headline.what} | {cells[0]} | {rival} | {gain} | {where} |")
    return "\n".join(lines)


def _only_row(headline: Headline, rows: Sequence[Row]) -> Row:
    def value(row: Row, name: str) -> object:
        return vars(row)[name] if name in vars(row) else row.get(name, None)

    matching = [r for r in rows if all(value(r, n) == v for n, v in headline.fields.items())]
    if len(matching) != 1:
        raise ValueError(f"{len(matching)} rows, not 1: {headline.what}")
    return matching[0]


def replace_generated(text: str, table: str) -> str:
    """The text with the table between its two marks."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"there are no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
