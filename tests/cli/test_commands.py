"""Common behaviour of all commands: how they are found, wrong use, the extra, the output."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from fusedtrain.cli import _output, main
from fusedtrain.cli._exit import Exit
from fusedtrain.cli._output import Column, Outputs, Report, Table
from helpers import ROOT
from helpers.commands import Page, environment
from helpers.processes import run_python

COMMANDS = ("info", "build-autograd", "bench", "profile")


def test_the_console_script_is_the_same_function() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^fusedtrain = "fusedtrain.cli:main"$', declared, re.MULTILINE)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == Exit.DONE
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_exit_codes_are_those_of_the_guide() -> None:
    guide = (ROOT / "docs/cli.md").read_text()
    rows = re.findall(r"^\| (\d) \| ", guide, re.MULTILINE)
    assert [int(code) for code in rows] == [int(code) for code in Exit]


def test_without_the_extra() -> None:
    """`import fusedtrain` imports nothing of it, `info` needs nothing of it, the others say so."""
    code = (
        "import sys\n"
        "import fusedtrain\n"
        "names = 'click rich matplotlib fusedtrain.cli fusedtrain.advisor.profiling'.split()\n"
        "loaded = [name for name in names if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        "for name in ('click', 'rich', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from fusedtrain.cli import main\n"
        "assert main(['info']) == 0\n"
        "assert main(['bench', '--quick']) == 2\n"
        "sys.exit(main(['profile', 'script.py']))\n"
    )
    run = run_python("-c", code, env=environment())
    assert run.returncode == Exit.USAGE, run.stderr
    assert run.stdout.startswith("fusedtrain 0.")
    assert run.stderr.splitlines() == [
        f'fusedtrain: {name} needs click: pip install "fusedtrain[cli]"'
        for name in ("bench", "profile")
    ]


FIT = ("fit", "m:f", "--input", "3x8x8", "--memory", "1GB")
TUNE = ("tune", "m.py:f", "--input", "3x8x8")
# A command that is called wrongly, and words of the message.
WRONG: list[tuple[tuple[str, ...], str]] = [
    (("bench", "nonsense"), "'nonsense' is not one of"),
    (("bench", "--size", "big"), "big is no number of elements"),
    (("bench", "--size", "0"), "0 is not positive"),
    (("bench", "--plot", "/no/folder/roof.png"), "there is no folder /no/folder"),
    (("bench", "--html", "/"), "is a directory"),
    (("profile",), "Missing argument 'SCRIPT'"),
    (("profile", "/no/script.py"), "does not exist"),
    (("profile", "--steps", "0", __file__), "0 is not in the range"),
    (("profile", "--lr=0.1", __file__), "No such option '--lr'; options of the script come"),
    (("doctor", "--step", "10", __file__), "No such option '--step'; options of the script come"),
    (("doctor", "--step", "10", __file__), "--steps"),
    (("fit", "m:f", "--memory", "1GB"), "Missing option '--input'"),
    (("fit", "m:f", "--input", "3x8x8"), "Missing option '--memory'"),
    ((*FIT, "--memory", "much"), "'much' is no size, like '800MB' or '4GiB'"),
    ((*FIT, "--memory", "4"), "4 are 4 bytes; sizes are '800MB' or '4GiB'"),
    ((*FIT, "--memory", "1.5"), "'1.5' is no size"),
    ((*FIT, "--input", "3xx"), "3xx is no shape of a sample"),
    ((*FIT, "--batch", "1"), "1 is not in the range x>=2"),
    (("fit", "resnet50", *FIT[2:]), "expected torchvision:NAME"),
    (("fit", "/no/m.py:f", *FIT[2:]), "there is no file /no/m.py; MODEL is"),
    ((*FIT, "--input", "/no/m.py:f"), "no file /no/m.py; --input is"),
    ((*FIT, "--step", "step"), "--step: expected path.py:FUNCTION"),
    ((*FIT, "--step", "/no/m.py:f"), "/no/m.py; --step is path"),
    ((*FIT, "--precision", "half"), "'half' is not one of 'fp32'"),
    ((*FIT, "--save", "/no/a.json"), "there is no folder /no"),
    (("tune", "resnet50", *TUNE[2:]), "resnet50: expected torchvision:NAME"),
    ((*TUNE, "--input", "3xtwo"), "3xtwo is no shape of a sample, like 3x224x224"),
    ((*TUNE, "--input", "3x0x3"), "3x0x3 is no shape of a sample"),
    ((*TUNE, "--budget", "soon"), "soon is no time, like 90s, 5m or 1h"),
    ((*TUNE, "--config", "hidden"), "hidden is not NAME=VALUE"),
    ((*TUNE, "--switch", "magic"), "magic"),
    ((*TUNE, "--switches", "batch"), "No such option '--switches'"),
    (("tune", "m.py:f"), "--input"),
]


@pytest.mark.parametrize(("words", "blame"), WRONG)
def test_wrong_use(
    words: tuple[str, ...], blame: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "200")
    assert main(words) == Exit.USAGE
    captured = capsys.readouterr()
    assert blame in re.sub(r"[│╭╰─\s]+", " ", captured.err)
    assert captured.out == ""


REPORT = Report(
    "a title",
    {"value": 1},
    [Table("a table", [Column("name", left=True), Column("ms")], [["a", "1.5"], ["<b>", "10.25"]])],
    ["a note"],
    {"device": "a device"},
    partial="half of it",
)


def test_a_pipe_gets_one_plain_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    Outputs().write(REPORT)
    assert capsys.readouterr().out.splitlines() == [
        "a title",
        "PARTIAL: half of it",
        "device: a device",
        "",
        "a table",
        "name     ms",
        "a       1.5",
        "<b>   10.25",
        "",
        "a note",
    ]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[[Report, int], str]:
    """A report on a terminal of so many characters."""

    def show(report: Report, width: int) -> str:
        written = io.StringIO()
        console = Console(file=written, force_terminal=True, width=width, highlight=False)
        monkeypatch.setattr(_output, "Console", lambda **options: console)
        Outputs().write(report)
        return written.getvalue()

    return show


def test_a_terminal_gets_a_table(shown: Callable[[Report, int], str]) -> None:
    text = shown(REPORT, 60)
    for part in ("─", "\x1b[", "<b>", "PARTIAL: half of it"):
        assert part in text


def test_numbers_stay_whole_on_a_narrow_terminal() -> None:
    cells = ["an operator with a long name", "train.py:1234", "0.78-0.99", "1234.5 ms"]
    names = [Column("op", left=True), Column("line", left=True), Column("99 %"), Column("time")]
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=40)
    console.print(_output._boxed(Table("", names, [cells])))
    assert "0.78-0.99" in written.getvalue()
    assert "1234.5 ms" in written.getvalue()
    assert "…" not in written.getvalue()


@pytest.mark.parametrize("width", [24, 40, 60, 200])
def test_no_cell_is_lost_at_any_width(width: int, shown: Callable[[Report, int], str]) -> None:
    names = [Column("op", left=True), Column("size", left=True)]
    names += [Column(name) for name in ("time", "GB/s", "% copy", "vs eager", "99 %")]
    cells = ["bn_silu", "2x96x14x14", "402.5 us", "3.25", "110", "1.01", "0.73-1.19"]
    report = Report("a title", {}, tables=[Table("", names, [cells])])
    text = " ".join(re.sub(r"\x1b\[[\d;]*m", "", shown(report, width)).split())
    for cell in cells if width != 24 else cells[:-1]:
        assert cell in text, text
    assert ("─" in text) == (width == 200)


@pytest.mark.parametrize("command", ["bench", "doctor", "profile", "tune"])
@pytest.mark.parametrize("option", ["--plot", "--html"])
def test_a_chart_without_matplotlib_is_refused_before_any_work(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = {"bench": [], "tune": ["m.py:f", "--input", "3x8x8"]}.get(command, [__file__])
    module = importlib.import_module(f"fusedtrain.cli.{command}")
    for name in ("measure", "doctor", "in_fresh_process", "tune"):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("work"), raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([command, option, str(tmp_path / "file"), *words]) == Exit.USAGE
    blame = re.sub(r"[│╭╰─\s]+", " ", capsys.readouterr().err)
    assert f"{option} needs matplotlib" in blame
    assert 'pip install "fusedtrain[cli]"' in blame


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert main(["bench", "--plot", str(tmp_path / "chart.png")]) == Exit.USAGE
    assert "cannot be written to" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["chart.unknown", "folder"])
def test_results_are_shown_whatever_the_chart_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> Figure:
        raise ValueError("no such colour")

    (tmp_path / "folder").mkdir()
    page = tmp_path / "report.html"
    Outputs(plot=tmp_path / name, html=page).write(replace(REPORT, figure=fails))
    shown = capsys.readouterr()
    assert "a title" in shown.out
    assert "the chart was not drawn: ValueError: no such colour" in shown.err
    assert Page(page.read_text()).images == []
    Outputs(plot=tmp_path / name).write(replace(REPORT, figure=Figure))
    shown = capsys.readouterr()
    assert "a title" in shown.out
    if name == "folder":
        assert "folder is not written: " in shown.err
    else:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_html_is_one_file_and_escapes(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    Outputs(html=path).write(REPORT)
    text = path.read_text()
    assert Page(text).rows == [["name", "ms"], ["a", "1.5"], ["<b>", "10.25"]]
    assert "PARTIAL: half of it" in text
    assert "http" not in text


def test_a_plot_that_has_nothing_to_draw_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plot.png"
    Outputs(plot=path).write(REPORT)
    assert not path.exists()
    assert "is not written" in capsys.readouterr().err


def test_names_in_another_alphabet_than_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    main(["info"])
    Outputs().write(replace(REPORT, title="Übung.py"))
    sys.stdout.flush()
    assert b"\\xdcbung.py" in written.getvalue()
