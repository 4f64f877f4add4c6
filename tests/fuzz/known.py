"""Defects that are known and not mended yet: programs that show one are set aside.

Each line has the letter of the defect and words that are in the programs. Take the line out with
the mend.
"""

from __future__ import annotations

_GATED = ("gated", "glu", "swiglu", "geglu", "reglu", "bilinear_glu")

KNOWN: list[tuple[str, tuple[str, ...]]] = [
    *(("i", ("is_grads_batched", f"F.{name}(")) for name in _GATED),
    ("i", ("is_grads_batched", "fusedtrain.nn.", "GLU(")),
    ("d", ("fusedtrain.optim.LAMB(", "give({")),
    ("d", ("fusedtrain.optim.LAMB(", "give(range")),
    ("d", ("fusedtrain.optim.LAMB(", "give_scaled({")),
    ("d", ("fusedtrain.optim.LAMB(", "other([")),
    # fold_conv_bn puts Identity in the place of a norm whose buffers forward reads: AttributeError.
    ("b", ("fusedtrain.fold_conv_bn(", ".running_var[")),
    ("o", ("fusedtrain.convert(net)\nfusedtrain.convert(twin, memory='recompute')",)),
]


def letter_of(source: str) -> str:
    """Of the first known defect that a program may show; mostly ""."""
    for letter, words in KNOWN:
        if all(word in source for word in words):
            return letter
    return ""
