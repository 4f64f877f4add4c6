"""A test of a GPU backend's kernels that starts none fails: planted cases; the counters; and every
kernel test rehearsed on a pretended GPU, which refuses tensors that were left on the CPU.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import ROOT, TESTS, environment, launches, pretended_gpu
from helpers.backends import BACKENDS, Kernels, placed
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

# Cases, and how each ends; `ops` is the backend.
PLANTED = {
    "starts a kernel": ("ops('mish', x)", "passed"),
    "starts none": ("x + 1", "what did this test test"),
    "calls the dispatcher with the CPU's tensor": ("torch.ops.fusedtrain.mish(torch.ones(9))",
                                                   "what did this test test"),
    "an empty tensor": ("ops('mish', x[:0])", "what did this test test"),
    "marked": ("x + 1", "passed"),
    "marked, and starts one": ("ops('mish', x)", "launches_nothing is wrong"),
    "marked without a reason": ("x + 1", "needs a reason"),
    "skips": ("pytest.skip('why')", "skipped"),
    "wrong otherwise": ("assert x.sum() == 7", "assert tensor"),
}  # fmt: skip
ON_A_GPU = {
    "a tensor is left on the CPU": ("ops('mish_backward', x, x.cpu())", "left on the cpu"),
    "all tensors are": ("ops('mish', torch.ones(9))", "left on the cpu"),
    "two devices in torch": ("torch.equal(x, torch.ones(9))", "expected all tensors"),
    "two devices in an op": ("torch.ops.fusedtrain.mish_backward(x, torch.ones(9))",
                             "expected all tensors"),
}  # fmt: skip
HEAD = """
import pytest, torch
from helpers.backends import BACKENDS
@pytest.fixture(params={backends!r})
def ops(request):
    return BACKENDS[request.param]()
@pytest.fixture
def x(ops):
    return torch.ones(9).to(ops.device)
"""
MARKS = {
    "marked": "@pytest.mark.launches_nothing('why')",
    "marked, and starts one": "@pytest.mark.launches_nothing('why')",
    "marked without a reason": "@pytest.mark.launches_nothing",
}


def run(*arguments: str, pretend: bool) -> str:
    variables = environment(FUSEDTRAIN_TEST_PRETENDED_GPU=str(int(pretend)))
    command = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA", "--tb=line")
    done = run_python(*command, *arguments, env=variables, cwd=ROOT)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
@pytest.mark.parametrize("pretend", [False, True], ids=["real", "pretended"])
def test_planted_cases(pretend: bool) -> None:
    BACKENDS["emulated"]()  # or the test is skipped here
    backends = ["cuda"] if pretend else ["emulated"]
    if not pretend and importlib.util.find_spec("triton") is not None:
        backends.append("triton")
    planted = PLANTED | (ON_A_GPU if pretend else {})
    text = HEAD.format(backends=backends)
    for i, (name, (body, _)) in enumerate(planted.items()):
        text += f"{MARKS.get(name, '')}\ndef test_{i}(ops, x):\n    {body}\n"
    # In the folder of the tests, whose conftest.py has the hook.
    file = Path(__file__).parent / f"test_planted_{os.getpid()}.py"
    file.write_text(text)
    try:
        log = run(str(file), pretend=pretend)
    finally:
        file.unlink()
    for backend, (i, (name, (_, end))) in itertools.product(backends, enumerate(planted.items())):
        case = rf"{re.escape(file.name)}::test_{i}\[{backend}\]"
        if end == "passed":
            assert re.search(rf"PASSED \S*{case}", log), (name, log)
        elif end == "skipped":
            assert not re.search(rf"(PASSED|FAILED) \S*{case}", log), (name, log)
        else:
            assert re.search(rf"FAILED \S*{case} - ", log), (name, log)
    for words, count in (("what did this test test", 3), ("launches_nothing is wrong", 1),
                         ("needs a reason", 1)):  # fmt: skip
        messages = re.findall(rf"^E .*{words}", log, re.M)
        assert len(messages) == count * len(backends), (words, log)
    if pretend:
        assert len(re.findall(r"^E .*left on the cpu", log, re.M)) == 2, log
        assert len(re.findall(r"^E .*expected all tensors", log, re.M)) == 2, log


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


def test_what_kernels_refuse() -> None:
    class OnMeta(Kernels):
        device = "meta"

        def run(self, name: str, *arguments: Any) -> Any:
            return None

    with pytest.raises(AssertionError, match="left on the cpu"):
        OnMeta()("mish_backward", torch.ones(3, device="meta"), torch.ones(3))

    class Idle(Kernels):
        counter = "emulated"

        def run(self, name: str, *arguments: Any) -> Any:
            return None if name == "mish_" else arguments[0][: len(arguments)]

    for name in ("mish", "mish_"):
        with pytest.raises(AssertionError, match="started no emulated kernel"):
            Idle()(name, torch.ones(3))
        Idle()(name, torch.ones(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_placed_keeps_what_lies_where(dtype: torch.dtype) -> None:
    made: list[Tensor] = [torch.randn(20)[3:11], torch.randn(6, 9)[1:4, 2:7:2],
                          torch.randn(4, 1, 3).expand(4, 5, 3), torch.randn(3, 4).t(),
                          torch.randn(())]  # fmt: skip
    for t in made:
        copied = placed(t, "cpu", dtype)
        assert copied.stride() == t.stride()
        assert copied.storage_offset() == t.storage_offset()
        assert torch.equal(copied, t.to(dtype))
    assert placed(made[0], "cpu", torch.bfloat16).data_ptr() % 16 == 6


@NEEDS_GPU
def test_convolutions_are_repeatable() -> None:
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.allow_tf32


# --- the rehearsal ---


def test_a_pretended_gpu_is_like_one() -> None:
    gpu = pretended_gpu.DEVICE
    with pretended_gpu.pretended():
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        a, b = x.to(gpu), y.to(gpu, torch.float64)
        assert a.device.type == b.device.type == (a + b).device.type == gpu
        assert torch.equal((a + b).cpu(), x + y.double())
        for wrong in (lambda: a + y, lambda: torch.equal(a, x), lambda: torch.where(a > 0, a, x),
                      lambda: torch.cat([a, x])):  # fmt: skip
            with pytest.raises(RuntimeError, match="expected all tensors to be on the GPU"):
                wrong()
        assert torch.equal((a * torch.tensor(2.0)).cpu(), x * 2)
        a[0] = 7
        assert x[0].ne(7).all()  # memory of its own
        assert (a[:1] + torch.zeros(4, device=gpu)).cpu().eq(7).all()
        a[1:].copy_(y[1:])
        assert torch.equal(a[1:].cpu(), y[1:])
        with pytest.raises(TypeError, match="numpy"):
            a.numpy()
        before = pretended_gpu.calls()
        torch.ops.fusedtrain.mish(x)
        assert pretended_gpu.calls() == before
        output = torch.ops.fusedtrain.mish(a)
        assert pretended_gpu.calls() == before + 1
        assert output.device.type == gpu
        torch.ops.fusedtrain.mish_(a)
        assert torch.equal(a.cpu(), output.cpu())


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
