"""The source of a rewritten forward, from its graph, and what the names in it stand for."""

from __future__ import annotations

import math
import types
from typing import Any

from torch import fx, nn

from .._graph.forward import resolve
from .._graph.modules import attribute_of

_SPECIAL = {"NoneType": "types:NoneType", "device": "torch:device"}
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
    used = _names(compile(code.src, "forward", "exec"))
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


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _path(name: str, value: Any) -> str:
    """Where a value can be imported from, as "module:qualified.name"."""
    if isinstance(value, types.ModuleType):
        return f"{value.__name__}:"
    if isinstance(value, float):
        return f"math:{'nan' if math.isnan(value) else 'inf'}"
    path = _SPECIAL.get(name) or (
        f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    )
    try:
        return path if resolve(path) is value else ""
    except (ImportError, AttributeError, ValueError):
        return ""
