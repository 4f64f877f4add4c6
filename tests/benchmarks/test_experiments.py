"""The command of the published experiments: what is run, stored, resumed, shown and written."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.experiments import (
    FOLDER,
    NAMES,
    amp_autotune,
    checkpointing,
    command,
    conv_bias,
    data_loading,
    fused_gelu,
    page,
    store,
    zero_grad,
)
from benchmarks.experiments.experiment import Claim, Column, Experiment, Run, Settings, Verdict
from benchmarks.run import results_path
from fusedtrain._text import column_lines
from helpers import ROOT, environment
from helpers.commands import heed_ctrl_c
from helpers.experiments import CPU, CUDA, Inline, measured
from helpers.processes import run_python

CLAIMS = (
    Claim("A takes 3 ms and C takes 4.", "GTX 980, 2015", {"a": {"ms": 3}, "c": {"ms": 4}}),
    Claim("B needs less memory | much less.", "RTX 2080 Ti", {"b": {"mb": 1234.5}}),
)
RUNS = (Run("a", {"ms": 1.257, "mb": 2000}), Run("b", {"ms": 2.0}, "no memory"))
VERDICTS = (Verdict(True, "A takes 1.26 ms."), Verdict(None, "No memory was measured."))


def made_up(
    name: str = "one",
    runs: Callable[[Settings], Iterator[Run]] = lambda settings: iter(RUNS),
    verdicts: Sequence[Verdict] = VERDICTS,
    setup: str = "Nothing is trained.",
) -> Experiment:
    columns = {"ms": Column("ms/step", 2), "mb": Column("MB", 0), "never": Column("never")}
    return Experiment(
        name, f"Title of {name}", "Is A faster?", lambda settings: f"{setup} {settings.device}.",
        columns, CLAIMS, runs, lambda measured, settings: verdicts,
    )  # fmt: skip


@pytest.fixture
def install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Callable[..., tuple[int, str]]]:
    """Puts experiments in the place of ours; returns the command."""
    monkeypatch.setenv("RESULTS_DIR", str(tmp_path))

    def put(*experiments: Experiment) -> Callable[..., int]:
        by_name = {experiment.name: experiment for experiment in experiments}
        monkeypatch.setattr(command, "present", lambda: [*by_name])
        monkeypatch.setattr(command, "experiment_of", by_name.__getitem__)
        return lambda *words: command.main(words)

    return put


def results(quick: bool = False) -> dict[str, store.Result]:
    return store.load(store.path_of("cpu", quick))


# --- which experiments there are ---


def test_every_name_has_a_file_and_every_experiment_a_name() -> None:
    folder = Path(command.__file__).parent
    files = {p.stem for p in folder.glob("*.py") if "\nEXPERIMENT = " in p.read_text()}
    assert files == {*NAMES}
    assert command.present() == [*NAMES]


@pytest.mark.parametrize("name", command.present())
def test_an_experiment_is_whole(name: str) -> None:
    experiment = command.experiment_of(name)
    assert experiment.name == name
    assert experiment.claims
    for device in ("cpu", "cuda"):
        for quick in (False, True):
            assert experiment.setup(Settings(device, quick)).endswith(".")
            # Nothing was measured: nothing can be told, and nothing raises.
            verdicts = experiment.judge({}, Settings(device, quick))
            assert [v.holds for v in verdicts] == [None] * len(experiment.claims)
            assert all(verdict.words for verdict in verdicts)
    for claim in experiment.claims:
        assert claim.text.endswith(".")
        assert {key for row in claim.numbers.values() for key in row} <= experiment.columns.keys()


PASSES = ("forward", "forward+backward")
LABELS: dict[str, list[str]] = {
    "data_loading": ["0 workers", "1 worker", data_loading.READY],
    "conv_autotune": [f"{p}, autotuner {switch}" for p in PASSES for switch in ("off", "on")],
    "zero_grad": [
        f"{of}, {who}: {way}"
        for of in ("ResNet-50", "small tensors")
        for who, way in zero_grad.WAYS
    ],
    "fused_gelu": [f"{p}, {who}" for p in PASSES for who in fused_gelu.MAKERS],
    "checkpointing": [
        checkpointing.EAGER, checkpointing.CHECKPOINT, checkpointing.STORE,
        checkpointing.RECOMPUTE, checkpointing.FORWARD,
    ],
    "conv_bias": [conv_bias.BIAS, conv_bias.NO_BIAS, conv_bias.DROPPED],
}  # fmt: skip
# Number of the runs of the others.
RUNS_OF = {"accumulation": 8, "large_batch": 4, "eight_bit_states": 6, "retained_graph": 12,
           "data_parallel": 3, "networks": 4, "amp_autotune": 5}  # fmt: skip
PROGRAM = "fp16_resnet"  # whose quick run is test_an_experiment_as_a_program
LONG = {"accumulation", "large_batch", "data_parallel", "networks", "amp_autotune",
        "amp_kernels"}  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG)) for n in NAMES if n != PROGRAM]
)
def test_a_quick_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp_autotune, "Worker", Inline)  # processes import torch for seconds
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # which a worker switches on
    experiment = command.experiment_of(name)
    runs, verdicts = measured(name)
    assert len(verdicts) == len(experiment.claims)
    for run in runs.values():
        assert run.numbers.keys() - {"gain", "least", "most"} <= experiment.columns.keys()
        assert run.numbers or run.note
        assert all(math.isfinite(number) for number in run.numbers.values())
        if "gain" in run.numbers:
            low, high = (
                next(run.numbers[key] for key in keys if key in run.numbers)
                for keys in (("gain_low", "least", "low"), ("gain_high", "most", "high"))
            )
            assert low <= run.numbers["gain"] <= high
    assert len(runs) == RUNS_OF.get(name, len(runs))
    if name in LABELS:
        assert list(runs) == LABELS[name]
        keys = set().union(*(run.numbers for run in runs.values()))
        assert keys >= experiment.columns.keys() - {"copy"}
        assert all(claim.numbers.keys() <= runs.keys() for claim in experiment.claims)
        for settings in (CPU, CUDA):
            assert len(experiment.judge(runs, settings)) == len(experiment.claims)


def test_an_unknown_name_and_an_unknown_device(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = install(made_up("one"), made_up("two"))
    with pytest.raises(SystemExit) as ended:
        run("one", "three")
    assert ended.value.code == 2
    assert "unknown: three. The experiments are: one, two" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        run("--device", "tpu")
    assert ended.value.code == 2
    assert results() == {}


def test_the_list(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert install(made_up("one"), made_up("two"))("--list") == 0
    assert capsys.readouterr().out == "one: Is A faster?\ntwo: Is A faster?\n"


# --- a run ---


def test_a_run_is_stored_and_shown(
    install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = install(made_up("one"), made_up("two"))
    also = tmp_path / "also"
    assert run("two", "--seed", "3", "--also", str(also)) == 0
    (result,) = results().values()
    assert (result.runs, result.verdicts) == ([*RUNS], [*VERDICTS])
    assert result.setup == "Nothing is trained. cpu."
    assert result.machine["seed"] == 3
    assert result.finished
    path = store.path_of("cpu", False)
    assert path == tmp_path / FOLDER / results_path("cpu").name
    assert (also / FOLDER / path.name).read_text() == path.read_text()
    output = capsys.readouterr().out
    assert "a: ms/step 1.26, MB 2,000" in output
    assert "-> holds here: A takes 1.26 ms." in output
    assert "-> cannot be told here: No memory was measured." in output
    # A smoke test does not replace what was measured.
    assert run("one", "--quick") == 0
    assert [*results()] == ["two"]
    assert [*results(quick=True)] == ["one"]


def test_each_run_is_stored_as_soon_as_it_is_measured(install: Any) -> None:
    seen = []

    def runs(settings: Settings) -> Iterator[Run]:
        for run in RUNS:
            yield run
            seen.append([r.label for r in results()["one"].runs])

    assert install(made_up(runs=runs))() == 0
    assert seen == [["a"], ["a", "b"]]


def test_an_experiment_that_fails_stops_no_other(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(settings: Settings) -> Iterator[Run]:
        yield RUNS[0]
        raise RuntimeError("out of memory")

    def twice(settings: Settings) -> Iterator[Run]:
        yield from (RUNS[0], RUNS[0])

    wrong = made_up("wrong", verdicts=VERDICTS[:1])
    run = install(made_up("broken", broken), wrong, made_up("twice", twice), made_up("one"))
    assert run() == 1
    errors = {name: result.error for name, result in results().items()}
    assert errors["broken"] == "RuntimeError: out of memory"
    assert errors["wrong"] == "ValueError: 1 verdicts for 2 claims"
    assert "the same label" in errors["twice"]
    assert errors["one"] == ""
    assert [r.label for r in results()["broken"].runs] == ["a"]
    assert not results()["broken"].finished
    assert "failed: broken, wrong, twice" in capsys.readouterr().out


def test_resume_skips_what_is_finished_and_of_the_same_kind(install: Any) -> None:
    begun: list[str] = []

    def counted(name: str, **more: Any) -> Experiment:
        def runs(settings: Settings) -> Iterator[Run]:
            begun.append(name)
            yield from RUNS
            if name == "broken" and len(begun) == 2:
                raise RuntimeError

        return made_up(name, runs, **more)

    assert install(counted("one"), counted("broken"))() == 1
    assert install(counted("one"), counted("broken"))("--resume") == 0
    assert begun == ["one", "broken", "broken"]
    assert install(counted("one"), counted("broken"))("--resume") == 0
    assert len(begun) == 3
    assert install(counted("one", setup="Another network."))("--resume") == 0
    assert install(counted("one", setup="Another network."))("--resume", "--seed", "1") == 0
    assert install(counted("one", setup="Another network."))("--seed", "1") == 0
    assert begun[3:] == ["one"] * 3


@pytest.mark.parametrize("change", ["torch", "threads", "setup"])
def test_results_of_another_kind(change: str) -> None:
    first, second = (store.new_result("cpu", "setup", 0) for _ in range(2))
    assert first.same_kind(second)
    if change == "setup":
        second.setup = "another"
    else:
        second.machine[change] = "another"
    assert not first.same_kind(second)


# --- as processes ---

SLOW = """
import time
from benchmarks.experiments import command
import test_experiments

