"""What a run reports: a table, a picture and a JSON file."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import fusedtrain
from _train.checks import Check, curve_difference
from _train.modes import Mode


@contextmanager
def progress_bar(visible: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, disable=not visible) as progress:
        yield progress


@dataclass
class Report:
    args: argparse.Namespace
    modes: list[Mode]
    world_size: int
    warm_up: int
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def memory_label(self) -> str:
        return "peak memory, MB" if self.args.device == "cuda" else "saved for backward, MB"

    def memory(self, mode: Mode) -> float:
        """Megabytes: the allocator's peak on CUDA; on the CPU, where nothing keeps count of
        allocations all the time, what one forward pass of one micro-batch leaves allocated."""
        return (mode.saved_bytes if mode.peak_bytes is None else mode.peak_bytes) / 1e6

    def seconds(self, mode: Mode) -> float:
        """The median step, without the warm-up."""
        skipped = min(self.warm_up, len(mode.seconds) // 2)
        return statistics.median(mode.seconds[skipped:])

    def images_per_second(self, mode: Mode) -> float:
        return self.args.batch_size * self.args.accumulate * self.world_size / self.seconds(mode)

    def first_of_turn(self, mode: Mode) -> int:
        """The place of the first mode that took turns with this one: eager."""
        turns = [(bool(m.memory), m.frozen) for m in self.modes]
        return turns.index((bool(mode.memory), mode.frozen))

    def optimizer_seconds(self, mode: Mode) -> float:
        """What the median step spends between backward and the next forward."""
        seconds = mode.stepper.seconds
        return statistics.median(seconds[min(self.warm_up, len(seconds) // 2) :])

    def optimizer_share(self, mode: Mode) -> float:
        """Unscaling, clipping, update, average and zeroing, as a part of the step."""
        return self.optimizer_seconds(mode) / self.seconds(mode)

    def curve_difference(self, mode: Mode) -> float | None:
        reference = next((m for m in self.modes if m.name == mode.reference), None)
        return None if reference is None else curve_difference(mode, reference)

    @property
    def title(self) -> str:
        return f"{self.args.model}, {self.args.data}, {len(self.modes[0].losses)} steps"

    @property
    def setting(self) -> str:
        extras = [self.args.optimizer, f"batch {self.args.batch_size}"]
        extras += [f"clip {self.args.clip:g}"] if self.args.clip else []
        extras += [f"EMA {self.args.ema:g}"] if self.args.ema else []
        extras += [f"{self.args.accumulate} micro-batches"] * (self.args.accumulate > 1)
        extras += [f"{self.world_size} processes"] * (self.world_size > 1)
        extras += ["channels_last"] * self.args.channels_last + ["compiled"] * self.args.compile
        machine = f"{device_name(self.args.device)}, torch {torch.__version__}"
        return f"{', '.join(extras)}; one machine: {machine}"

    def show(self) -> None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=100)
        for mode in self.modes:
            if mode.fused:
                console.print(mode.conversion, markup=False, highlight=False)
        console.print(self._table())
        console.print(
            f"Medians of interleaved steps, the first {self.warm_up} left out; {self.setting}"
        )
        for check in self.checks:
            colour, word = ("green", "ok") if check.passed else ("red", "FAILED")
            console.print(
                f"[{colour}]{word:>6}[/] {check.name} {check.value:.2g} (limit {check.limit:.2g})",
                highlight=False,
            )
        if not self.passed:
            console.rule("[bold red]FAILED", style="red")
            console.print(
                "[bold red]The fusedtrain run does not follow the eager run.[/] These numbers "
                "are not to be trusted; see the checks marked FAILED above."
            )

    def _table(self) -> Table:
        table = Table(title=self.title)
        table.caption = (
            "optim.: unscale, clip, update, EMA, zero_grad. "
            "* at any step; fusedtrain from eager in the same precision, AMP from fp32"
        )
        table.add_column("mode", no_wrap=True)
        memory = self.memory_label.replace(" for ", " for\n").replace(", ", ",\n")
        headings = ("images/s", "ms/step", "optim.\nshare", memory, "test\naccuracy",
                    "max loss\ndiff. from\neager*")  # fmt: skip
        for heading in headings:
            table.add_column(heading, justify="right")
        for mode in self.modes:
            difference = self.curve_difference(mode)
            table.add_row(
                mode.name,
                f"{self.images_per_second(mode):.1f}",
                f"{self.seconds(mode) * 1e3:.1f}",
                f"{self.optimizer_share(mode):.1%}",
                f"{self.memory(mode):.1f}",
                f"{mode.accuracy:.1%}",
                "-" if difference is None else f"{difference:.2g}",
            )
        return table

    def results(self) -> dict[str, Any]:
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": device_name(self.args.device),
            "torch": torch.__version__,
            "fusedtrain": getattr(fusedtrain, "__version__", None),
            "processes": self.world_size,
            "arguments": {k: _plain(v) for k, v in vars(self.args).items()},
            "memory": self.memory_label,
            "passed": self.passed,
            "checks": [
                {k: _plain(v) for k, v in (*asdict(c).items(), ("passed", c.passed))}
                for c in self.checks
            ],
            "modes": [
                {
                    "name": mode.name,
                    "compared_with": mode.reference,
                    "images_per_second": self.images_per_second(mode),
                    "ms_per_step": self.seconds(mode) * 1e3,
                    "optimizer_ms": self.optimizer_seconds(mode) * 1e3,
                    "optimizer_share": self.optimizer_share(mode),
                    "memory_mb": self.memory(mode),
                    "saved_for_backward_mb": mode.saved_bytes / 1e6,
                    "test_accuracy": _plain(mode.accuracy),
                    "max_loss_difference": _plain(self.curve_difference(mode)),
                    "seconds": [round(s, 6) for s in mode.seconds],
                    "losses": [_plain(loss) for loss in mode.losses],
                    "conversion": mode.conversion,
                }
                for mode in self.modes
            ],
        }

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.results(), indent=1, allow_nan=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        self._draw(folder / "train.png")
        Console().print(f"Wrote results.json and train.png to {folder}", highlight=False)

    def _draw(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        # The fused curve lies on the eager one, so it is dashed.
        looks: tuple[tuple[str, Any], ...] = (("#8c8c8c", "-"), ("#3b75af", "-"))
        kept = [mode for mode in self.modes if mode.memory]
        trained = sum(not mode.frozen for mode in self.modes) - len(kept)
        looks = (*looks[: trained - 1], ("#e1812c", (0, (4, 2))))
        tuned = len(self.modes) - trained - len(kept)
        looks += (("#6a9f58", "-"), ("#b04f6f", (0, (4, 2))))[:tuned]
        looks += (
            ("#4d4d4d", "-"), ("#1f9e89", "-"), ("#d1495b", (0, (4, 2))), ("#a58fc4", (0, (1, 1))),
            ("#8a6d3b", (0, (6, 3))), ("#5b8c2a", (0, (3, 1, 1, 1))),
        )[: len(kept)]  # fmt: skip
        figure = plt.figure(figsize=(10, 7), layout="constrained")
        figure.suptitle(f"{self.title}\n", fontsize=14, fontweight="bold")
        figure.text(0.5, 0.945, self.setting, ha="center", va="top", fontsize=9, color="#555555")
        grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.7))
        bars = (
            (self.memory_label, [self.memory(m) for m in self.modes]),
            ("time per step, ms (median)", [self.seconds(m) * 1e3 for m in self.modes]),
        )
        for column, (label, values) in enumerate(bars):
            axes = figure.add_subplot(grid[0, column])
            names = [m.name for m in self.modes] if column == 0 else [""] * len(values)
            places = range(len(values))
            axes.barh(places, values, color=[colour for colour, _ in looks], height=0.7)
            axes.set_yticks(places, names)
            axes.invert_yaxis()
            axes.set_xlim(0, max(values) * 1.28 or 1)
            axes.set_title(label, fontsize=11, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            for place, value in enumerate(values):
                first = self.first_of_turn(self.modes[place])
                known = place > first and values[first]
                share = f"  ({value / values[first]:.2f}x)" if known else ""
                axes.text(value, place, f" {_short(value)}{share}", va="center", fontsize=10)
        axes = figure.add_subplot(grid[1, :])
        for mode, (colour, style) in zip(self.modes, looks, strict=True):
            label = f"{mode.name}, test accuracy {mode.accuracy:.1%}"
            steps = range(1, len(mode.losses) + 1)
            axes.plot(steps, mode.losses, color=colour, linestyle=style, linewidth=2, label=label)
        axes.set_xlabel("optimizer step")
        axes.set_title("training loss", fontsize=11, loc="left")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{_cpu_name()}, {torch.get_num_threads()} thread(s)"


def _cpu_name() -> str:
    try:
        lines: Iterable[str] = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ()
    found = next((line for line in lines if line.startswith("model name")), "")
    return found.partition(":")[2].strip() or platform.processor() or platform.machine()


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _plain(value: Any) -> Any:
    """What JSON can hold: paths as text, and no NaN or infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
