"""Counters of kernels agree; every kernel test is rehearsed on a pretended GPU, which refuses
tensors that were left on the CPU.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ROOT, TESTS, environment, launches
from helpers.backends import BACKENDS
from helpers.gpu import NEEDS_GPU
from helpers.processes import run_python

DRIVEN = re.compile(r"^@pytest.fixture\(params=\[.*\"cuda\"\]\)$", re.M)


def _is_driven(path: Path) -> bool:
    """Files of tests/ops share a fixture of all backends; others have their own."""
    text = path.read_text()
    return "ops: Kernels" in text if TESTS / "ops" in path.parents else bool(DRIVEN.search(text))


# test_bad_gradients has a device of its own making.
_OTHERS = (Path(__file__).name, "test_bad_gradients.py")
KERNEL_TESTS = sorted(
    path for path in TESTS.rglob("test_*.py") if path.name not in _OTHERS and _is_driven(path)
)


def run(*arguments: str, pretend: bool) -> str:
    variables = environment(FUSEDTRAIN_TEST_PRETENDED_GPU=str(int(pretend)))
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA", "--tb=line")
    done = run_python(*command, *arguments, env=variables, cwd=ROOT)
    return done.stdout + done.stderr


def test_the_counters_agree() -> None:
    """The number of csrc/cuda/launch.cuh is that of the emulator, which sees all launches."""
    kernels: Any = BACKENDS["emulated"]()
    counts = []
    for count in (launches.emulated, kernels.emulator.c.emulator_launches):
        before = count()
        kernels("mish", torch.ones(100))
        kernels("prelu_backward", torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(3))
        counts.append(count() - before)
    assert counts[0] == counts[1] > 3  # in every order of threads
    before = launches.emulated()
    kernels("mish", torch.ones(0))
    assert launches.emulated() == before


def test_the_cuda_file_counts() -> None:
    """Where it is built: the function is exported, and nothing has run without a GPU."""
    if launches._cuda_library() is None:
        pytest.skip("needs _C_cuda.so, loaded: never in CI")
    count = launches.cuda()
    assert count >= 0
    assert torch.cuda.is_available() or count == 0


@NEEDS_GPU
def test_convolutions_are_repeatable() -> None:
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.allow_tf32


# --- the rehearsal ---


def test_the_rehearsal_knows_every_kernel_test() -> None:
    names = {path.stem for path in KERNEL_TESTS}
    assert names >= {"test_activation_kernels", "test_chain_kernels",
                     "test_batch_norm_kernels", "test_image_kernels",
                     "test_fold_kernels", "test_pool_kernels", "test_few_bit", "test_torch_parity",
                     "test_batch_norm_in_place", "test_relative_gradients",
                     "test_optimizer_gpu_kernels"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_the_cuda_cases_on_a_pretended_gpu() -> None:
    """Nothing is left on the CPU, and what the tests do with tensors a GPU lets them do."""
    BACKENDS["cpu"]()
    log = run("--assert=plain", *map(str, KERNEL_TESTS), pretend=True)  # no time for rewriting
    assert not re.search(r"^=+ .*(failed|error)", log, re.M), log[-3000:]
    for path in KERNEL_TESTS:
        assert re.search(rf"^PASSED \S*{path.name}::", log, re.M), path
