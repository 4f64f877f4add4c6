"""The source of a rewritten forward, from its graph, and what the names in it stand for."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx, nn

from .._graph.functions import codes_of, resolved_or_none
from .._graph.modules import attribute_of
from .._graph.tracer import DECISION

_SPECIAL = {"NoneType": "types:NoneType", "device": "torch:device"}
_LINE = re.compile(r"(.*?)(?:;  ((?:\w+ = )+)None)?")  # a call, and the values that it frees
# Code, what its names stand for, and why it cannot be used ("" if it can).
Source = tuple[str, dict[str, str], str]


def copied(original: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    output = graph.graph_copy(original, new)
    graph.output(output)
    for node in graph.nodes:
        node.type = None
    return graph, new


def source_of(module: nn.Module, graph: fx.Graph) -> tuple[str, dict[str, str], str]:
    """Code of a graph, what its names stand for, and why it cannot be used ('' if it can)."""
    for node in graph.nodes:
        if node.op == "get_attr" and attribute_of(module, str(node.target)) is None:
            return "", {}, "its forward makes tensors"
    code = graph.python_code("self")
    used = {n for c in codes_of(compile(code.src, "forward", "exec")) for n in c.co_names}
    imports = {}
    for name, value in code.globals.items():
        if name in used:
            imports[name] = _path(name, value)
            if not imports[name]:
                return "", {}, f"its forward calls {name}, which cannot be imported"
    return code.src, imports, ""


_BY_TRAINING = """
def forward(self, *args, **kwargs):
    way = _training if self.training else _evaluation
    return way(self, *args, **kwargs)
"""


def joined(training: Source, evaluation: Source) -> Source:
    """One forward of two."""
    sources = [
        source.replace("def forward(", f"def {name}(", 1)
        for (source, _, _), name in ((training, "_training"), (evaluation, "_evaluation"))
    ]
    return "\n".join((*sources, _BY_TRAINING)), training[1] | evaluation[1], ""


def number_names(graph: fx.Graph) -> None:
    """Names values by their places: calls that begin two ways alike get the same names."""
    arguments = [node.name for node in graph.nodes if node.op == "placeholder"]
    stem = "value"
    while any(name.startswith(stem) for name in arguments):
        stem += "s"
    for number, node in enumerate(graph.nodes):
        if node.op != "placeholder":
            node.name = f"{stem}_{number}"


class Disagreement(Exception):
    """Two ways through a forward do not begin with the same calls."""


class _Line(NamedTuple):
    text: str
    deleted: frozenset[str]  # names that are set to None, so that their tensors are freed


def woven(ways: Mapping[tuple[bool, ...], tuple[fx.Graph, Source]]) -> Source:
    """One forward of those that stand for the answers at its decisions.

    Raises:
        Disagreement: what they do before a decision differs.
    """
    bodies: dict[tuple[bool, ...], list[list[_Line]]] = {}
    head, imports = "", dict[str, str]()
    for answers, (graph, (source, names, _)) in ways.items():
        before, _, body = source.partition("def forward(")
        signature, _, body = body.partition(":\n")
        head = f"{before}def forward({signature}:\n"
        bodies[answers] = _segments(graph, body.rstrip().splitlines())
        imports |= names
    return head + "\n".join(_branches(bodies, 0, {})) + "\n", imports, ""


def _segments(graph: fx.Graph, lines: list[str]) -> list[list[_Line]]:
    """The lines of a way, cut after each decision."""
    decisions = [node for node in graph.nodes if node.target is DECISION]
    asked = {f"{node.name} =": node.args[0] for node in decisions}
    segments: list[list[_Line]] = [[]]
    for line in filter(str.strip, lines):
        text, names = _LINE.fullmatch(line).groups("")  # type: ignore[union-attr]
        deleted = frozenset(re.findall(r"\w+", names))
        value = next((v for start, v in asked.items() if text.strip().startswith(start)), None)
        if value is None:
            segments[-1].append(_Line(text, deleted))
        else:
            deleted -= {text.split()[0]}
            segments[-1].append(_Line(f"    if {value}:", deleted))
            segments.append([])
    return segments


def _branches(
    ways: dict[tuple[bool, ...], list[list[_Line]]],
    depth: int,
    unused: dict[tuple[bool, ...], frozenset[str]],
) -> Iterator[str]:
    """The lines of all ways that begin with the same answers, from decision `depth` on. `unused`:
    what each way has no more use for, and another may have."""
    indent = "    " * depth
    first = next(iter(ways))
    common = frozenset.intersection(*(unused.get(answers, frozenset()) for answers in ways))
    if common:
        yield f"{indent}    {' = '.join(sorted(common))} = None"
    unused = {answers: unused.get(answers, frozenset()) - common for answers in ways}
    segments = [body[depth] for body in ways.values()]
    if len({tuple(line.text for line in segment) for segment in segments}) > 1:
        raise Disagreement
    for lines in zip(*segments, strict=True):
        common = frozenset.intersection(*(line.deleted for line in lines))
        for answers, line in zip(ways, lines):
            unused[answers] |= line.deleted - common
        deleted = f";  {' = '.join(sorted(common))} = None" if common else ""
        is_decision = len(first) > depth and lines[0] is ways[first][depth][-1]
        if is_decision:
            for answers in ways:
                unused[answers] |= common
            deleted = ""
        yield f"{indent}{lines[0].text}{deleted}"
    if len(first) == depth:
        return
    for answer in (True, False):
        if not answer:
            yield f"{indent}    else:"
        chosen = {a: body for a, body in ways.items() if a[depth] is answer}
        yield from _branches(chosen, depth + 1, unused)


def _path(name: str, value: Any) -> str:
    """Import path of a value, as "module:qualified.name"; '' if it has none."""
    if isinstance(value, types.ModuleType):
        return f"{value.__name__}:"
    if isinstance(value, float):
        return f"math:{'nan' if math.isnan(value) else 'inf'}"
    path = _SPECIAL.get(name) or (
        f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    )
    # Functions that torch makes within another one, max_pool1d for one, have a name outside, too.
    outer = f"{getattr(value, '__module__', '')}:{getattr(value, '__name__', '')}"
    return next((p for p in (path, outer) if resolved_or_none(p) is value), "")
