"""Repeat published experiments: rows as a table as they come, and as lines of JSON.

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
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.experiments import NAMES

if TYPE_CHECKING:  # the import of torch takes seconds, and the first line comes before
    from benchmarks.experiments.experiment import Row, Settings

INTERRUPTED = 130
RESULTS = Path(__file__).resolve().parent.parent / "results"
LABEL = 50  # characters of the table's first column, usually


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
    chosen = [name for name in NAMES if name in (options.names or NAMES)]
    print(f"{', '.join(chosen)} on {options.device}", flush=True)
    import torch

    from benchmarks.experiments.experiment import Settings

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    settings = Settings(options.device, options.quick, options.seed)
    name = _file_name(settings)
    first = options.json or Path(os.environ.get("RESULTS_DIR") or RESULTS) / "experiments" / name
    files = [first] if options.also is None else [first, options.also / "experiments" / name]
    try:
        failed = [name for name in chosen if not _run(name, settings, files)]
    except KeyboardInterrupt:
        print(f"stopped; the rows so far are in {first}")
        return INTERRUPTED
    print(f"\nrows: {first}" + (f"\nfailed: {', '.join(failed)}" if failed else ""), flush=True)
    return int(bool(failed))


def _description(name: str) -> str:
    return (importlib.import_module(f"benchmarks.experiments.{name}").__doc__ or "").strip()


def _file_name(settings: Settings) -> str:
    from fusedtrain.advisor.bench.clock import device_slug

    return device_slug(settings.device) + ("-quick" if settings.quick else "") + ".jsonl"


def _run(name: str, settings: Settings, files: Sequence[Path]) -> bool:
    """Whether the experiment came to its end. An error is shown, and the next experiment runs."""
    from benchmarks.harness.clock import setting

    begun, keys = time.perf_counter(), list[str]()
    try:
        print(f"\n== {name}: {_description(name)}\n", flush=True)
        with _clean_torch(settings.seed), contextlib.closing(_rows(name, settings)) as rows:
            facts = {"experiment": name, "seed": settings.seed, **setting(settings.device)}
            for row in rows:
                if not row.numbers.keys() <= {*keys}:
                    keys = [*dict.fromkeys([*keys, *row.numbers])]
                    print(_line("", keys))
                cells = [_cell(row, key) for key in keys]
                print(_line(row.label, cells, keys), row.note, flush=True)
                entry = {**facts, "label": row.label, **row.numbers, "note": row.note}
                for path in files:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(entry) + "\n")
    except Exception:
        traceback.print_exc()
        print(f"{name} FAILED", flush=True)
        return False
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)
    return True


def _rows(name: str, settings: Settings) -> Generator[Row, None, None]:
    """The rows as a generator: closed after Ctrl-C, so that processes and files are closed."""
    yield from importlib.import_module(f"benchmarks.experiments.{name}").rows(settings)


def _cell(row: Row, key: str) -> str:
    number = row.numbers.get(key)
    if number is None:
        return "-"
    if isinstance(number, tuple):
        return "{:.2f} ({:.2f} to {:.2f})".format(*number)
    return f"{number:,.4g}" if abs(number) < 1000 else f"{number:,.0f}"


def _line(label: str, cells: Sequence[str], keys: Sequence[str] = ()) -> str:
    widths = [max(len(key), 20) for key in keys or cells]
    return f"{label:<{LABEL}}" + "".join(
        f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
    )


@contextlib.contextmanager
def _clean_torch(seed: int) -> Iterator[None]:
    """An experiment starts from this seed, and leaves settings of torch as they were."""
    import torch

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
