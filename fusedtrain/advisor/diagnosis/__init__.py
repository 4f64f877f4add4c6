"""Finds faults that slow a training loop down or make it wrong, while the user's code runs.

`_watch`, `_modules`, `_operators` and `_graphs` look at a run; `_collect` and `_trials` make
`RunFacts` of it; the rules (`_rules_*.py`) decide by these alone: tests give them facts of a GPU.

A new rule is a function under `@rule` in one of `_rules_*.py`, a row of `docs/doctor.md`, a script
with the fault and one without in `scripts` of `tests/advisor/diagnosis`, and a row of `FAULTS` in
`test_rules_on_scripts.py` there (or of `CASES` in `test_facts.py`, where no run on a CPU has the
fault). A change for ``--fix`` is an action of `_edits.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .._scripts import DONE, ENDED, in_fresh_process
from ._all_rules import RULES
from ._collect import collect
from ._facts import RunFacts
from ._report import NO_THREAD, Diagnosis, decide, finding_lines as finding_lines
from ._rule import Change, Cost, Finding, Rule
from ._watch import Watch

__all__ = [
    "RULES",
    "Change",
    "Cost",
    "Diagnosis",
    "Finding",
    "Rule",
    "RunFacts",
    "decide",
    "doctor",
]

_FEWEST = 4  # steps: three are observed, and one is timed


def doctor(
    target: str | os.PathLike[str] | Callable[[], Any],
    arguments: Sequence[str] = (),
    *,
    steps: int = 20,
    model: nn.Module | None = None,
    assume_gpu: bool = False,
    trials: bool = True,
    script_prints_to_stderr: bool = False,
) -> Diagnosis:
    """Watches a training script, or a function that takes a step, and reports what costs it time,
    memory or accuracy: each with the line, the evidence and the cost.

    A script runs in a fresh process, as Python would run it, until an optimizer has taken `steps`
    steps; then it is ended. Its files are written as in any run. A function is called in this
    process until then; everything that watches it is removed afterwards.

    Args:
        target: path of a script, or a function without arguments that takes a training step.
        arguments: of the script.
        steps: of the optimizer that steps first. The first three are observed closely, and slow.
        model: look at this model alone; by default at every model that is called.
        assume_gpu: apply the rules for GPUs to a run on the CPU, too; their costs are not measured.
        trials: measure, after the run, the other ways on copies: the optimizer's step, `convert`.
        script_prints_to_stderr: what the script prints goes to stderr.

    Returns:
        A :class:`Diagnosis`. A script that raises has printed its own traceback; the diagnosis then
        has what was found before.

    Raises:
        FileNotFoundError: there is no such script.
        RuntimeError: `target` is a function that takes each step in a new thread.
        TypeError: `target` is neither a path nor a function.
        ValueError: `steps` is less than 4.

    Example:
        >>> import fusedtrain, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(inplace=True))
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
        >>> def step():
        ...     optimizer.zero_grad()
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        >>> report = fusedtrain.doctor(step, steps=4, trials=False)
        >>> [finding.rule for finding in report.findings if finding.cost.kind == "measured"]
        ['in-place-clone']
    """
    if steps < _FEWEST:
        raise ValueError(
            f"steps: at least {_FEWEST} (three are observed, others timed), got {steps}"
        )
    if callable(target):
        return _in_this_process(target, steps, model, assume_gpu, trials)
    if not isinstance(target, (str, os.PathLike)):
        raise TypeError(f"target: expected a path or a function, got {type(target).__name__}")
    if not Path(target).is_file():
        raise FileNotFoundError(f"target: there is no file {os.fspath(target)}")
    options = {"steps": steps, "assume_gpu": assume_gpu, "trials": trials}
    run = in_fresh_process(
        f"{__name__}:Watcher", options, os.fspath(target), arguments,
        script_prints_to_stderr=script_prints_to_stderr,
    )  # fmt: skip
    facts = RunFacts.from_json(run.results) if run.results else RunFacts()
    return decide(facts, end=run.end, status=run.status)


class Watcher:
    """Looks at a script for :func:`fusedtrain.advisor._scripts.run_until`."""

    def __init__(self, script: str, *, steps: int, assume_gpu: bool, trials: bool) -> None:
        self.watch = Watch(steps, assumed=assume_gpu, examples=trials)
        self.script, self.trials = script, trials

    def begin(self) -> None:
        self.watch.start()

    def step(self, count: int, optimizer: Optimizer) -> bool:
        return self.watch.after_step(optimizer)

    def finish(self) -> dict[str, Any]:
        """Makes no trials after Ctrl-C: nobody waits for them."""
        self.watch.stop()
        trials = self.trials and not isinstance(sys.exc_info()[1], KeyboardInterrupt)
        return collect(self.watch, self.script, trials=trials).to_json()


def _in_this_process(
    function: Callable[[], Any], steps: int, model: nn.Module | None, assumed: bool, trials: bool
) -> Diagnosis:
    watch = Watch(steps, assumed=assumed, examples=trials)
    enough = False

    def after_step(optimizer: Optimizer, *call: Any) -> None:
        nonlocal enough
        enough = watch.after_step(optimizer) or enough

    hook = register_optimizer_step_post_hook(after_step)
    watch.start()
    try:
        for _ in range(steps):
            function()
            if enough:
                break
    finally:
        hook.remove()
        watch.stop()
    if watch.ignored and not watch.taken:
        raise RuntimeError(f"target: {NO_THREAD}, or call doctor in the thread that trains.")
    return decide(collect(watch, "", trials=trials, model=model), end=DONE if enough else ENDED)
