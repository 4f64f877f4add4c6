"""Repeat published experiments: measure, store, show ours beside the published numbers, judge.

    python -m benchmarks.experiments [NAME ...] [--device cuda] [--quick] [--resume] [--seed 0]
    python -m benchmarks.experiments --list
    python -m benchmarks.experiments --docs    # writes docs/experiments.md and docs/experiments/

Results go to $RESULTS_DIR/experiments/<device>.json (default benchmarks/results), each run as soon
as it is measured. Exit code: 0, 1 after an experiment that failed, 2 after a wrong option, 130
after Ctrl-C, which keeps what was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.experiments import FOLDER, NAMES
from benchmarks.experiments.experiment import Experiment, Run, Settings, Verdict
from benchmarks.experiments.screen import Screen

if TYPE_CHECKING:  # the import of torch takes seconds, and the first line comes before
    from benchmarks.experiments.store import Result

INTERRUPTED = 130


def present() -> list[str]:
    """The names of the experiments whose file is there."""
    return [name for name in NAMES if Path(__file__).with_name(f"{name}.py").exists()]


def experiment_of(name: str) -> Experiment:
    """The experiment of this name."""
    experiment: Experiment = importlib.import_module(f"benchmarks.experiments.{name}").EXPERIMENT
    return experiment


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.experiments", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all experiments")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="seconds; the numbers mean nothing")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights")
    parser.add_argument(
        "--resume", action="store_true", help="skip what is measured with this torch and setup"
    )
    parser.add_argument("--also", type=Path, help="a folder that gets the same results")
    parser.add_argument("--list", action="store_true", help="names and questions")
    parser.add_argument("--docs", action="store_true", help="write docs/experiments*")
    options = parser.parse_args(arguments)
    names = present()
    unknown = [name for name in options.names if name not in names]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}. The experiments are: {', '.join(names)}")
    chosen = [name for name in names if name in (options.names or names)]
    screen = Screen()
    if options.docs:
        for path in write_docs():
            screen.line(f"wrote {path}")
        return 0
    if options.list:
        for name in chosen:
            screen.line(f"{name}: {experiment_of(name).question}")
        return 0
    many = f"{len(chosen)} experiment{'s' * (len(chosen) != 1)}"
    screen.line(f"{many} on {options.device}: {', '.join(chosen)}")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    settings = Settings(options.device, options.quick, options.seed)
    return _run_all(chosen, settings, screen, options.resume, options.also)


def write_docs() -> list[str]:
    """Writes docs/experiments.md and docs/experiments/; returns the paths in docs/."""
    from benchmarks.experiments.page import DOCS

    files = docs()
    for name, text in files.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text, encoding="utf-8")
    return [*files]


def docs() -> dict[str, str]:
    """The text of docs/experiments.md and of the files in docs/experiments/."""
    from benchmarks.experiments import page, store

    experiments = [experiment_of(name) for name in present()]
    devices = store.stored(page.ROOT / "benchmarks" / "results")
    return page.render(page.TEMPLATE.read_text(encoding="utf-8"), experiments, devices)


def _run_all(
    names: Sequence[str], settings: Settings, screen: Screen, resume: bool, also: Path | None
) -> int:
    from benchmarks.experiments import store

    path = store.path_of(settings.device, settings.quick)
    paths = [path] if also is None else [path, also / FOLDER / path.name]
    failed = []
    for name in names:
        try:
            result = _run(name, settings, screen, paths, resume)
        except KeyboardInterrupt:
            screen.line(f"stopped. What was measured is in {path}; --resume goes on.")
            return INTERRUPTED
        if result.error:
            failed.append(name)
    screen.line(f"results: {path}")
    if failed:
        screen.line(f"failed: {', '.join(failed)}", "bold red")
    return int(bool(failed))


def _run(
    name: str, settings: Settings, screen: Screen, paths: Sequence[Path], resume: bool
) -> Result:
    """Measures an experiment and shows it. Errors of the experiment are part of the result."""
    from benchmarks.experiments import store

    result = store.new_result(settings.device, "", settings.seed)
    experiment, before = None, None
    begun = time.perf_counter()
    screen.line(f"\n== {name}", "bold")
    try:
        experiment = experiment_of(name)
        result.setup = experiment.setup(settings)
        screen.line(f"{experiment.title}. {experiment.question}\n{result.setup}")
        if resume:
            before = store.load(paths[0]).get(name)
        if before is not None and before.finished and before.same_kind(result):
            screen.line(f"measured on {before.date}, so that --resume does not measure again")
            result = before
        else:
            with _clean_torch(settings.seed):
                _measure(experiment, settings, screen, paths, result, begun)
            result.verdicts = _verdicts(experiment, settings, result)
    except Exception as error:
        traceback.print_exc()
        result.error = f"{type(error).__name__}: {error}"
    finally:  # Ctrl-C, too
        if experiment is not None and result.runs:
            _show(experiment, result, screen)
    if result is not before:
        result.seconds = time.perf_counter() - begun
        store.save(paths, name, result)
    else:  # a folder of ``--also`` may be a new one
        store.save(paths[1:], name, result)
    if result.error:
        screen.line(f"{name} FAILED: {result.error}", "bold red")
    return result


def _measure(
    experiment: Experiment,
    settings: Settings,
    screen: Screen,
    paths: Sequence[Path],
    result: Result,
    begun: float,
) -> None:
    from benchmarks.experiments.page import run_line
    from benchmarks.experiments.store import save

    with contextlib.closing(_closable(experiment, settings)) as runs:
        for run in runs:
            result.runs.append(run)
            result.seconds = time.perf_counter() - begun
            save(paths, experiment.name, result)
            screen.line(f"{result.seconds:7.1f} s  {run_line(experiment, run)}")
    labels = [run.label for run in result.runs]
    if len({*labels}) != len(labels):
        raise ValueError(f"two runs of {experiment.name} have the same label: {labels}")


def _closable(experiment: Experiment, settings: Settings) -> Generator[Run, None, None]:
    """The runs as a generator: closed after Ctrl-C, so that processes and files are closed."""
    yield from experiment.runs(settings)


def _verdicts(experiment: Experiment, settings: Settings, result: Result) -> list[Verdict]:
    verdicts = [*experiment.judge({run.label: run for run in result.runs}, settings)]
    if len(verdicts) != len(experiment.claims):
        raise ValueError(f"{len(verdicts)} verdicts for {len(experiment.claims)} claims")
    return verdicts


def _show(experiment: Experiment, result: Result, screen: Screen) -> None:
    from benchmarks.experiments.page import machine_words, table, verdict_words

    screen.line(f"\n{experiment.title} ({machine_words(result)})", "bold")
    screen.table(*table(experiment, result.runs))
    styles = {True: "green", False: "red", None: "yellow"}
    if not result.finished:
        screen.line("no verdict: not all runs were measured", "yellow")
    for claim, verdict in zip(experiment.claims, result.verdicts, strict=False):
        screen.line(f"Published ({claim.where}): {claim.text}")
        screen.line(f"  -> {verdict_words(verdict)}", styles[verdict.holds])


@contextlib.contextmanager
def _clean_torch(seed: int) -> Iterator[None]:
    """An experiment starts from this seed, and leaves settings of torch as they were."""
    import torch

    threads, autotune = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = autotune
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
