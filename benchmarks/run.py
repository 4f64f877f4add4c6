"""Run the benchmarks, store the results under the device's name, show them.

    python -m benchmarks.run [--device cuda] [--quick] [--family NAME] [--op NAME] [--fail-slower]
                             [pytest options]

The results go to $RESULTS_DIR (default benchmarks/results) as <device>.json and <device>.svg. Each
family of benchmarks runs in a process of its own. A row is stored as soon as it is measured, in the
place of the one of its name; rows of the family that a run to its end has not measured are dropped.
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
from benchmarks.harness.rows import ALLOCATORS
from benchmarks.harness.store import COMPLETE, FAMILIES, put
from fusedtrain.advisor.bench.clock import device_slug

ROOT = Path(__file__).resolve().parent.parent
# The others are measured with memory that is "kept", unless --user-allocator (rows.ALLOCATORS).
BOUNDED = ("activations", "amp_step", "apex")
USAGE_ERROR, NOTHING_TO_RUN = 4, 5  # pytest's exit codes


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
    parser.add_argument(
        "--family", action="append", choices=FAMILIES, help="only this one (repeatable)"
    )
    parser.add_argument(
        "--user-allocator",
        action="store_true",
        help="CPU: with glibc's defaults, as a user has them; the results are <device>-user",
    )
    parser.add_argument("--op", action="append", default=[], help="only this op (repeatable)")
    parser.add_argument("--model", action="append", default=[], help="only this network")
    parser.add_argument("--also", type=Path, help="a folder that gets the same results")
    parser.add_argument("--no-chart", action="store_true", help="draw nothing")
    parser.add_argument("--fail-slower", action="store_true", help="exit 1 if slower than eager")
    options, rest = parser.parse_known_args(arguments)

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    # A smoke run or a selection does not replace the device's results.
    part = "quick" if options.quick else "some" if options.op or options.model else ""
    user = "user" if options.user_allocator else ""
    path = results_path(options.device, "-".join(filter(None, (user, part))))
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q"]
    command += [f"--device={options.device}", *rest]
    for copy in [path, *([options.also.resolve() / path.name] if options.also else [])]:
        copy.parent.mkdir(parents=True, exist_ok=True)
        if part and "--keep-rows" not in rest:
            copy.unlink(missing_ok=True)
        command.append(f"--store={copy}")
    command += [f"--op={op}" for op in options.op]
    command += [f"--model={model}" for model in options.model]
    if options.quick:
        command.append("--quick")
    code, done = 0, []
    for family in options.family or FAMILIES:
        settings = {} if user else ALLOCATORS["bounded" if family in BOUNDED else "kept"]
        of_family = subprocess.run(
            [*command, f"--family={family}"], cwd=ROOT, check=False, env=settings | os.environ
        ).returncode
        if of_family == USAGE_ERROR:
            return of_family
        if of_family == NOTHING_TO_RUN:
            continue
        code = code or of_family
        if of_family in COMPLETE:
            done.append(family)
    if not done:
        return code or 1
    put(path, {"benchmarks": []})  # the report wants a file, also where all ops are wrong
    show = [str(path)]
    if not options.no_chart:
        show.append(f"--svg={path.with_suffix('.svg')}")
    show += [f"--family={family}" for family in done]
    if options.fail_slower:
        show.append("--fail-slower")
    # A red op fails the run; the other rows are shown all the same.
    shown = report.main(show)
    return code or shown


if __name__ == "__main__":
    sys.exit(main())
