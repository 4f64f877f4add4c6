"""The driver of tools/aarch64.py compiles without a cross-compiler."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from helpers import ROOT

pytestmark = pytest.mark.slow


def test_the_driver_compiles() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source = ROOT / "tools/kernel_driver.cpp"
    command = [compiler, "-fsyntax-only", "-std=c++17", "-Wall", "-Wextra", "-Werror", source]
    subprocess.run(command, check=True)
