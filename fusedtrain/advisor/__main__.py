"""The process of a user's script: ``python -m fusedtrain.advisor TASK RESULTS SCRIPT ...``."""

from __future__ import annotations

import sys

from ._scripts import run_task

if __name__ == "__main__":
    sys.exit(run_task(*sys.argv[1:]))
