"""`tune`: which switches make a model train faster on this machine, measured on the model.

`_switches` is the table of switches, `_recipe` their code, `_worker` runs that in a process of its
own, `_tuner` has the processes, `_search` the order, `_race` the clock.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..._text import counted
from ._budget import Budget, BudgetSpent, parse_budget
from ._job import checked_job, place_of
from ._process import TrialFailed
from ._recipe import recipe
from ._report import HEADINGS, TunedTrial, TuneReport, sentences
from ._search import greedy, product, size_of_product, switches_named
from ._switches import BATCH, NAMES, Config
from ._tuner import Tuner

__all__ = [
    "HEADINGS",
    "NAMES",
    "TrialFailed",
    "TuneReport",
    "TunedTrial",
    "parse_budget",
    "tune",
]

_MEANS = {
    "cpu": "memory: bytes kept for backward, parameters, buffers and optimizer state, counted",
    "cuda": "memory: torch.cuda.max_memory_allocated() of a step",
}


def tune(
    build_model: Callable[[], torch.nn.Module] | str,
    example: Sequence[int] | torch.Tensor,
    *,
    batch: int = 32,
    classes: int = 1000,
    tokens: int = 0,
    loader: Callable[..., Any] | str = "",
    optimizer: str = "sgd",
    lr: float | None = None,
    device: str | None = None,
    budget: str | float = "5m",
    full: bool = False,
    compile: bool = False,
    switches: Collection[str] = (),
    config: Mapping[str, Any] | None = None,
    begin: Callable[[str], None] | None = None,
) -> TuneReport:
    """Measures which switches of training pay for a model on this machine, and gives the recipe.

    Starts from plain fp32 and tries precision, cuDNN's autotuner, channels_last, `convert`,
    optimizers and the batch size, and where asked torch.compile and a loader's workers. Each trial
    is a fresh process, whose first losses must be those of fp32 within rounding; it then takes
    turns with the best so far. It is accepted if the interval of the gain is above 1, or if it
    saves memory and is not slower.

    Args:
        build_model: a function at the top of a file, without arguments, which returns a module; or
            ``"path.py:FUNCTION"``, ``"torchvision:NAME"``, ``"timm:NAME"``,
            ``"transformers:CONFIGCLASS"``. The model returns a tensor [batch, classes, ...].
        example: one sample, or its shape: ``(3, 224, 224)``.
        batch: samples in a step, until the batch size is tuned.
        classes: of a model of the three libraries.
        tokens: inputs are integers below this number; 0: normal random numbers.
        loader: called as ``build_loader(batch_size=, num_workers=, pin_memory=)``; random samples
            without it.
        optimizer: "sgd" (momentum 0.9) or "adamw".
        lr: the learning rate for `batch`; 0.1 for SGD, 1e-3 for AdamW.
        device: "cpu" or "cuda"; cuda if there is one.
        budget: "90s", "5m", "1h", or seconds.
        full: every combination, instead of one switch at a time.
        compile: try torch.compile, too, which costs up to minutes a trial.
        switches: the names of those that are tried; all by default.
        config: for ``transformers:``, arguments of the configuration.
        begin: called with the name of each trial when it begins.

    Raises:
        TypeError: `build_model` or `loader` cannot be imported by a fresh process.
        ValueError: an argument has no sense.
        RuntimeError: a trial, which imports the script, has called `tune`.
        TrialFailed: the plain model does not import, raises or does not fit; `traceback` is that of
            the user's code.
    """
    started = getattr(sys.modules["__main__"], "__spec__", None)
    if started is not None and started.name == f"{__name__}.__main__":
        raise RuntimeError(
            "tune was called while a trial imports the script: put the call behind "
            "if __name__ == '__main__':"
        )
    names = switches_named(switches)
    limit = Budget(parse_budget(budget) if isinstance(budget, str) else float(budget))
    job = checked_job(
        place_of(build_model, "build_model"), example, batch, classes, tokens,
        place_of(loader, "loader") if loader else "", optimizer, lr, device, config,
    )  # fmt: skip
    tuner = Tuner(job, limit, begin or (lambda stage: None), compile, os.cpu_count() or 1)
    report = TuneReport(job.model, job.device, memory_means=_MEANS[job.device])
    begun = time.monotonic()
    with tuner:
        try:
            _search(tuner, names, full, report)
        except KeyboardInterrupt:
            report.partial = "stopped"
        except BudgetSpent as spent:
            report.partial = str(spent)
    report.seconds = time.monotonic() - begun
    report.trials = tuner.trials
    report.device = tuner.known.get("device", job.device)
    if report.partial:
        report.partial += f"; {counted(len(report.trials), 'trial')} until then"
        if missing := tuner.untried(names, full):
            report.partial += f"; {missing}"
    if tuner.best_trial is not None:
        best = report.best = tuner.best_trial.config
        known = tuner.known
        report.recipe = recipe(job, best, known["target_shape"], known["classes"])
        report.summary = sentences(tuner.trials, tuner.best_trial, tuner.whole) + tuner.notes
    return report


def _search(tuner: Tuner, names: Collection[str], full: bool, report: TuneReport) -> None:
    start = tuner.prepare()
    if full:
        tuner.notes.append(f"The product has {size_of_product(tuner.facts, names)} trials.")
    best: Config = (product if full else greedy)(start, tuner.facts, names, tuner.judge)
    if BATCH in names:
        tuner.try_larger_batch(best)
    tuner.race_plain()
