"""Shapes in real networks: of parameters, in their order, and of batch norms, as they run.

The table, `shapes.json`, is that of torchvision for images of 224 x 224 pixels and 1000 classes, so
that a benchmark needs no torchvision; a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

Shape = tuple[int, ...]


class Layer(NamedTuple):
    """A batch norm: the op (in `advisor.bench.norms.OPS`), and the input without the batch."""

    op: str
    channels: int
    height: int
    width: int


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MODELS = tuple(_TABLE["parameters"])
NORM_NETWORKS = tuple(_TABLE["norms"])


def shapes(model: str) -> list[Shape]:
    """Shapes of the parameters of one of ``MODELS``."""
    return [tuple(shape) for shape in _TABLE["parameters"][model]]


def count(of: Sequence[Shape]) -> int:
    """Number of all elements."""
    return sum(map(prod, of))


def norms(network: str) -> list[Layer]:
    """Every batch norm of one of ``NORM_NETWORKS``."""
    return [Layer(*layer) for layer in _TABLE["norms"][network]]


def distinct_norms(network: str) -> list[Layer]:
    """Each kind of layer once."""
    return list(dict.fromkeys(norms(network)))
