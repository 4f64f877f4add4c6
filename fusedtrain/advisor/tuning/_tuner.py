"""Runs the trials of a search: processes, checks, races, the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ..._text import memory_text, time_text
from .._memory import SHARE, available_memory
from ._budget import Budget, BudgetSpent
from ._check import SEEDS, STEPS, Reference
from ._job import Job
from ._process import Process, TrialFailed
from ._race import LEAST, TURN, Race, race, rounds_in, verdict
from ._report import TunedTrial
from ._search import largest_batch, size_of_product
from ._switches import BATCH, EPS, SWITCHES, Conditions, Config, difference, plain

MOST_TIMES = 16  # the batch grows to no more than so many times the first one
_PATIENCE = 60  # seconds that any trial may take; a slow one may take _SLOW times the plain one
_SLOW = 20
_RACE_SHARE = 60  # of the budget is the time for a race: 5 s of 5 minutes
_TIMES_OF_BATCH = 12  # steps of a trial with another batch: warm-up, memory, and LEAST rounds

Begin = Callable[[str], None]


@dataclass
class RunningTrial:
    """A configuration whose process is alive."""

    config: Config
    process: Process
    first_step: float
    step: float  # seconds
    memory: float
    kept: float  # bytes that a step keeps for backward

    @property
    def steps_a_turn(self) -> int:
        return max(1, round(TURN / max(self.step, 1e-6)))


class Tuner:
    """Tries configurations within a budget.

    Everything that is measured is in `trials`, whatever ends the run.
    """

    def __init__(self, job: Job, budget: Budget, begin: Begin, compile: bool, cores: int) -> None:
        self.job, self._budget, self._tell = job, budget, begin
        self._stage = ""
        self.trials: list[TunedTrial] = []
        self.notes: list[str] = []
        self.whole: TunedTrial | None = None
        self._batch_decided = False
        self.facts = Conditions(job.device, loader=bool(job.loader), compile=compile, cores=cores)
        self.known: dict[str, Any] = {}
        self._processes = ExitStack()
        self._reference: Reference | None = None
        self.best_trial: TunedTrial | None = None

    def __enter__(self) -> Tuner:
        return self

    def __exit__(self, *error: Any) -> None:
        self._processes.close()

    # --- the first two processes ---

    def prepare(self) -> Config:
        """Measures what must be known, and the plain configuration, which it returns.

        Raises:
            TrialFailed: the model does not import, raises, or does not fit.
        """
        start = plain(self.job.batch)
        self._begin(f"{self.job.model}, plain fp32, and how far rounding moves its losses")
        with self._process(start) as probe:
            self.known = self._ask(probe, "probe")
            capability: Any = tuple(self.known["capability"])
            convolutions = self.known["convolutions"]
            self.facts = replace(self.facts, capability=capability, convolutions=convolutions)
            self._check_memory()
            self._reference = self._measure_reference(probe)
        self._base = self._best = self._start(start)
        seconds = self._turn(self._base)
        self.best_trial = TunedTrial(
            "plain fp32", start, True, "", 1 / seconds, None, None, self._base.memory,
            self._base.first_step,
        )  # fmt: skip
        self.trials.append(self.best_trial)
        self._budget.last_trial = self._budget.used / 2  # two processes, one of them with 4 runs
        return start

    def _check_memory(self) -> None:
        """Refuses a batch that would not fit into the CPU's memory before it is tried."""
        self.limit = self.known["memory"]
        if self.limit is None:
            memory = available_memory()
            self.limit = None if memory is None else SHARE * memory
        needed = self.known["fixed"] + self.known["kept_per_sample"] * self.job.batch
        if self.job.device == "cpu" and self.limit is not None and needed > self.limit:
            raise TrialFailed(
                f"a batch of {self.job.batch} would keep {memory_text(needed)}, and the limit is "
                f"{memory_text(self.limit)} ({SHARE:.0%} of the memory that is available)",
                out_of_memory=True,
            )

    def _measure_reference(self, probe: Process) -> Reference:
        precisions = ["fp32", *(v.name for v in SWITCHES[0].others(self.facts))]
        exact, *others = (
            self._ask(probe, "losses", steps=STEPS, seed=seed)["losses"] for seed in (0, 1)
        )
        if others[0] != exact:  # something draws: one difference says little
            others += (
                self._ask(probe, "losses", steps=STEPS, seed=seed)["losses"]
                for seed in range(2, SEEDS + 1)
            )
        sizes = dict.fromkeys(EPS[name] for name in precisions)
        runs = {
            eps: self._ask(probe, "losses", steps=STEPS, rounding=eps)["losses"] for eps in sizes
        }
        return Reference(exact, others, {name: runs[EPS[name]] for name in precisions})

    # --- a trial ---

    def judge(self, best: Config, trial: Config) -> bool:
        """Races the two; whether the trial is the new best.

        Raises:
            BudgetSpent: it would not fit, or was cut.
        """
        assert best == self._best.config
        larger = trial[BATCH] / best[BATCH] - 1
        self._budget.require(_TIMES_OF_BATCH * larger * self._best.step)
        name = difference(trial, best)
        self._begin(name)
        begun = time.monotonic()
        running: RunningTrial | None = None
        try:
            running = self._start(trial)
            result = self._race(self._best, running)
        except TrialFailed as failure:
            if running is not None:
                running.process.kill()
            self.trials.append(TunedTrial(name, trial, False, failure.reason))
            return False
        finally:
            self._budget.last_trial = time.monotonic() - begun
        # Memory is compared for a sample: of a larger batch it is not less.
        decided = verdict(result, self._best.memory / best[BATCH] * trial[BATCH], running.memory)
        done = _tuned(name, running, result, *decided)
        self.trials.append(done)
        loser = self._best if decided.accepted else running
        if loser is not self._base:
            loser.process.kill()
        if decided.accepted:
            self._best, self.best_trial = running, done
        return decided.accepted

    def race_plain(self) -> None:
        """Times the gain of all accepted switches together, where the budget allows."""
        if self._best is self._base:
            return
        pair = self._base, self._best
        turns = 2 * LEAST * sum(one.step * one.steps_a_turn for one in pair)
        if max(turns, self._budget.seconds / _RACE_SHARE) >= self._budget.left:
            return
        self._begin("the best against plain fp32")
        try:
            result = self._race(*pair)
        except TrialFailed as failure:
            self.notes.append(f"The best against plain fp32 was not timed: {failure.reason}.")
            return
        self.whole = _tuned(self._stage, self._best, result, True, "")

    def try_larger_batch(self, best: Config) -> None:
        """Races the largest batch that fits."""
        try:
            batch, why = self._largest()
        except TrialFailed as failure:
            self.notes.append(f"No larger batch was tried: {failure.reason}.")
            self._batch_decided = True
            return
        if batch == best[BATCH]:
            self.notes.append(f"No larger batch than {batch} was tried: {why}.")
        else:
            self.judge(best, {**best, BATCH: batch})
            self.notes.append(f"The largest batch that was tried is {batch}: {why}.")
        self._batch_decided = True

    def untried(self, names: Collection[str], full: bool) -> str:
        """The values of switches, or how many combinations, that were left out."""
        if not self.trials:
            return "no switch was tried"
        missing = []
        if full:
            total = size_of_product(self.facts, names)
            left = total - len(self.trials[1:])
            if left > 0:
                missing.append(f"{left} of {total} combinations")
        else:
            measured = {pair for trial in self.trials for pair in trial.config.items()}
            for switch in SWITCHES:
                pairs = [(switch.name, value.name) for value in switch.others(self.facts)]
                if switch.name in names:
                    missing += [" ".join(pair) for pair in pairs if pair not in measured]
        if BATCH in names and not self._batch_decided:
            missing.append("a larger batch")
        return f"not tried: {', '.join(missing)}" if missing else ""

    def _largest(self) -> tuple[int, str]:
        """The largest batch, and what limits it."""
        base, most = self.job.batch, MOST_TIMES * self.job.batch
        why = f"{MOST_TIMES} times the first batch is the most"
        sample = self._best.step / base
        affordable = int(self._budget.left / (_TIMES_OF_BATCH * sample)) - base
        if affordable < most:
            most, why = max(affordable, base), "a larger one would not fit into the budget"
        if self.job.device == "cuda":
            batch = self._largest_on_gpu(base, most)
            return batch, why if batch > most - max(1, base // 4) else "it fills the GPU's memory"
        if self.limit is None:
            return base, "this system does not tell how much memory is available"
        fixed, each = self._best.memory - self._best.kept, self._best.kept / base
        limit = self.limit
        batch = largest_batch(lambda n: fixed + each * n <= limit, base, most)
        if batch + max(1, base // 4) <= most:
            why = (
                f"bytes kept for backward, parameters and optimizer may take {memory_text(limit)}, "
                f"{SHARE:.0%} of the memory that was available"
            )
        return batch, why

    def _largest_on_gpu(self, base: int, most: int) -> int:
        """Steps of growing batches, in a process of their own beside the parked best one."""
        self._begin("the largest batch that fits")
        with self._process(self._best.config) as process:
            self._ask(process, "losses", steps=1)

            def fits(batch: int) -> bool:
                return bool(self._ask(process, "fits", batch=batch)["fits"])

            return largest_batch(fits, base, most)

    # --- pieces ---

    def _begin(self, stage: str) -> None:
        self._stage = stage
        self._tell(stage)

    def _process(self, config: Config) -> Process:
        return Process(self.job, config, self.known)

    def _ask(self, process: Process, what: str, **arguments: Any) -> dict[str, Any]:
        timeout = self._budget.left
        if self.trials:
            patience = max(_PATIENCE, _SLOW * self._base.step * STEPS)
            timeout = min(timeout, patience)
        try:
            return process.ask(what, timeout, **arguments)
        except TrialFailed as failure:
            if not failure.timed_out or self._budget.left > 0:
                raise
            budget = time_text(self._budget.seconds)
            raise BudgetSpent(f"the budget of {budget} ended during {self._stage}") from None

    def _start(self, config: Config) -> RunningTrial:
        """A process that has built the configuration, and whose losses are right."""
        process = self._processes.enter_context(self._process(config))
        try:
            seen = self._ask(process, "losses", steps=STEPS)
            assert self._reference is not None
            # Another batch has other losses; its switches were checked with the first one.
            if config[BATCH] == self.job.batch:
                complaint = self._reference.complaint(seen["losses"], config["precision"])
                if complaint:
                    raise TrialFailed(complaint)
            memory = self._ask(process, "memory")
        except TrialFailed:
            process.kill()
            raise
        return RunningTrial(
            config, process, seen["first_step"], seen["step"], memory["memory"], memory["kept"]
        )

    def _turn(self, running: RunningTrial) -> float:
        answer = self._ask(running.process, "turn", steps=running.steps_a_turn)
        return float(answer["seconds"]) / running.config[BATCH]

    def _race(self, best: RunningTrial, trial: RunningTrial) -> Race:
        for one in (best, trial):  # a first turn, which is not counted: it says how many rounds fit
            one.step = self._turn(one) * one.config[BATCH]
        seconds = self._budget.seconds / _RACE_SHARE
        turns = (one.step * one.steps_a_turn for one in (best, trial))
        rounds = rounds_in(seconds, *turns)
        return race(lambda: self._turn(best), lambda: self._turn(trial), rounds)


def _tuned(
    name: str, running: RunningTrial, result: Race, accepted: bool, reason: str
) -> TunedTrial:  # fmt: skip
    return TunedTrial(
        name, running.config, accepted, reason, 1 / result.trial, result.gain, result.interval,
        running.memory, running.first_step, result.rounds,
    )  # fmt: skip
