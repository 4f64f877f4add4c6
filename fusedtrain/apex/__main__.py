"""``python -m fusedtrain.apex script.py ...``: see `_run`."""

import sys

from ._run import main

if __name__ == "__main__":
    sys.exit(main())
