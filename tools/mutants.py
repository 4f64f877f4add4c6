"""Breaks the optimizers and the kernels in one place at a time; the tests must notice each.

Mutants are made by rule, sampled with a seed, and tried in a temporary copy of the repository as
it was built. The report is a kill rate for each file. Exits with 1 where a mutant survived: a test
is missing, or the mutant is equivalent and gets a mark where it stands (`_mutant.py`).

    python tools/mutants.py [--only triton] [-k chain] [--sample 10 --seed 1] [--cases few] [--list]
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _mutant import NO_MUTANT, Judge, Mutant

ROOT = Path(__file__).resolve().parent.parent

KINDS = ("optimizer", "triton", "cuda")


def sampled(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of each file, always the same for a seed."""
    sample = []
    for file in dict.fromkeys(m.file for m in mutants):
        of_file = [m for m in mutants if m.file == file]
        if len(of_file) > count:
            places = random.Random(f"{seed} {file}").sample(range(len(of_file)), count)
            of_file = [of_file[place] for place in sorted(places)]
        sample += of_file
    return sample


def copy(tree: Path) -> None:
    """The repository with what was built in it, but without `build`."""
    left = ("build", "__pycache__", ".git", ".venv", "dist", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*left), symlinks=True)


def try_all(judge: Judge, mutants: list[Mutant], tree: Path) -> tuple[list[Mutant], list[Mutant]]:
    """Mutants that compiled, and those of them that survived."""
    tried, survivors = [], []
    for number, m in enumerate(mutants, 1):
        file = tree / m.file
        text = file.read_text()
        file.write_text(m.applied(text))
        began = time.monotonic()
        try:
            killer = judge(m)
        finally:
            file.write_text(text)
        verdict = ("no mutant" if killer == NO_MUTANT else "killed") if killer else "SURVIVED"
        took = time.monotonic() - began
        print(f"{number:4}/{len(mutants)} {verdict:9} {took:5.1f} s  {m.name}", flush=True)
        print(f"{'':25}{killer or 'was: ' + m.before}", flush=True)
        tried += [m] if killer != NO_MUTANT else []
        survivors += [m] if not killer else []
    return tried, survivors


def rates(tried: list[Mutant], survivors: list[Mutant]) -> str:
    counts, lost = Counter(m.file for m in tried), Counter(m.file for m in survivors)
    rows = [f"  {file}: {n - lost[file]} of {n} killed" for file, n in counts.items()]
    return "\n".join([*rows, f"{len(tried) - len(survivors)} of {len(tried)} killed"])


def run(name: str, arguments: argparse.Namespace) -> list[str]:
    """Errors, surviving mutants among them."""
    # It has `mutants(root)`, `CHOSEN`, options of pytest, and `prepare()`, which builds the copy,
    # runs the tests without a mutant, and returns the judge; RuntimeError: one fails.
    kind: Any = importlib.import_module(f"_{name}_mutants")
    if arguments.cases:
        kind.CHOSEN.append(f"--cases={arguments.cases}")
    everything = kind.mutants(ROOT)
    others = [m for m in everything if not m.equal]
    mutants = [m for m in others if re.search(arguments.k, m.name)]
    if not arguments.all:
        mutants = sampled(mutants, arguments.sample, arguments.seed)
    print(
        f"{name}: {len(mutants)} mutants of {len({m.file for m in mutants})} files, of"
        f" {len(others)} that can be made; {len(everything) - len(others)} more are equivalent;"
        f" seed {arguments.seed}",
        flush=True,
    )
    if arguments.list:
        for m in mutants:
            print(f"  {m.name}\n    was: {m.before}")
    if arguments.list or not mutants:
        return []
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as ends:
        tree = Path(temporary) / "fusedtrain"
        print("the copy is made, and its tests run without a mutant", flush=True)
        copy(tree)
        try:
            judge = kind.prepare(tree, mutants, arguments.seconds, ends)
        except RuntimeError as error:
            return [f"{name}: without a mutant: {error}"]
        tried, survivors = try_all(judge, mutants, tree)
    print(f"{name}, seed {arguments.seed}:\n{rates(tried, survivors)}")
    return [f"{name}: survived: {m.name}" for m in survivors]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, help="mutants of these alone"
    )
    parser.add_argument(
        "-k", default="", help="only where this is found in the name (a regular expression)"
    )
    parser.add_argument("--sample", type=int, default=20, help="so many mutants a file")
    parser.add_argument("--seed", type=int, default=1, help="chooses the sample")
    parser.add_argument(
        "--seconds", type=float, default=120, help="the limit of a mutant, of the processor"
    )
    parser.add_argument("--cases", help="tier of the tests (docs/testing.md)")
    parser.add_argument("--all", action="store_true", help="every mutant, not a sample")
    parser.add_argument("--list", action="store_true", help="do not run them")
    arguments = parser.parse_args()
    wrong = [line for name in arguments.only for line in run(name, arguments)]
    for line in wrong:
        print(line)
    print("no mutant survived" if not wrong else f"{len(wrong)} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
