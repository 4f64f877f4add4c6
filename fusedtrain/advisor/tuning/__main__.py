"""The process of a trial (see `_process.py`): ``python -m fusedtrain.advisor.tuning TASK``."""

from __future__ import annotations

import sys

from ._worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
