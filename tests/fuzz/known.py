"""Known differences and defects that are not mended yet: programs that show one are set aside.

Each line has a name and words that are in the programs. The mend of a defect takes its line out.
"""

from __future__ import annotations

KNOWN: list[tuple[str, tuple[str, ...]]] = [
    # LAMB counts, by decision, steps by parameter, timm's by group: see its docstring.
    ("LAMB", ("fusedtrain.optim.LAMB(", "optimizer.zero_grad(")),
    ("LAMB", ("fusedtrain.optim.LAMB(", "give({")),
    ("LAMB", ("fusedtrain.optim.LAMB(", "give(range")),
    ("LAMB", ("fusedtrain.optim.LAMB(", "give_scaled({")),
    ("LAMB", ("fusedtrain.optim.LAMB(", "other([")),
    # Changes by way of `.data` are not noticed: docs/recompute.md, "What to know".
    ("a change by way of .data", ("memory='recompute'", ".data.mul_(")),
    ("a change by way of .data", ("plan_memory(", ".data.mul_(")),
]


def known_in(source: str) -> str:
    """Name of the first known difference that a program may show; mostly ""."""
    for name, words in KNOWN:
        if all(word in source for word in words):
            return name
    return ""
