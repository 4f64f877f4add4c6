"""Bar charts as SVG text.

The same numbers give the same bytes everywhere, so a test can tell a stale chart. (A chart of
matplotlib differs with its release and with the fonts of the machine.) A chart has a background of
its own, dark where the reader's system is: it is readable on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.harness.chart import Panel

WIDTH, LABELS, EDGE = 660, 206, 14  # pixels: the chart, the names of groups, its border
BAR, GAP, HEADING, LEGEND, LINE = 14, 11, 24, 22, 17  # heights
_CHARACTER = 0.54  # mean width of a character, of its size
# Fills, on light and on dark.
_FILLS = {
    "eager": ("#b8bec6", "#6b737d"), "fused": ("#b8bec6", "#6b737d"),
    "fusedtrain": ("#1b6ca8", "#4a9edb"), "store": ("#8ec1e8", "#2f6d9e"),
    "here": ("#1b6ca8", "#4a9edb"), "published": ("#b8bec6", "#6b737d"),
    "recompute": ("#1b6ca8", "#4a9edb"), "compile": ("#e8a33d", "#d18f2c"),
    "forward+backward": ("#1b6ca8", "#4a9edb"), "forward": ("#8ec1e8", "#2f6d9e"),
    "backward": ("#cfe3f4", "#274b67"), "Apex's calls": ("#1b6ca8", "#4a9edb"),
    "own step": ("#8ec1e8", "#2f6d9e"), "own, max_grad_norm": ("#cfe3f4", "#274b67"),
}  # fmt: skip
_OTHERS = (("#7a8793", "#9aa7b3"), ("#c9b48a", "#9c8555"), ("#9fc5a4", "#5f8f66"))
NAMES = {
    "compile": "torch.compile", "fused": "torch, fused=True", "eager": "eager torch",
    "store": 'memory="store"', "recompute": 'memory="recompute"',
}  # fmt: skip


def chart(panels: Sequence[Panel], notes: Sequence[str] = ()) -> str:
    """The panels below each other, the notes under them."""
    colors = _colors(panels)
    body: list[str] = []
    top = float(EDGE)
    for panel in panels:
        drawn, top = _panel(panel, top, colors)
        body += drawn
    lines = [line for note in notes for line in _wrapped(note, (WIDTH - 2 * EDGE) / 11)]
    for line in lines:
        body.append(_text(EDGE, top + 12, line, "note"))
        top += LINE - 2
    height = round(top + EDGE)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(_spoken(panels))}">'
    )
    return "\n".join([head, _style(colors), *body, "</svg>\n"])


def _colors(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys(who for panel in panels for who in (*panel.series, *panel.missing))
    others = [who for who in names if who not in _FILLS]
    extra = {who: _OTHERS[number % len(_OTHERS)] for number, who in enumerate(others)}
    return {who: _FILLS.get(who) or extra[who] for who in names}


def _style(colors: dict[str, tuple[str, str]]) -> str:
    """Classes of text and bars: `b0`, `b1` and so on are the fills."""
    fills = [*colors.values()]
    light = "".join(f".b{n}{{fill:{fill}}}" for n, (fill, _) in enumerate(fills))
    dark = "".join(f".b{n}{{fill:{fill}}}" for n, (_, fill) in enumerate(fills))
    return (
        "<style>text{font:13px -apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
        "fill:#1f2328}.title{font-weight:600;font-size:14px}.small,.note{font-size:11px;"
        "fill:#59636e}.value{font-size:12px}.card{fill:#fff;stroke:#d1d9e0}.axis{stroke:#59636e}"
        ".cut{stroke:#fff;stroke-width:1.6;fill:none}"
        f".range{{stroke:#1f2328;stroke-width:1.3}}{light}"
        "@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.small,.note{fill:#9198a1}"
        ".card{fill:#15191f;stroke:#3d444d}.axis{stroke:#9198a1}.range{stroke:#f0f6fc}.cut{stroke:#15191f}"
        f"{dark}}}</style>\n"
        '<rect class="card" x="0.5" y="0.5" width="99.8%" height="99.8%" rx="6"/>'
    )


def _panel(panel: Panel, top: float, colors: dict[str, tuple[str, str]]) -> tuple[list[str], float]:
    """Its elements, and where the next panel begins."""
    body = [_text(EDGE, top + 14, panel.title, "title")] if panel.title else []
    top += HEADING if panel.title else 0
    for line in _wrapped(panel.label, (WIDTH - 2 * EDGE) / 11):
        body.append(_text(EDGE, top + 11, line, "small"))
        top += LINE
    if len(panel.series) + len(panel.missing) > 1:
        legend, top = _legend(panel, top, colors)
        body += legend
    else:
        top += 4
    texts = [
        panel.text(who, group, value)
        for who, values in panel.series.items()
        for group, value in enumerate(values)
        if value is not None
    ]
    left = _labels(panel)
    room = WIDTH - left - EDGE - 12 - max(map(len, texts), default=0) * 12 * _CHARACTER
    scale = room / (_longest(panel) or 1.0)
    if panel.line is not None:
        body.append(_line(left + panel.line * scale, top, _height(panel)))
    for group, name in enumerate(panel.groups):
        there = _bars_of(panel, group)
        height = _group_height(panel, group)
        body += _names(name, top + height / 2)
        bar_top = top + (height - BAR * len(there)) / 2
        for who in there:
            value = panel.series[who][group] or 0.0
            body += _bar(panel, who, group, value * scale, bar_top, scale, [*colors].index(who))
            bar_top += BAR
        top += height + GAP
    return body, top + 4


def _labels(panel: Panel) -> int:
    """Where bars begin: to the right of the names."""
    longest = max((len(name.partition("\n")[0]) for name in panel.groups), default=0)
    return min(max(LABELS, EDGE + 8 + round(longest * 13 * _CHARACTER)), WIDTH // 2)


def _longest(panel: Panel) -> float:
    """The number at the right end: of the longest bar or interval that is not cut."""
    values = [v for values in panel.series.values() for v in values if v is not None]
    ends = [high for of_who in panel.intervals.values() for end in of_who if end for high in end]
    return min(panel.most, max([*values, *ends], default=1.0))


def _bars_of(panel: Panel, group: int) -> list[str]:
    return [who for who, values in panel.series.items() if values[group] is not None]


def _group_height(panel: Panel, group: int) -> int:
    return BAR * max(len(_bars_of(panel, group)), 2 if "\n" in panel.groups[group] else 1)


def _height(panel: Panel) -> int:
    """From the first bar to the last."""
    return sum(_group_height(panel, group) + GAP for group in range(len(panel.groups))) - GAP


def _line(x: float, top: float, height: float) -> str:
    return (
        f'<path class="axis" stroke-dasharray="3 3" d="M{x:.1f} {top - 4:.1f}v{height + 8:.1f}"/>'
    )


def _bar(
    panel: Panel, who: str, group: int, length: float, top: float, scale: float, color: int
) -> list[str]:
    middle, most = top + BAR / 2, _longest(panel) * scale
    cut, length = length > most + 0.01, min(length, most)
    left = _labels(panel)
    body = [
        f'<rect class="b{color}" x="{left}" y="{top + 1:.1f}" width="{max(length, 1):.1f}" '
        f'height="{BAR - 2}"/>'
    ]
    ends = panel.intervals.get(who, [None] * (group + 1))[group]
    if cut:
        way = f"M{left + length - 12:.1f} {top + BAR:.1f}l5 -{BAR}m3 0l-5 {BAR}"
        body.append(f'<path class="cut" d="{way}"/>')
    if ends:
        low, high = (left + min(end * scale, most) for end in ends)
        body.append(
            f'<path class="range" d="M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 3:.1f}'
            f'v6M{high:.1f} {middle - 3:.1f}v6"/>'
        )
        length = max(length, high - left)
    value = panel.series[who][group] or 0.0
    return [*body, _text(left + length + 6, middle + 4, panel.text(who, group, value), "value")]


def _names(name: str, middle: float) -> list[str]:
    first, _, second = name.partition("\n")
    if not second:
        return [_text(EDGE, middle + 4, first)]
    return [_text(EDGE, middle - 2, first), _text(EDGE, middle + 12, second, "small")]


def _legend(
    panel: Panel, top: float, colors: dict[str, tuple[str, str]]
) -> tuple[list[str], float]:
    """Its elements, and where the bars begin."""
    body, left = [], float(EDGE)
    for who in (*panel.series, *panel.missing):
        text = NAMES.get(who, who) + (": " + panel.missing[who] if who in panel.missing else "")
        color, width = [*colors].index(who), 16 + len(text) * 12 * _CHARACTER + 16
        if left > EDGE and left + width > WIDTH:
            left, top = EDGE, top + LEGEND - 4
        body.append(
            f'<rect class="b{color}" x="{left:.1f}" y="{top + 3:.1f}" width="11" height="11"/>'
        )
        body.append(_text(left + 16, top + 12.5, text, "value"))
        left += width
    return body, top + LEGEND


def _text(x: float, y: float, text: str, name: str = "") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{escape(text, quote=False)}</text>'


def _wrapped(text: str, characters: float) -> list[str]:
    """Lines of at most so many characters of size 1."""
    most, lines = characters / _CHARACTER, [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _spoken(panels: Sequence[Panel]) -> str:
    """The chart for readers of screens."""
    parts = []
    for panel in panels:
        for group, name in enumerate(panel.groups):
            values = "; ".join(
                f"{NAMES.get(who, who)} {panel.text(who, group, value)}"
                for who, of_who in panel.series.items()
                if (value := of_who[group]) is not None
            )
            parts.append(f"{name.replace(chr(10), ', ')}: {values}.")
    return " ".join([panels[0].title or panels[0].label, *parts])
