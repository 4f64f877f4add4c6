"""Times, bytes, sizes and counts as text: every report says them alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_TIMES = (("min", 60), ("s", 1), ("ms", 1e-3), ("us", 1e-6))
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def time_text(seconds: float) -> str:
    """Three digits, and a unit that suits."""
    for unit, size in _TIMES:
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def memory_text(size: float) -> str:
    """Bytes, in a unit that suits."""
    if size < 1e4:
        return f"{size:.0f} bytes"
    if size < 1e6:
        return f"{size / 1e3:.3g} kB"
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


FEW_BYTES = 4096  # fewer are perhaps meant as percent, or in another unit


def bytes_in(text: str) -> int | None:
    """The size that ``800MB`` or ``4GiB`` stands for; None where the text is no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmg]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS or ("." in match[1] and not match[2]):
        return None
    return int(float(match[1]) * _UNITS[match[2]])


def size_text(numel: int) -> str:
    """``2^20`` for a power of two."""
    exponent = numel.bit_length() - 1
    return f"2^{exponent}" if numel == 2**exponent else str(numel)


def shape_text(shape: Sequence[int]) -> str:
    """``16x96x56x56``."""
    return "x".join(map(str, shape))


def counted(count: int, noun: str) -> str:
    """The noun in singular or plural, with the count."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def column_lines(rows: Sequence[Sequence[str]], words: Collection[int]) -> list[str]:
    """A line a row. `words` are the columns that begin at the left; the others are numbers."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