def runs(settings):
    try:
        yield test_experiments.RUNS[0]
        print("slow now", flush=True)
        time.sleep(100)
    finally:
        print("closed", flush=True)

command.present = lambda: ["one"]
command.experiment_of = lambda name: test_experiments.made_up(runs=runs)
raise SystemExit(command.main([]))
"""


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(RESULTS_DIR=str(tmp_path), OMP_NUM_THREADS="1")
    variables["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], cwd=tmp_path, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first == "1 experiment on cpu: one\n"  # before the seconds of torch's import
    for line in process.stdout:
        if line == "slow now\n":
            break
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == command.INTERRUPTED, errors
    assert "Traceback" not in errors
    assert output.startswith("closed\n")
    assert "no verdict: not all runs were measured" in output
    assert "--resume goes on" in output
    monkeypatch.setenv("RESULTS_DIR", str(tmp_path))
    result = results()["one"]
    assert [run.label for run in result.runs] == ["a"]
    assert not result.finished


@pytest.mark.slow
@pytest.mark.skipif("fp16_resnet" not in command.present(), reason="needs fp16_resnet.py")
def test_an_experiment_as_a_program(tmp_path: Path) -> None:
    done = run_python(
        "-m", "benchmarks.experiments", PROGRAM, "--quick", cwd=ROOT, timeout=240, trains=True,
        env=environment(RESULTS_DIR=str(tmp_path), OMP_NUM_THREADS="1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ((name, result),) = store.load(next(tmp_path.glob(f"{FOLDER}/*-quick.json"))).items()
    assert name == "fp16_resnet"
    assert len(result.runs) == 3
    assert all(run.numbers["mb"] > 0 and run.numbers["ms"] > 0 for run in result.runs)
    assert "ResNet-18, half, fusedtrain" in done.stdout
    assert "holds here" in done.stdout or "does not hold" in done.stdout


# --- tables and the page ---


def test_ours_stand_beside_the_published_numbers() -> None:
    headings, rows, words = page.table(made_up(), RUNS)
    assert headings == [
        "run", "ms/step", "ms/step, published (GTX 980, 2015)", "MB",
        "MB, published (RTX 2080 Ti)", "note",
    ]  # fmt: skip
    assert rows == [
        ["a", "1.26", "3.00", "2,000", "-", ""],
        ["b", "2.00", "-", "-", "1,234", "no memory"],
        ["c", "-", "4.00", "-", "-", "not measured"],
    ]
    assert words == {0, 5}
    lines = column_lines([headings, *rows], words)
    assert len(lines) == 4
    assert lines[1].startswith("a       1.26  ")
    assert lines[2].endswith("no memory")


def test_the_command_prints_without_rich(
    install: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    assert install(made_up())() == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("run  ms/step  ms/step, published") for line in lines)
    assert "  -> holds here: A takes 1.26 ms." in lines


def result_of(device_type: str, **fields: Any) -> store.Result:
    machine = {"device": "Chip", "device_type": device_type, "backend": "default",
               "torch": "2.13.0", "threads": 2, "seed": 0}  # fmt: skip
    values = {"runs": [*RUNS], "verdicts": [*VERDICTS]} | fields
    return store.Result(machine, "2026-11-23T10:00:00+00:00", "Nothing is trained.", **values)


def test_the_pages() -> None:
    devices = [
        {"one": result_of("cpu")},
        {"two": result_of("cuda", verdicts=[], error="RuntimeError: a | b")},
    ]
    experiments = [made_up("one"), made_up("two"), made_up("three")]
    files = page.render("# Title\n\n{{ experiments }}\n", experiments, devices)
    summary, one, two, three = (
        files[name]
        for name in (
            "experiments.md", "experiments/one.md", "experiments/two.md", "experiments/three.md",
        )
    )  # fmt: skip
    overview, *sections = summary.split("\n## ")
    assert overview.startswith(
        "# Title\n\n| Chip: claim | holds here |\n| --- | --- |\n| [Title of"
    )
    assert overview.count("(experiments/one.md)") == len(experiments[0].claims)
    assert "(experiments/two.md)" not in overview  # it failed: there is no verdict
    assert sections[0].startswith("Title of one\n\nIs A faster?\n\n![Title of one](")
    assert "](experiments/three.md)" in sections[2]
    assert "![" not in sections[2]  # nothing is measured
    assert one.startswith("# Title of one\n\n![Title of one](one.svg)\n\nIs A faster?\n\n- Pub")
    assert "**Chip, 2 threads, torch 2.13.0, 2026-11-23.** Nothing is trained." in one
    assert "| a | 1.26 | 3.00 | 2,000 | - |  |" in one
    assert "- A takes 3 ms and C takes 4. **Holds here:** A takes 1.26 ms." in one
    assert "**Cannot be told here:** No memory was measured." in one
    assert "Not measured yet on a GPU." in one
    assert "Repeat: `python -m benchmarks.experiments one`" in one
    assert "**Chip, torch 2.13.0, 2026-11-23.**" in two
    assert "The experiment failed: RuntimeError: a \\| b" in two
    assert "Not measured yet on a CPU." in two
    assert "Not measured yet on a CPU and a GPU." in three
    assert ">1.26<" in files["experiments/one.svg"]
    assert "experiments/three.svg" not in files
    cut = page.render(
        "{{ experiments }}", experiments[:1], [{"one": result_of("cpu", verdicts=[])}]
    )
    assert "stopped before its end" in cut["experiments/one.md"]
    parts = [Verdict(False, "digits: 2 of 3; torch.compile: 4; slower"), VERDICTS[1]]
    one = page.render(
        "{{ experiments }}", experiments[:1], [{"one": result_of("cpu", verdicts=parts)}]
    )
    assert ":** Digits: 2 of 3. torch.compile: 4. Slower.\n" in one["experiments/one.md"]
    with pytest.raises(ValueError, match="one line"):
        page.render("# Title\n", experiments, devices)


def test_a_wide_table_is_cut_into_tables_that_fit() -> None:
    headings = ["run", *(f"column{number}" for number in range(20))]
    text = page._markdown(page.Table(headings, [[str(n) for n in range(21)]], {0}))
    tables = text.split("\n\n")
    assert len(tables) > 1
    assert all(part.startswith("| run | ") for part in tables)
    columns = [name for part in tables for name in part.split("\n")[0].split(" | ")[1:]]
    assert [name.removesuffix(" |") for name in columns] == headings[1:]


def test_the_docs_show_the_stored_results() -> None:
    files = command.docs()
    folder = {f"experiments/{path.name}" for path in (page.DOCS / "experiments").iterdir()}
    assert folder == files.keys() - {page.SUMMARY}
    stale = [n for n, text in files.items() if (page.DOCS / n).read_text(encoding="utf-8") != text]
    if stale:
        pytest.fail(f"{stale}: python -m benchmarks.experiments --docs", pytrace=False)


def test_smoke_tests_are_not_in_the_docs(tmp_path: Path) -> None:
    for name in ("chip", f"chip{store.QUICK}"):
        store.save([tmp_path / FOLDER / f"{name}.json"], name, result_of("cpu"))
    assert [[*device] for device in store.stored(tmp_path)] == [["chip"]]
