"""Train for minutes, kill the process again and again, and compare the curves bit for bit.

    make soak                                   # 10 minutes
    make soak ARGS="--minutes 1 --seed 7"

Pairs of runs take turns, one for each recipe of `recipes.py`: mixed precision with clipping and
averages, infs in gradients and losses at random steps. One run of a pair is left alone. The other
is killed with SIGKILL at random moments, every second time while it writes a checkpoint, and
resumed. Loss, norm, scale, learning rate of each step and digests of all states must be the same
bits in both, and the first one's memory may not grow. Exit status: 0 if so, 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .recipes import RECIPES
from .runs import Outcome, SoakError, run_pair
from .training import PARTS, Training

_LEAST_SECONDS = 15.0  # of a pair


def images(count: int = 1500) -> tuple[Tensor, Tensor, str]:
    """Images of 16 x 16 bytes, labels, and where they come from: real ones where there are some."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (count, 1, 16, 16), dtype=torch.uint8, generator=generator)
        return pixels, torch.randint(0, 10, (count,), generator=generator), "random images"
    bunch = load_digits()
    small = torch.from_numpy(bunch.images[:count]).float()[:, None] * (255 / 16)
    pixels = torch.nn.functional.interpolate(small, size=(16, 16), mode="bilinear").round()
    return pixels.byte(), torch.from_numpy(bunch.target[:count]).long(), "digits"


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make soak",
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10, help="for all pairs together")
    add("--steps", type=int, default=2000, help="of a run, at most")
    add("--seed", type=int, default=0, help="of weights, data, infs and kills")
    add("--kills", type=int, default=6, help="of one run, where time is enough")
    add("--pairs", type=int, help="of runs, at most")
    add(
        "--recipe",
        type=int,
        choices=range(len(RECIPES)),
        help="of all pairs; all in turn if absent",
    )
    add(
        "--plant", choices=(*PARTS, "leak"), nargs="+", default=[],
        help="faults, to see them noticed: parts that a resumed run does not load, a tensor a step",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.steps < 1 or args.kills < 0:
        parser.error("--minutes and --steps must be above 0, --kills at least 0")
    return args


def _teller(number: int, name: str, started: float) -> Callable[[int, int, Sequence[str]], None]:
    last = [0.0]

    def tell(reference: int, killed: int, kills: Sequence[str]) -> None:
        now = time.monotonic()
        if now - last[0] >= 3:
            last[0] = now
            hit = f", the last {kills[-1]}" if kills else ""
            print(
                f"{now - started:4.0f} s  pair {number} ({name}): uninterrupted at step "
                f"{reference}, killed run at {killed}; kills: {len(kills)}{hit}",
                flush=True,
            )

    return tell


def _say(number: int, name: str, outcome: Outcome) -> None:
    print(f"\npair {number}, {name}:")
    print(
        f"  {outcome.steps:,} steps; {outcome.injected} with an injected inf or NaN, all skipped; "
        f"{outcome.skipped - outcome.injected} more skipped by overflows of their own"
        if not outcome.differences
        else f"  {outcome.steps:,} steps"
    )
    print(f"  {len(outcome.kills)} kills: {'; '.join(outcome.kills) or 'none'}")
    print(
        f"  compared: {outcome.rows:,} steps of the killed run, {outcome.rows - outcome.steps:,} "
        f"made again, and {outcome.digests} digests of {outcome.bits / 1e6:,.0f} million bits"
    )
    print(f"  memory: {outcome.growth or 'too few steps to tell'}")
    for failure in outcome.failures():
        print(f"  FAILED: {failure}")
    print(flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    started = time.monotonic()
    torch.set_num_threads(1)  # no threads: the workers are forked
    print(f"soak: {args.minutes:g} minutes, seed {args.seed}, up to {args.steps:,} steps a run; "
          "the processes are starting", flush=True)  # fmt: skip
    end = started + 60 * args.minutes
    outcomes: list[Outcome] = []
    forget = ["--forget", *(part for part in args.plant if part in PARTS)]
    leak = ["--leak", "1"] if "leak" in args.plant else []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        pixels, labels, source = images()
        data = Path(folder) / "images.pt"
        torch.save({"pixels": pixels, "labels": labels}, data)
        Training(RECIPES[0], (pixels, labels), 0)  # imports once what all workers need
        while not outcomes or (
            end - time.monotonic() > _LEAST_SECONDS and len(outcomes) != args.pairs
        ):
            number = len(outcomes)
            left = (end - time.monotonic()) / max(1, len(RECIPES) - number)
            seed = args.seed + number
            recipe = seed % len(RECIPES) if args.recipe is None else args.recipe
            name = RECIPES[recipe].name
            try:
                outcome = run_pair(
                    Path(folder) / str(number),
                    ["--images", str(data), "--recipe", str(recipe), *leak],
                    args.kills, args.steps, seed, time.monotonic() + max(_LEAST_SECONDS, left) - 2,
                    _teller(number + 1, name, started), forget,
                )  # fmt: skip
            except SoakError as error:
                print(f"soak: FAILED in pair {number + 1} ({name}, seed {seed}): {error}")
                return 1
            outcomes.append(outcome)
            _say(number + 1, name, outcome)
    return _close(outcomes, source, time.monotonic() - started)


def _close(outcomes: Sequence[Outcome], source: str, seconds: float) -> int:
    failures = [failure for outcome in outcomes for failure in outcome.failures()]
    kills = sum(len(outcome.kills) for outcome in outcomes)
    writing = sum(outcome.kills_while_writing for outcome in outcomes)
    if not kills:
        failures.append("no run was killed: there was no time, or --kills is 0")
    print(
        f"soak: {seconds:.0f} seconds on {source}, {len(outcomes)} pairs of runs, "
        f"{sum(o.steps for o in outcomes):,} steps of training with clipping and averages; "
        f"{sum(o.injected for o in outcomes)} of them with an injected inf or NaN, "
        f"{sum(o.skipped for o in outcomes)} skipped. {kills} kills by SIGKILL, {writing} of them "
        f"inside the writing of a checkpoint; {sum(o.rows - o.steps for o in outcomes):,} steps "
        "were made again."
    )
    if failures:
        print(f"soak: FAILED: {len(failures)} findings, the first: {failures[0]}")
        return 1
    grown = [o.growth for o in outcomes if o.growth is not None]
    most = max(grown, key=lambda growth: growth.bytes, default=None)
    print(
        f"soak: every resumed curve is the uninterrupted one bit for bit: "
        f"{sum(o.rows for o in outcomes):,} steps, {sum(o.digests for o in outcomes):,} digests "
        f"of {sum(o.bits for o in outcomes) / 1e9:.2f} billion bits of states. "
        f"Memory of {len(grown)} runs; the largest growth: {most or 'not measured'}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
