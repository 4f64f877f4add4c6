"""The child of ``fusedtrain profile``: ``python -m fusedtrain.advisor.profiling TASK SCRIPT``."""

from __future__ import annotations

import sys

from .._scripts import read_task, run_until
from ._watch import ProfilingWatcher

if __name__ == "__main__":
    task, script, arguments = read_task(sys.argv[1:])
    sys.exit(run_until(ProfilingWatcher(task), task["results"], script, arguments))
