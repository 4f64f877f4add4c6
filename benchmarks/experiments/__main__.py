"""Repeat published experiments: rows as they come, and as lines of JSON.

    python -m benchmarks.experiments [NAME ...] [--device cuda] [--quick] [--json PATH] [--seed 0]

Lines are added to --json, default $RESULTS_DIR/experiments/<device>.jsonl (RESULTS_DIR:
benchmarks/results), each row as soon as it is measured. Exit code: 0, 1 after an experiment that
failed, 2 after a wrong option, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.experiments import NAMES
from benchmarks.experiments.experiment import Gain, Settings
from benchmarks.harness.rows import setting
from fusedtrain.advisor.bench.clock import device_slug

INTERRUPTED = 130
RESULTS = Path(__file__).resolve().parent.parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.experiments", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all experiments")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds; the numbers mean nothing")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights")
    parser.add_argument("--json", type=Path, metavar="PATH", help="the file that gets the rows")
    parser.add_argument("--also", type=Path, metavar="DIR", help="a folder that gets them, too")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"unknown: {', '.join(unknown)}. The experiments are: {', '.join(NAMES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    settings = Settings(options.device, options.quick, options.seed)
    name = device_slug(settings.device) + "-quick" * settings.quick + ".jsonl"
    folder = Path(os.environ.get("RESULTS_DIR") or RESULTS)
    files = [options.json or folder / "experiments" / name]
    files += [options.also / "experiments" / name] if options.also else []
    chosen, failed = [name for name in NAMES if name in (options.names or NAMES)], []
    for name in chosen:
        try:
            _run(name, settings, files)
        except KeyboardInterrupt:
            print(f"stopped; the rows so far are in {files[0]}")
            return INTERRUPTED
        except Exception:
            traceback.print_exc()
            failed.append(name)
    print(f"\nrows: {files[0]}" + f"\nfailed: {', '.join(failed)}" * bool(failed), flush=True)
    return int(bool(failed))


def _run(name: str, settings: Settings, files: Sequence[Path]) -> None:
    """Rows of an experiment go to the screen and into the files."""
    module = importlib.import_module(f"benchmarks.experiments.{name}")
    facts = {"experiment": name, "seed": settings.seed, **setting(settings.device)}
    question = (module.__doc__ or "").strip()
    print(f"\n== {question}\ndocs/experiments/{name}.md: source, setup, verdicts\n", flush=True)
    # Closed after Ctrl-C, so that processes and files are closed.
    with _clean_torch(settings.seed), contextlib.closing(module.rows(settings)) as rows:
        for row in rows:
            numbers = ", ".join(f"{key}: {_text(number)}" for key, number in row.numbers.items())
            print(" | ".join(filter(None, (row.label, numbers, row.note))), flush=True)
            line = json.dumps({**facts, "label": row.label, **row.numbers, "note": row.note})
            for path in files:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


def _text(number: float | Gain) -> str:
    if isinstance(number, tuple):
        return "{:.2f} ({:.2f} to {:.2f})".format(*number)
    return f"{number:,.4g}" if abs(number) < 1000 else f"{number:,.0f}"


@contextlib.contextmanager
def _clean_torch(seed: int) -> Iterator[None]:
    """An experiment starts from this seed, and leaves settings of torch as they were."""
    threads, autotune = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = autotune
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
