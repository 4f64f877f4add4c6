"""tools/aarch64.py without a cross-compiler: its comparison notices faults, its driver compiles."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from helpers import ROOT

pytestmark = pytest.mark.slow

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    import aarch64
    from aarch64 import Call, compare

TRUTH = torch.linspace(-3, 3, 101, dtype=torch.float64)


def call(dtype: torch.dtype) -> Call:
    return Call("pointwise 0 0 101 0.0 0.0", [], [TRUTH, TRUTH.square()], dtype)


def written(*results: torch.Tensor) -> bytes:
    return b"".join(r.contiguous().view(torch.uint8).numpy().tobytes() for r in results)


@pytest.mark.parametrize("dtype", aarch64.DTYPES, ids=str)
def test_faults_are_noticed(dtype: torch.dtype) -> None:
    y, grad = TRUTH.to(dtype), TRUTH.square().to(dtype)
    assert compare([call(dtype)], written(y, grad))["pointwise"] <= 1
    wrong = grad.clone()
    wrong[50] = float("nan")  # as the driver fills what a kernel does not write
    for results in ((y, wrong), (y, grad * 1.1), (-y, grad), (grad, y)):
        with pytest.raises(AssertionError, match="eps"):
            compare([call(dtype)], written(*results))
    with pytest.raises(AssertionError, match="more than"):
        compare([call(dtype)], written(y, grad, y))


def test_the_driver_compiles() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source = ROOT / "tools/kernel_driver.cpp"
    command = [compiler, "-fsyntax-only", "-std=c++17", "-Wall", "-Wextra", "-Werror", source]
    subprocess.run(command, check=True)
