"""``python -m fusedtrain.tuning TASK``: the process of a trial (`_process.py` starts it)."""

from __future__ import annotations

import sys

from ._worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
