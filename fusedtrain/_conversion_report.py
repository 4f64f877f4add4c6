"""What `fusedtrain.convert` tells about a model it went through."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

_NAMES_SHOWN = 4  # in one line


class Converted(NamedTuple):
    """One module which `convert` changed; a shared one goes by its first name."""

    name: str
    source: str
    target: str


class Left(NamedTuple):
    """One activation module which `convert` did not change, and why."""

    name: str
    type: str
    reason: str


@dataclass(repr=False)
class ConversionReport:
    """What `convert` changed and what it left: print it, or read its fields.

    `converted` and `left` have one entry a module, `shared` maps the first name of a converted
    module that sits at several places to all of its names, `already` counts modules that were fused
    before. The length is the number of converted modules.

    >>> import fusedtrain, torch
    >>> print(fusedtrain.convert(torch.nn.Sequential(torch.nn.SiLU(), torch.nn.RReLU())))
    converted 1 module
      1 x torch.nn.SiLU -> fusedtrain.nn.SiLU
    left 1 module
      1 x torch.nn.RReLU: no fused version (1)
    """

    converted: list[Converted] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    shared: dict[str, list[str]] = field(default_factory=dict)
    already: int = 0

    def __len__(self) -> int:
        return len(self.converted)

    def __repr__(self) -> str:
        counts = f"converted={len(self.converted)}, left={len(self.left)}, already={self.already}"
        return f"ConversionReport({counts})"

    def __str__(self) -> str:
        lines = [f"converted {_modules(len(self.converted))}"]
        pairs = Counter((entry.source, entry.target) for entry in self.converted).most_common()
        digits = max((len(str(count)) for _, count in pairs), default=0)
        width = max((len(source) for (source, _), _ in pairs), default=0)
        for (source, target), count in pairs:
            lines.append(f"  {count:>{digits}} x {source:<{width}} -> {target}")
        for names in self.shared.values():
            lines.append(f"  shared, counted once: {' = '.join(map(shown, names))}")
        if self.already:
            lines.append(f"already fused: {_modules(self.already)}")
        groups: dict[tuple[str, str], list[str]] = {}
        for entry in self.left:
            groups.setdefault((entry.type, entry.reason), []).append(shown(entry.name))
        if groups:
            lines.append(f"left {_modules(len(self.left))}")
        for (kind, reason), names in groups.items():
            more = len(names) - _NAMES_SHOWN
            places = ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"  {len(names)} x {kind}: {reason} ({places})")
        if lines == ["converted 0 modules"]:
            lines.append("  no activation modules found (calls such as F.relu are not modules)")
        return "\n".join(lines)


def shown(name: str) -> str:
    """A module's name as a reader may see it: the root of a model has none."""
    return name or "(the model itself)"


def _modules(count: int) -> str:
    return f"{count} module" if count == 1 else f"{count} modules"
