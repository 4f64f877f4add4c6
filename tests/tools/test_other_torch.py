"""tools/other_torch.py with a Python that only notes how it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import other_torch

PYTHON = """#!/bin/sh
echo "$*" >> {log}
case "$*" in {failing}) exit 1;; esac
case "$*" in *"gpu.py build"*) touch fusedtrain/_C_autograd.so;; esac
"""
Tool = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Runs the tool in a folder; returns its exit code and the calls of Python."""

    def run(*arguments: str, failing: str = "nothing") -> tuple[int, list[str]]:
        name = arguments[0]
        log, python = tmp_path / "log", tmp_path / f".venv-{name}/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON.format(log=log, failing=failing))
        python.chmod(0o755)
        package = tmp_path / "build" / name / "fusedtrain"
        package.mkdir(parents=True)
        (package / "_C_autograd.so").touch()
        monkeypatch.setattr(sys, "argv", ["other_torch.py", *arguments])
        return other_torch.main(), log.read_text().splitlines()

    (tmp_path / "fusedtrain").mkdir()
    for name in ("_C.so", "_build_info.json"):
        (tmp_path / "fusedtrain" / name).write_text("of the checkout")
    monkeypatch.setattr(other_torch, "ROOT", tmp_path)
    monkeypatch.setattr(other_torch, "copy_tree", lambda tree: None)
    return run


def test_short_takes_the_file_of_the_checkout(tool: Tool, tmp_path: Path) -> None:
    code, calls = tool("oldest", "--short", "-k", "mish")
    assert code == 0
    assert "torch==2.10.0 " in calls[0]
    assert " timm==" in calls[0]
    assert any("-fsyntax-only" in call for call in calls)
    assert "tools/gpu.py build" in calls
    assert calls[-1].endswith(f"{' '.join(other_torch.SHORT)} -k mish")
    package = tmp_path / "build/oldest/fusedtrain"
    assert (package / "_C.so").read_text() == "of the checkout"


def test_the_rehearsal_goes_on_behind_a_failure(
    tool: Tool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, calls = tool("rehearsal", failing='*"pytest"*--collect-only*')
    assert code == 1
    assert sum("pytest -q" in call for call in calls) == 3
    assert not (tmp_path / "build/rehearsal/fusedtrain/_C.so").exists()
    out = capsys.readouterr().out
    assert out.startswith("make rehearse-gpu: torch==2.11.0 ")
    assert "FAILED: collection, " in out.splitlines()[-1]


def test_the_nodes_are_built_again(tool: Tool, tmp_path: Path) -> None:
    """Their sources are not compared, so a file of older ones would be taken."""
    code, calls = tool("oldest", failing='*"gpu.py build"*')
    assert code == 1
    assert len(calls) == 2
    assert not (tmp_path / "build/oldest/fusedtrain/_C_autograd.so").exists()


@pytest.mark.parametrize(("option", "expected"), [("--short", 0), ("-q", 1)])
def test_a_torch_that_cannot_be_had(
    tool: Tool, capsys: pytest.CaptureFixture[str], option: str, expected: int
) -> None:
    code, calls = tool("oldest", option, failing='*"pip install"*')
    assert code == expected
    assert len(calls) == 1
    assert "nothing is tested: pip cannot install torch==2.10.0 " in capsys.readouterr().out


def test_a_python_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for name in ("PATH", "HOME", "PYENV_ROOT"):
        monkeypatch.setenv(name, str(tmp_path))
    assert "it needs Python 3.12, none" in other_torch.install(
        tmp_path, other_torch.KINDS["rehearsal"]
    )


def test_the_tests_are_there() -> None:
    names = [name.partition("::")[0] for name in other_torch.OLDEST]
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_the_interpreter_has_the_version() -> None:
    assert other_torch.interpreter("") == sys.executable
    assert other_torch.interpreter("{}.{}".format(*sys.version_info)) == sys.executable
