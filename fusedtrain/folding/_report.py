"""The report of `fold_conv_bn`, `fold_frozen_norms` and `drop_redundant_bias` on a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from .._graph.modules import scripted_parts
from .._graph.report import Unchanged, shown, unchanged_lines
from .._text import counted

_SCRIPTED = "it is scripted"


class Folded(NamedTuple):
    """One convolution that took over work: the names and types of it and of what it took."""

    conv: str
    conv_type: str
    other: str
    other_type: str


@dataclass(repr=False)
class FoldReport:
    """Norms that were folded, and those that were left and why: print it, or read its fields.

    `folded` has an entry for each pair of a convolution and a norm, `fused` for each activation (or
    residual addition and activation) that went into a convolution, `left` for each norm that stayed
    as it was, and for each scripted part. `error` is the largest difference of outputs on the
    example, relative to the largest magnitude of each output; None where none was given. The length
    is the number of pairs.

    >>> import fusedtrain, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> print(fusedtrain.fold_conv_bn(model)[1])
    folded 1 norm
      1 x Conv2d + BatchNorm2d
    """

    verb: str = "folded"
    folded: list[Folded] = field(default_factory=list)
    fused: list[Folded] = field(default_factory=list)
    left: list[Unchanged] = field(default_factory=list)
    error: float | None = None

    def __len__(self) -> int:
        return len(self.folded)

    def __repr__(self) -> str:
        counts = f"folded={len(self.folded)}, fused={len(self.fused)}, left={len(self.left)}"
        return f"FoldReport({counts})"

    def __str__(self) -> str:
        lines = [f"{self.verb} {counted(len(self.folded), 'norm')}", *_pairs(self.folded)]
        if self.fused:
            lines += [f"fused {counted(len(self.fused), 'activation')}", *_pairs(self.fused)]
        if self.left:
            scripted = any(entry.reason == _SCRIPTED for entry in self.left)
            lines.append(f"left {counted(len(self.left), 'part' if scripted else 'norm')}")
        lines += unchanged_lines(self.left)
        if self.error is not None:
            lines.append(f"largest relative difference on the example: {self.error:.1e}")
        return "\n".join(lines)


def _pairs(entries: list[Folded]) -> list[str]:
    pairs = Counter((entry.conv_type, entry.other_type) for entry in entries).most_common()
    return [f"  {count} x {conv} + {other}" for (conv, other), count in pairs]


def list_scripted(model: nn.Module, report: FoldReport) -> None:
    """Their norms, if any, are seen by TorchScript alone."""
    report.left += [Unchanged(shown(name), kind, _SCRIPTED) for name, kind in scripted_parts(model)]
