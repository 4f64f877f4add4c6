"""Findings of a run of `tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..._text import column_lines, memory_text
from ._switches import BATCH, Config, difference


@dataclass(frozen=True)
class TunedTrial:
    """One configuration, as it was measured.

    Args:
        name: the switches in which it differs from the best before it.
        config: all switches.
        accepted: whether it became the best.
        reason: why, or why not.
        images_per_second: samples a second; None where it was not timed.
        gain: the time of the best before it / its time, for a sample; above 1 it is faster.
        interval: of the gain: 99 %; of fewer than 8 rounds, their range.
        memory: bytes, see `TuneReport.memory_means`.
        first_step: seconds in which the model was built, the switches applied, a step taken.
        rounds: in which both took a turn.
    """

    name: str
    config: Config
    accepted: bool
    reason: str
    images_per_second: float | None = None
    gain: float | None = None
    interval: tuple[float, float] | None = None
    memory: float | None = None
    first_step: float | None = None
    rounds: int = 0


@dataclass
class TuneReport:
    """The result of :func:`fusedtrain.tune`. ``str()`` is a table, a summary and the recipe.

    Args:
        model: as it was named.
        device: its name.
        trials: in their order; the first is the plain configuration in fp32.
        best: the configuration of the recipe.
        recipe: a script, ready to paste.
        summary: what was won, in sentences.
        partial: why trials are missing; empty where all were made.
        memory_means: what `memory` counts.
        seconds: that the run took.
    """

    model: str
    device: str
    trials: list[TunedTrial] = field(default_factory=list)
    best: Config = field(default_factory=dict)
    recipe: str = ""
    summary: list[str] = field(default_factory=list)
    partial: str = ""
    memory_means: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The report as values of JSON's types."""
        return asdict(self)

    def rows(self) -> list[list[str]]:
        """The trials as text; `HEADINGS` are the names of the columns."""
        return [_row(trial) for trial in self.trials]

    def __str__(self) -> str:
        rows = [list(HEADINGS), *self.rows()]
        lines = column_lines(rows, range(len(HEADINGS)))
        if self.partial:
            lines.insert(0, f"PARTIAL: {self.partial}")
        return "\n".join([*lines, "", *self.summary, "", self.recipe])


HEADINGS = ("trial", "images/s", "gain", "interval", "memory", "first step", "")


def _row(trial: TunedTrial) -> list[str]:
    interval = trial.interval
    return [
        trial.name,
        f"{trial.images_per_second:.4g}" if trial.images_per_second else "",
        f"{trial.gain:.2f}x" if trial.gain else "",
        f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "",
        memory_text(trial.memory) if trial.memory is not None else "",
        f"{trial.first_step:.2f} s" if trial.first_step is not None else "",
        f"{'accepted' if trial.accepted else 'refused'}: {trial.reason}" if trial.reason else "",
    ]


def sentences(
    trials: Sequence[TunedTrial], best: TunedTrial, whole: TunedTrial | None
) -> list[str]:
    """The gain over the plain configuration, the first of the trials. ``whole`` is the last race,
    of plain against best; where one trial alone was accepted, this trial was such a race, too."""
    plain, *accepted = (trial for trial in trials if trial.accepted)
    if len(accepted) == 1:
        whole = whole or accepted[0]
    if best is plain:
        return ["Nothing was won: no switch is surely faster than plain fp32, or saves memory."]
    changed = difference(best.config, plain.config)
    text = f"Best: {changed}."
    if whole is not None and whole.gain and whole.interval:
        low, high = whole.interval
        doubt = "; not surely more" if low <= 1 <= high else ""
        text += (
            f" It trains {whole.gain:.2f}x as many images per second as the plain configuration "
            f"({low:.2f}-{high:.2f}, in turns{doubt})"
        )
    else:
        text += " Its gain over the plain configuration was not measured"
    if best.memory and plain.memory:
        share = (best.memory / best.config[BATCH]) / (plain.memory / plain.config[BATCH])
        text += f"; memory for an image: {share:.2f}x"
    return [text + "."]
