"""_C_autograd.so: how it is built, and when it is loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import fusedtrain
from fusedtrain import _backends
from fusedtrain._backends import autograd_build
from fusedtrain._backends.autograd_build import CannotBuild
from helpers import ROOT
from helpers.autograd_routes import NEEDS_CPP
from helpers.processes import python

ROUTE = """
import torch, fusedtrain
x = torch.ones(2, requires_grad=True)
node = fusedtrain.functional.silu(x).grad_fn
print(fusedtrain.backend_info().backends["autograd"], "|",
      isinstance(node, torch.autograd.function.BackwardCFunction))
"""
HERE = autograd_build.built_for(torch.__version__)


def test_the_file_is_there_or_a_reason() -> None:
    backend = fusedtrain.backend_info().backends["autograd"]
    assert backend.loaded != bool(backend.reason)
    assert list(fusedtrain.backend_info().backends)[-1] == "autograd"


@NEEDS_CPP
def test_a_variable_switches_it_off() -> None:
    assert python(ROUTE).stdout.strip() == "loaded | False"
    run = python(ROUTE, FUSEDTRAIN_AUTOGRAD="python")
    assert run.stdout.strip() == "not loaded: FUSEDTRAIN_AUTOGRAD=python | True"
    run = python(ROUTE, FUSEDTRAIN_AUTOGRAD="rust")
    assert "FUSEDTRAIN_AUTOGRAD='rust': must be one of cpp, python" in run.stderr
    run = python(ROUTE, FUSEDTRAIN_BACKEND="reference")
    assert run.stdout.strip() == "not loaded: FUSEDTRAIN_BACKEND=reference | True"
    run = python(ROUTE, FUSEDTRAIN_AUTOGRAD="python", FUSEDTRAIN_REQUIRE="autograd")
    assert "FUSEDTRAIN_REQUIRE=autograd: FUSEDTRAIN_AUTOGRAD=python" in run.stderr


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"autograd": {**HERE, "torch": "2.12.9"}}, "was built for torch 2.12.9, "),
        ({"autograd": {**HERE, "python": "cpython-39-other"}}, "cpython-39-other, this is torch"),
        ({"autograd": {**HERE, "interface": 1}}, "was built from other sources of fusedtrain"),
        ({}, "was built for an unknown torch"),
        ({"autograd": HERE}, "failed to load under torch"),
    ],
)
def test_a_file_for_another_torch_or_python_is_not_loaded(
    record: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSEDTRAIN_AUTOGRAD", raising=False)
    monkeypatch.setattr(_backends, "_PACKAGE", tmp_path)
    (tmp_path / "_C_autograd.so").write_text("no library")
    module, reason = _backends._load_autograd(record)
    assert module is None
    assert words in reason


def test_a_missing_file_says_why_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSEDTRAIN_AUTOGRAD", raising=False)
    monkeypatch.setattr(_backends, "_PACKAGE", tmp_path)
    module, reason = _backends._load_autograd({"autograd_not_built": "no Python.h"})
    assert module is None
    assert reason == "no Python.h (python -m fusedtrain build-autograd builds it)"


def package(tmp_path: Path) -> Path:
    """A package as it is installed: sources, no checkout around them."""
    folder = tmp_path / "fusedtrain"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "_build_info.json")
    shutil.copytree(ROOT / "fusedtrain", folder, ignore=ignored)
    shutil.copytree(ROOT / "csrc/autograd", folder / "csrc/autograd")
    return folder


def build(folder: Path, compiler: str = "false") -> Path:
    torch_folder = Path(torch.__file__).parent
    return autograd_build.build(folder, torch_folder, torch.__version__, compiler)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path)
    with pytest.raises(CannotBuild, match="the compiler failed"):
        build(folder)
    with pytest.raises(CannotBuild, match="no C\\+\\+ compiler found"):
        autograd_build.find_compiler("no-such-compiler")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(CannotBuild, match="cannot be written to"):
            build(folder)
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: "/nowhere")
        with pytest.raises(CannotBuild, match=r"/nowhere/Python\.h is missing"):
            build(folder)
    shutil.rmtree(folder / "csrc")
    with pytest.raises(CannotBuild, match=r"the sources are missing: .*fusedtrain/csrc/autograd"):
        build(folder)
    assert not list(folder.glob("*.so"))
    assert not (folder / "_build_info.json").exists()


def test_the_record_keeps_what_it_has(tmp_path: Path) -> None:
    folder = package(tmp_path)
    path = folder / "_build_info.json"
    path.write_text(json.dumps({"compiler": "c", "autograd_not_built": "no Python.h"}))
    # A compiler that writes its last argument.
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho made > "$last"\n')
    compiler.chmod(0o755)
    assert build(folder, str(compiler)).read_text() == "made\n"
    assert json.loads(path.read_text()) == {"compiler": "c", "autograd": HERE}
    assert [p.name for p in folder.glob("*.so")] == ["_C_autograd.so"]


def test_an_installation_has_the_sources(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
        env={**os.environ, "CXX": "no-such-compiler", "FUSEDTRAIN_CUDA": "0",
             "FUSEDTRAIN_REQUIRE": ""},
    )  # fmt: skip
    sources = {path.name for path in (ROOT / "csrc/autograd").iterdir()}
    assert {path.name for path in (tmp_path / "fusedtrain/csrc/autograd").iterdir()} == sources
    record = json.loads((tmp_path / "fusedtrain/_build_info.json").read_text())
    assert "no C++ compiler found" in record["autograd_not_built"]


@pytest.mark.long
@NEEDS_CPP
def test_the_command_builds_what_is_then_loaded(tmp_path: Path) -> None:
    folder = package(tmp_path)
    command = [sys.executable, "-m", "fusedtrain", "build-autograd"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{folder}/_C_autograd.so is built; new processes use it"
    code = [sys.executable, "-W", "ignore", "-c", ROUTE]
    run = subprocess.run(code, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "loaded | False", run.stderr
