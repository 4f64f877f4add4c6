"""Report of a run: a table, a picture and a JSON file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from _train.checks import Check, curve_difference
from _train.modes import Mode
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
from _train.words import result, what_was_won


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
        return memory_label(self.args.device)

    def memory(self, mode: Mode) -> float:
        """Megabytes: the allocator's peak on CUDA; on the CPU, where nothing keeps count of
        allocations all the time, what one forward pass of one micro-batch leaves allocated."""
        return (mode.saved_bytes if mode.peak_bytes is None else mode.peak_bytes) / 1e6

    def seconds(self, mode: Mode) -> float:
        return median_seconds(mode.seconds, self.warm_up)

    def images_per_second(self, mode: Mode) -> float:
        return self.args.batch_size * self.args.accumulate * self.world_size / self.seconds(mode)

    def first_of_turn(self, mode: Mode) -> int:
        """The place of the first mode that took turns with this one: eager."""
        turns = [(bool(m.memory), m.frozen) for m in self.modes]
        return turns.index((bool(mode.memory), mode.frozen))

    def optimizer_seconds(self, mode: Mode) -> float:
        """Seconds of the median step between backward and the next forward."""
        return median_seconds(mode.stepper.seconds, self.warm_up)

    def optimizer_share(self, mode: Mode) -> float:
        """Unscaling, clipping, update, average and zeroing, as a part of the step."""
        return self.optimizer_seconds(mode) / self.seconds(mode)

    def state_megabytes(self, mode: Mode) -> float:
        """MB of the optimizer: its states, masters among them, and the averages."""
        return mode.stepper.state_bytes() / 1e6

    def curve_difference(self, mode: Mode) -> float | None:
        reference = next((m for m in self.modes if m.name == mode.reference), None)
        return None if reference is None else curve_difference(mode, reference)

    @property
    def title(self) -> str:
        return f"{self.args.model}, {self.args.data}, {len(self.modes[0].losses)} steps"

    @property
    def setting(self) -> str:
        extras = [self.args.optimizer]
        states, masters = self.args.optimizer_state, self.args.masters
        extras += [f"{states} states (fused)"] if states != "float32" else []
        extras += [f"16-bit weights, {masters} masters (fused)"] if masters != "none" else []
        extras += [f"batch {self.args.batch_size}"]
        extras += [f"clip {self.args.clip:g}"] if self.args.clip else []
        extras += [f"EMA {self.args.ema:g}"] if self.args.ema else []
        extras += [f"{self.args.accumulate} micro-batches"] * (self.args.accumulate > 1)
        extras += [f"{self.world_size} processes"] * (self.world_size > 1)
        extras += ["channels_last"] * self.args.channels_last + ["compiled"] * self.args.compile
        machine = f"{device_name(self.args.device)}, torch {torch.__version__}"
        return f"{', '.join(extras)}; one machine: {machine}"

    def show(self) -> None:
        console = wide_console()
        for mode in self.modes:
            if mode.fused:
                console.print(mode.conversion, markup=False, highlight=False)
        console.print(self._table())
        console.print(
            f"Medians of interleaved steps, the first {self.warm_up} left out; {self.setting}"
        )
        show_checks(console, self.checks, "The fusedtrain run does not follow the eager run.")
        for line in self._words():
            console.print(line, highlight=False)

    def _words(self) -> list[str]:
        """Sentences on the gains of the fused modes over the eager one in the same precision."""
        by_name = {mode.name: mode for mode in self.modes}
        return [
            what_was_won(
                mode,
                by_name[mode.reference],
                by_name.get(by_name[mode.reference].reference or ""),
                self.args.batch_size,
                self.seconds(mode) / self.seconds(by_name[mode.reference]),
                self.passed,
            )
            for mode in self.modes
            if mode.fused and not mode.frozen and mode.reference is not None
        ]

    def show_result(self) -> None:
        """The last three lines: losses, memory and time of the fused modes."""
        plain, *_, again = [m for m in self.modes if m.fused and not m.frozen and not m.memory]
        eager = next(mode for mode in self.modes if mode.name == again.reference)
        times = [self.seconds(mode) / self.seconds(eager) for mode in (plain, again)]
        batch = self.args.batch_size
        print(*result(plain, again, eager, batch, (times[0], times[1]), self.passed), sep="\n")

    def _table(self) -> Table:
        caption = (
            "optim. share: unscale, clip, update, EMA, zero_grad. optim. MB: states, masters, EMA. "
            f"memory: {self.memory_label}. * from eager, at any step; fusedtrain in the same "
            "precision, AMP from fp32"
        )
        headings = ("mode", "images/s", "ms/step", "optim.\nshare", "optim.\nMB", "memory,\nMB",
                    "test\nacc.", "loss\ndiff.*")  # fmt: skip
        return build_table(self.title, caption, headings, map(self._row, self.modes))

    def _row(self, mode: Mode) -> list[str]:
        difference = self.curve_difference(mode)
        return [
            mode.name,
            f"{self.images_per_second(mode):.1f}",
            f"{self.seconds(mode) * 1e3:.1f}",
            f"{self.optimizer_share(mode):.1%}",
            f"{self.state_megabytes(mode):.2f}",
            f"{self.memory(mode):.1f}",
            f"{mode.accuracy:.1%}",
            "-" if difference is None else f"{difference:.2g}",
        ]

    def results(self) -> dict[str, Any]:
        return {
            **surroundings(self.args.device, vars(self.args), self.checks),
            "processes": self.world_size,
            "modes": [
                {
                    "name": mode.name,
                    "compared_with": mode.reference,
                    "images_per_second": self.images_per_second(mode),
                    "ms_per_step": self.seconds(mode) * 1e3,
                    "optimizer_ms": self.optimizer_seconds(mode) * 1e3,
                    "optimizer_share": self.optimizer_share(mode),
                    "optimizer_state_mb": self.state_megabytes(mode),
                    "weights_mb": mode.stepper.weight_bytes() / 1e6,
                    "memory_mb": self.memory(mode),
                    "saved_for_backward_mb": mode.saved_bytes / 1e6,
                    "test_accuracy": plain(mode.accuracy),
                    "max_loss_difference": plain(self.curve_difference(mode)),
                    "seconds": [round(s, 6) for s in mode.seconds],
                    "losses": [plain(loss) for loss in mode.losses],
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

        # The fused curves lie on the eager one, so they are dashed and dotted.
        looks: tuple[tuple[str, Any], ...] = (("#8c8c8c", "-"), ("#3b75af", "-"))
        kept = [mode for mode in self.modes if mode.memory]
        trained = sum(not mode.frozen for mode in self.modes) - len(kept)
        looks = (*looks[: trained - 2], ("#e1812c", (0, (4, 2))), ("#2f7d4f", (0, (1, 1.5))))
        tuned = len(self.modes) - trained - len(kept)
        looks += (("#6a9f58", "-"), ("#b04f6f", (0, (4, 2))))[:tuned]
        looks += (
            ("#4d4d4d", "-"), ("#1f9e89", "-"), ("#d1495b", (0, (4, 2))), ("#a58fc4", (0, (1, 1))),
            ("#8a6d3b", (0, (6, 3))), ("#5b8c2a", (0, (3, 1, 1, 1))),
        )[: len(kept)]  # fmt: skip
        figure = plt.figure(figsize=(13, 7), layout="constrained")
        figure.suptitle(f"{self.title}\n", fontsize=14, fontweight="bold")
        figure.text(0.5, 0.945, self.setting, ha="center", va="top", fontsize=9, color="#555555")
        grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.7))
        bars = (
            (self.memory_label, [self.memory(m) for m in self.modes]),
            ("optimizer states and averages, MB", [self.state_megabytes(m) for m in self.modes]),
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


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
