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

Runs of 40 steps or more have an end, too: the means of the last tenth of the losses may differ by
0.15 and a quarter of the loss, the accuracies by 0.05 beside twice the standard error of a
difference on so many images. Honest rounding gave up to 0.08 and 0.07.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from _epochs import options, parsed, positive, positive_float
from fusedtrain.advisor.bench import clock

FOLDER = Path(__file__).resolve().parent
WARM_UP = 3
FIRST_STEPS, FIRST_LOSSES = 3, 0.0008
EARLY_STEPS, EARLY_LOSS = 20, 0.05
STEPS_WITH_AN_END = 40
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
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: float = 0.0
    accuracy: float = float("nan")
    test_images: int = 0

    @property
    def last_loss(self) -> float:
        """The mean of the last tenth."""
        last = self.losses[-max(5, len(self.losses) // 10) :]
        return sum(last) / len(last)


@dataclass
class Check:
    name: str
    value: float
    limit: float
    mode: str

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # NaN fails


def rows(group: str) -> list[Row]:
    """Before and after, of the ImageNet-style script, the CIFAR recipe or both."""
    scale = ("--loss-scale", "128")
    imagenet = [
        Row("imagenet, apex O0", "imagenet_apex.py", ("--opt-level", "O0")),
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
    limit = FIRST_LOSSES if tolerance is None else tolerance
    checks = []
    for row in some:
        if row.reference is None:
            continue
        before = by_name[row.reference]
        ours, theirs = row.losses, before.losses
        wrong = sum(not math.isfinite(loss) for loss in (*ours, *theirs))
        firsts = [_difference(*pair) for pair in zip(ours[:FIRST_STEPS], theirs[:FIRST_STEPS])]
        early = min(EARLY_STEPS, len(ours))
        # Not the worst of the first 10 steps: with such small batches it is 0.04 to 0.18.
        held = [
            ("losses that are not finite", wrong, 0),
            (f"loss, first {FIRST_STEPS} steps: relative difference", max(firsts), limit),
            (f"loss, mean of the first {early} steps: relative difference",
             _difference(sum(ours[:early]), sum(theirs[:early])), EARLY_LOSS),
        ]  # fmt: skip
        if len(ours) >= STEPS_WITH_AN_END:
            chance = 2 * math.sqrt(2 * before.accuracy * (1 - before.accuracy) / row.test_images)
            held += [
                ("loss, mean of the last tenth: difference", abs(row.last_loss - before.last_loss),
                 0.15 + 0.25 * before.last_loss),
                ("final accuracy: difference", abs(row.accuracy - before.accuracy), 0.05 + chance),
            ]  # fmt: skip
        checks += [Check(name, value, most, row.name) for name, value, most in held]
    return checks


def _difference(loss: float, other: float) -> float:
    return abs(loss - other) / abs(other)


def measured(row: Row, some: Sequence[Row]) -> dict[str, Any]:
    """A row of the table and of results.json."""
    before = next((other for other in some if other.name == row.reference), None)
    pairs = zip(row.losses, before.losses, strict=True) if before else ()
    return {
        "name": row.name,
        "script": row.script,
        "options": row.options,
        "compared_with": row.reference,
        "ms_per_step": statistics.median(row.seconds) * 1e3,
        "memory_mb": row.memory,
        "test_accuracy": row.accuracy,
        "last_loss": row.last_loss,
        "max_loss_difference": max((abs(a - b) for a, b in pairs), default=None),
    }


def show(args: argparse.Namespace, table: Sequence[dict[str, Any]], checks: list[Check]) -> None:
    print(f"{'run':20} ms/step  saved, MB  accuracy  last loss  farthest from before")
    for line in table:
        farthest = line["max_loss_difference"]
        print(f"{line['name']:20} {line['ms_per_step']:7.1f} {line['memory_mb']:10.2f} "
              f"{line['test_accuracy']:9.1%} {line['last_loss']:10.3f} "
              f"{'-' if farthest is None else format(farthest, '.2g'):>21}")  # fmt: skip
    print(
        f"Medians of {args.repeats} run(s) in turns, the first {WARM_UP} steps of each left out; "
        f"width {args.width}, {args.image_size} pixels, batch {args.batch_size}; one machine: "
        f"{clock.device_name(args.device)}, torch {torch.__version__}"
    )
    for check in checks:
        print(f"{'ok' if check.passed else 'FAILED':>6} {check.mode}: {check.name} "
              f"{check.value:.2g} (limit {check.limit:.2g})")  # fmt: skip
    if not all(check.passed for check in checks):
        print("FAILED: today's form does not train as the one before; do not trust these numbers.")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    some = rows(args.rows)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        for repeat in range(args.repeats):
            for row in some if repeat % 2 == 0 else reversed(some):
                print(f"{row.name}, run {repeat + 1}", flush=True)
                run(args, row, repeat)
    except RunError as error:
        print(f"compare_apex.py: error: {error}", file=sys.stderr)
        return 2
    checks = compare(some, args.tolerance)
    table = [measured(row, some) for row in some]
    show(args, table, checks)
    passed = all(check.passed for check in checks)
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": clock.device_name(args.device),
        "torch": torch.__version__,
        "arguments": vars(args),
        "passed": passed,
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
        "rows": [{**line, "losses": row.losses} for line, row in zip(table, some, strict=True)],
    }
    plain = json.loads(json.dumps(results, default=str), parse_constant=str)  # JSON has no NaN
    text = json.dumps(plain, indent=1)
    (args.output / "results.json").write_text(text + "\n", encoding="utf-8")
    print(f"Wrote results.json to {args.output}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
