"""The rule for modules whose own class, or forward, is another than the one that has a fused
version."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from .._graph.forward import obstacle_of
from .._graph.modules import is_quantized
from .._graph.report import title


def unlike(module: nn.Module, base: type | None) -> str:
    """Why a module is not what `base` is, its nearest class with a fused version; mostly ''."""
    if is_quantized(module):
        return "quantised"
    if parametrize.is_parametrized(module):
        return "parametrized"
    if base is None:
        return "no fused version"
    return obstacle_of(module) if type(module) is base else f"subclass of {title(base)}"
