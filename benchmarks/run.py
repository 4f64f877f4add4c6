"""Run the benchmarks, store the results under the device's name, show them.

    python -m benchmarks.run [--device cuda] [--quick] [--op NAME] [--fail-slower] [pytest options]

The results go to $RESULTS_DIR (default benchmarks/results) as <device>.json and <device>.png.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks._measure import device_slug

ROOT = Path(__file__).resolve().parent.parent

# glibc decides by the history of the process whether a buffer of some MiB is reused or mapped anew.
# At 2^20 float32 numbers that is 70 us against 600 us, for whichever side it hits; so neither.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}


def results_path(device: str, kind: str = "") -> Path:
    """Where the results of this device, backend and kind of run are kept."""
    folder = Path(os.environ.get("RESULTS_DIR") or ROOT / "benchmarks" / "results").resolve()
    parts = [device_slug(device), os.environ.get("FUSEDTRAIN_BACKEND"), kind]
    return folder / f"{'-'.join(filter(None, parts))}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.run",
        description=(__doc__ or "").split("\n")[0],
        epilog="Other options go to pytest, for example --full or --no-compile.",
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a smoke test of a few seconds")
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument("--model", action="append", default=[], help="AMP step: only this network")
    parser.add_argument("--fail-slower", action="store_true", help="exit 1 if slower than eager")
    options, rest = parser.parse_known_args(arguments)

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    # A smoke run or a selection does not replace the device's results.
    kind = "quick" if options.quick else "some" if options.op or options.model else ""
    path = results_path(options.device, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "--benchmark-quiet"]
    command += [f"--benchmark-json={fresh}", f"--device={options.device}", *rest]
    command += [f"--op={op}" for op in options.op]
    command += [f"--model={model}" for model in options.model]
    if options.quick:
        command.append("--quick")
    code = subprocess.run(command, cwd=ROOT, check=False, env=ALLOCATOR | os.environ).returncode
    if not fresh.exists():
        return code or 1
    fresh.replace(path)
    show = [str(path), f"--png={path.with_suffix('.png')}"]
    if options.fail_slower:
        show.append("--fail-slower")
    # A red op fails the run; the other rows are shown all the same.
    return report.main(show) or code


if __name__ == "__main__":
    sys.exit(main())
