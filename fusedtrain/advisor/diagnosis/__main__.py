"""The process in which a script runs: ``python -m fusedtrain.advisor.diagnosis TASK SCRIPT``."""

import sys

from .._scripts import read_task, run_until
from . import Watcher

if __name__ == "__main__":
    task, script, arguments = read_task(sys.argv[1:])
    options = {key: task[key] for key in ("steps", "assume_gpu", "trials")}
    sys.exit(run_until(Watcher(script, **options), task["results"], script, arguments))
