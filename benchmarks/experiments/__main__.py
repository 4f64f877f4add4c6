"""``python -m benchmarks.experiments``."""

from __future__ import annotations

import sys

from benchmarks.experiments.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
