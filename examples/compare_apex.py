"""Run the Apex examples beside what one writes today, and compare time, memory and training.

    python examples/compare_apex.py                          # tiny: float16 is slow on a CPU
    python examples/compare_apex.py --device cuda --data cifar10 --width 64 --image-size 32 \
        --batch-size 128 --train-images 12800 --lr 0.05
    python examples/compare_apex.py --rows cifar

Each row is a run of a script in a process of its own, from equal weights, with equal batches; the
rows take turns --repeats times, so that a slow moment of the machine hits no row alone. Exit
status: 0 if today's forms train as the ones before, 1 if not, 2 for unusable options or data.

On a CPU the losses of "imagenet, today" are those of "imagenet, apex O1" to the last bit. The two
of the CIFAR recipe differ in the last bit of some float32 weights, which training amplifies. With
the default options (torch 2.13; 6 seeds, or changes to the second script alone) their relative
differences were:

================  =====================  =========================
change            worst of first 3       mean of the first 20
================  =====================  =========================
none              0.00002 ... 0.00016    0.003 ... 0.033
--momentum 0.5    0.0012                 0.06
--lr 0.02         0.0065                 0.09
--lr 0.00001      0.0035                 0.18
limit             0.0008                 0.05
================  =====================  =========================

The last losses and the accuracy are held to the limits of train.py (_train/checks.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from _train.checks import Check, compare_runs, curve_difference
from _train.options import parsed, positive, positive_float
from _train.recipe import options
from _train.tables import (
    build_table,
    device_name,
    median_seconds,
    memory_label,
    plain,
    show_checks,
    surroundings,
    wide_console,
)

FOLDER = Path(__file__).resolve().parent
WARM_UP = 3
FIRST_STEPS, FIRST_LOSSES = 3, 0.0008
EARLY_STEPS, EARLY_LOSS = 20, 0.05
PASSED_ON = (
    "data", "data_root", "image_size", "arch", "width", "workers", "epochs", "batch_size",
    "momentum", "weight_decay", "warmup_epochs", "decay_epochs", "train_images", "test_images",
    "seed", "device", "threads",
)  # fmt: skip


class RunError(Exception):
    """A script has failed; the message is what it said."""


@dataclass
class Row:
    name: str
    script: str
    options: tuple[str, ...]
    reference: str | None = None  # the row before, whose training this one is to repeat
    dtype: torch.dtype | None = torch.float16
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: float = 0.0
    accuracy: float = float("nan")
    test_images: int = 0

    @property
    def fused(self) -> bool:
        return self.reference is not None

    @property
    def last_loss(self) -> float:
        """The mean of the last tenth."""
        last = self.losses[-max(5, len(self.losses) // 10) :]
        return sum(last) / len(last)


def rows(group: str) -> list[Row]:
    """Before and after, of the ImageNet-style script, the CIFAR recipe or both."""
    scale = ("--loss-scale", "128")
    imagenet = [
        Row("imagenet, apex O0", "imagenet_apex.py", ("--opt-level", "O0"), dtype=None),
        Row("imagenet, apex O1", "imagenet_apex.py", ("--opt-level", "O1")),
        Row("imagenet, apex O2", "imagenet_apex.py", ("--opt-level", "O2")),
        Row("imagenet, today", "imagenet_amp.py", ("--amp", "fp16"), "imagenet, apex O1"),
    ]
    cifar = [
        Row("cifar fp16, by hand", "cifar_fp16_apex.py", scale),
        Row("cifar fp16, today", "cifar_fp16.py", scale, "cifar fp16, by hand"),
    ]
    return {"all": imagenet + cifar, "imagenet": imagenet, "cifar": cifar}[group]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(
        "compare_apex.py", "The Apex examples beside today's form of them.", width=8,
        image_size=8, batch_size=16, train_images=320, epochs=3, decay_epochs=[2], lr=0.01,
        threads=1,
    )  # fmt: skip
    add = parser.add_argument
    add("--rows", choices=("all", "imagenet", "cifar"), default="all", help="what to run")
    add("--repeats", type=positive, default=2, help="runs of each row, in turns")
    add(
        "--tolerance",
        type=positive_float,
        help=f"limit for the relative difference of the first losses (default {FIRST_LOSSES})",
    )
    parser.set_defaults(output=Path("runs/apex"))
    args = parsed(parser, argv)
    for name in ("resume", "evaluate", "json", "channels_last"):
        if getattr(args, name):
            parser.error(f"--{name.replace('_', '-')} is for the scripts, not for their comparison")
    return args


def run(args: argparse.Namespace, row: Row, repeat: int) -> None:
    """One run of a row; its report is added to the row."""
    path = args.output / "runs" / f"{row.name.replace(', ', '-').replace(' ', '-')}-{repeat}.json"
    path.unlink(missing_ok=True)
    # The ImageNet-style scripts multiply the rate by images per step / 256.
    lr = args.lr * 256 / args.batch_size if row.script.startswith("imagenet") else args.lr
    command = [sys.executable, str(FOLDER / row.script), *row.options, "--lr", str(lr)]
    for name in PASSED_ON:
        value = getattr(args, name)
        if value is not None:
            values = value if isinstance(value, list) else [value]
            command += [f"--{name.replace('_', '-')}", *map(str, values)]
    command += ["--print-freq", "1000000", "--json", str(path)]
    root = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": root.strip(os.pathsep)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{row.name}: {done.stderr.strip()}")
    report = json.loads(path.read_text(encoding="utf-8"))
    row.losses = [float(loss) for loss in report["losses"]]
    row.seconds += report["seconds"][min(WARM_UP, len(report["seconds"]) // 2) :]
    row.memory, row.accuracy = report["memory_mb"], report["accuracy"]
    row.test_images = report["test_images"]


def compare(some: Sequence[Row], tolerance: float | None) -> list[Check]:
    """Compares each row with its reference, if it has one."""
    by_name = {row.name: row for row in some}
    checks = []
    for row in some:
        if row.reference is None:
            continue
        before = by_name[row.reference]
        compared = compare_runs([before, row], row.test_images, None)
        # Not the worst of the first 10 steps: with such small batches it is 0.04 to 0.18.
        compared[1:2] = compare_beginnings(before, row, tolerance)
        checks += [replace(check, mode=row.name) for check in compared]
    return checks


def compare_beginnings(before: Row, today: Row, tolerance: float | None) -> list[Check]:
    """Before training has amplified anything, and while it begins to."""
    steps = min(EARLY_STEPS, len(today.losses))
    first = max(map(_difference, today.losses[:FIRST_STEPS], before.losses[:FIRST_STEPS]))
    early = _difference(sum(today.losses[:steps]), sum(before.losses[:steps]))
    limit = FIRST_LOSSES if tolerance is None else tolerance
    return [
        Check(f"loss, first {FIRST_STEPS} steps: relative difference", first, limit),
        Check(f"loss, mean of the first {steps} steps: relative difference", early, EARLY_LOSS),
    ]


def _difference(loss: float, other: float) -> float:
    return abs(loss - other) / abs(other)


def difference(row: Row, some: Sequence[Row]) -> float | None:
    before = next((other for other in some if other.name == row.reference), None)
    return None if before is None else curve_difference(row, before)


def show(args: argparse.Namespace, some: Sequence[Row], checks: Sequence[Check]) -> None:
    console = wide_console()
    headings = ("run", "ms/step", memory_label(args.device), "test\naccuracy", "last\nloss",
                "max loss\ndiff. from\nbefore")  # fmt: skip
    lines = []
    for row in some:
        deviation = difference(row, some)
        lines.append([
            row.name,
            f"{median_seconds(row.seconds, 0) * 1e3:.1f}",
            f"{row.memory:.2f}",
            f"{row.accuracy:.1%}",
            f"{row.last_loss:.3f}",
            "-" if deviation is None else f"{deviation:.2g}",
        ])  # fmt: skip
    title = f"{args.arch}, {args.data}, {len(some[0].losses)} steps"
    console.print(build_table(title, "today is compared with the row of the same kind before it",
                              headings, lines))  # fmt: skip
    console.print(
        f"Medians of {args.repeats} run(s) in turns, the first {WARM_UP} steps of each left out; "
        f"width {args.width}, {args.image_size} pixels, batch {args.batch_size}; one machine: "
        f"{device_name(args.device)}, torch {torch.__version__}"
    )
    show_checks(console, checks, "Today's form does not train as the one before.")


def results(args: argparse.Namespace, some: Sequence[Row], checks: list[Check]) -> dict[str, Any]:
    return {
        **surroundings(args.device, vars(args), checks),
        "rows": [
            {
                "name": row.name,
                "script": row.script,
                "options": row.options,
                "compared_with": row.reference,
                "ms_per_step": median_seconds(row.seconds, 0) * 1e3,
                "memory_mb": row.memory,
                "test_accuracy": plain(row.accuracy),
                "last_loss": plain(row.last_loss),
                "max_loss_difference": plain(difference(row, some)),
                "losses": [plain(loss) for loss in row.losses],
            }
            for row in some
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    some = rows(args.rows)
    console = wide_console()
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        for repeat in range(args.repeats):
            for row in some if repeat % 2 == 0 else reversed(some):
                console.print(f"{row.name}, run {repeat + 1}", highlight=False)
                run(args, row, repeat)
    except RunError as error:
        print(f"compare_apex.py: error: {error}", file=sys.stderr)
        return 2
    checks = compare(some, args.tolerance)
    show(args, some, checks)
    text = json.dumps(results(args, some, checks), indent=1, allow_nan=False)
    (args.output / "results.json").write_text(text + "\n", encoding="utf-8")
    console.print(f"Wrote results.json to {args.output}", highlight=False)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
