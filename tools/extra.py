"""Prints the requirements of an extra of pyproject.toml: `python tools/extra.py docs`.

`pip install ".[docs]"` would build the package, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(extra: str) -> list[str]:
    # tomllib came with Python 3.11, and 3.10 is supported.
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    line = re.search(rf"^{extra} = \[(.*?)\]$", text, re.M | re.S)
    if line is None:
        raise SystemExit(f"pyproject.toml has no extra {extra}")
    return re.findall(r'"([^"]+)"', line[1])


if __name__ == "__main__":
    print(*requirements(sys.argv[1]))
