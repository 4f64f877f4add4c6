"""Breaks the optimizers and the kernels in one place at a time; the tests must notice each.

Mutants of the optimizers come from `_optimizer_mutants.py`, those of Triton kernels from
`_triton_mutants.py`, those of CUDA kernels from `_cuda_mutants.py`; each module says which of its
mutants are equivalent, and why. Works in a temporary copy of the repository, as it was built. By
default of each function one mutant of each sort is tried; `--all` tries every one. Exits with 1
where one survived.

    python tools/mutants.py [--only triton] [-k chain] [--shard 1/4] [--cases few] [--list]
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT / "tools")
from _mutant import Judge, Kind, Mutant, of_shard  # noqa: E402

KINDS = ("optimizer", "triton", "cuda")


def kind_of(name: str) -> Any:
    return importlib.import_module(f"_{name}_mutants")


def one_of_each(mutants: list[Mutant]) -> Iterator[Mutant]:
    """The first mutant of each sort in each function."""
    seen = set()
    for m in mutants:
        sort = (m.file, m.function, m.what)
        if sort not in seen:
            seen.add(sort)
            yield m


def chosen(mutants: list[Mutant], part: str, shard: str, every: bool) -> list[Mutant]:
    selected = mutants if every else list(one_of_each(mutants))
    selected = [m for m in selected if re.search(part, m.name)]
    return of_shard(selected, shard)


def copy(tree: Path) -> None:
    """The repository with what was built in it, but without `build`."""
    left = ("build", "__pycache__", ".git", ".venv", "dist", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left), symlinks=True)


def try_all(judge: Judge, mutants: list[Mutant], tree: Path) -> list[Mutant]:
    """Mutants that survived."""
    survivors = []
    for number, m in enumerate(mutants, 1):
        file = tree / m.file
        text = file.read_text()
        file.write_text(m.applied(text))
        began = time.monotonic()
        try:
            killer = judge(m)
        finally:
            file.write_text(text)
        verdict = "killed" if killer else "SURVIVED"
        took = time.monotonic() - began
        print(f"{number:4}/{len(mutants)} {verdict:8} {took:5.1f} s  {m.name}", flush=True)
        print(f"{'':24}{killer or 'was: ' + m.before}", flush=True)
        if not killer:
            survivors.append(m)
    return survivors


def run(name: str, arguments: argparse.Namespace) -> list[str]:
    """Errors, surviving mutants among them."""
    kind: Kind = kind_of(name)
    if arguments.cases:
        kind.CHOSEN.append(f"--cases={arguments.cases}")
    everything = kind.mutants(ROOT)
    stale = set(kind.EQUIVALENT) - {m.key for m in everything}
    wrong = [f"{name}: no such mutant is made, strike it from EQUIVALENT: {k}" for k in stale]
    mutants = chosen(everything, arguments.k, arguments.shard, arguments.all)
    equivalent = [m for m in mutants if m.key in kind.EQUIVALENT]
    mutants = [m for m in mutants if m.key not in kind.EQUIVALENT]
    files = {m.file for m in mutants}
    print(
        f"{name}: {len(mutants)} mutants of {len(files)} files are tried, of {len(everything)} that"
        f" can be made; {len(equivalent)} more are equivalent",
        flush=True,
    )
    if arguments.list:
        for m in mutants:
            print(f"  {m.name}\n    was: {m.before}")
        return wrong
    if not mutants:
        return wrong
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as ends:
        tree = Path(temporary) / "fusedtrain"
        print("the copy is made, and its tests run without a mutant", flush=True)
        copy(tree)
        try:
            judge = kind.prepare(tree, mutants, arguments.seconds, ends)
        except RuntimeError as error:
            return [*wrong, f"{name}: without a mutant: {error}"]
        survivors = try_all(judge, mutants, tree)
    killed = len(mutants) - len(survivors)
    sorts = Counter(m.what for m in mutants)
    print(f"{name}: {killed} of {len(mutants)} killed, {len(equivalent)} equivalent. By sort:")
    print("  " + ", ".join(f"{count} {what}" for what, count in sorts.most_common(20)))
    return wrong + [f"{name}: survived: {m.name}" for m in survivors]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, help="mutants of these alone"
    )
    parser.add_argument(
        "-k", default="", help="only where this is found in the name (a regular expression)"
    )
    parser.add_argument("--tests", nargs="+", help="files that judge mutants of optimizers")
    parser.add_argument("--shard", default="1/1", help="the i-th of n parts: i/n")
    parser.add_argument(
        "--seconds", type=float, default=120, help="the limit of a mutant, of the processor"
    )
    parser.add_argument("--cases", help="tier of the tests (docs/testing.md)")
    parser.add_argument("--all", action="store_true", help="not one of each sort alone")
    parser.add_argument("--list", action="store_true", help="do not run them")
    arguments = parser.parse_args()
    if arguments.tests:
        kind_of("optimizer").TESTS[:] = arguments.tests
    wrong = [line for name in arguments.only for line in run(name, arguments)]
    for line in wrong:
        print(line)
    print("no mutant survived" if not wrong else f"{len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
