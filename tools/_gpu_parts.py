"""The parts of `make gpu` and their steps."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass, field

from _gpu_machine import Machine, find_sanitizer
from _gpu_plugin import NO_GPU
from _gpu_steps import ROOT, Context, Step, pytest_command

# By the file of kernels: compute-sanitizer slows a kernel down a hundredfold, so these are few,
# small and odd. tests/test_gpu_tool.py sees that every file has its own and that they exist.
SANITIZED: dict[str, tuple[str, ...]] = {
    "pointwise": (
        "tests/test_kernels.py::test_numbers[cuda-mish-torch.float16]",
        "tests/test_kernels.py::test_numbers[cuda-mish-torch.float32]",
    ),
    "channelwise": (
        "tests/test_kernels.py::test_numbers[cuda-prelu-torch.float16]",
        "tests/test_kernels.py::test_two_parameters_of_a_channel_each[cuda-shape0]",
    ),
    "batch_norm": ("tests/test_batch_norm_kernels.py::test_sums_of_half_a_batch_each[cuda]",),
    "batch_norm_normalise": (
        "tests/test_batch_norm_kernels.py::test_every_layout[cuda-planes of 49]",
    ),
    "batch_norm_reduce": ("tests/test_batch_norm_kernels.py::test_every_layout[cuda-257 last]",),
    "batch_norm_grad_input": (
        "tests/test_batch_norm_kernels.py::test_gradient_and_residual_in_another_layout"
        "[cuda-torch.float16]",
    ),
    "batch_norm_restore": ("tests/test_batch_norm_in_place.py::test_kernels[cuda-planes of 49]",),
    "chains": (
        "tests/test_chain_kernels.py::test_every_packing[cuda-sliced]",
        "tests/test_chain_kernels.py::test_every_packing[cuda-channels last]",
        "tests/test_chain_kernels.py::test_every_scale[cuda-odd channels last]",
        "tests/test_chain_kernels.py::test_every_scale[cuda-planes]",
    ),
    "chains_bias": (
        "tests/test_chain_kernels.py::test_every_bias[cuda-odd channels last]",
        "tests/test_chain_kernels.py::test_every_bias[cuda-planes]",
    ),
    "few_bit": (
        "tests/test_few_bit.py::test_kernels[cuda-one-torch.float16]",
        "tests/test_few_bit.py::test_kernels[cuda-off 16 bytes-torch.bfloat16]",
    ),
    "fold": ("tests/test_fold_kernels.py::test_shapes[cuda-2d]",),
    "images": ("tests/test_images.py::test_layouts[cuda-odd-torch.bfloat16]",),
    "multi_tensor": (
        "tests/test_gpu_optimizers.py::test_same_numbers_as_the_cpu[lamb-dtype1]",
        "tests/test_optimizer_gpu_kernels.py::test_units[cuda-offset]",
        "tests/test_optimizer_gpu_kernels.py::test_parts_of_a_step[cuda]",
    ),
    "multi_tensor_update": (
        "tests/test_gpu_optimizers.py::test_same_numbers_as_the_cpu[adamw-dtype0]",
        "tests/test_optimizer_gpu_kernels.py::test_sizes[cuda-adam-torch.bfloat16-offset]",
    ),
    "pool": ("tests/test_pool_kernels.py::test_every_window[cuda-of ResNet-odd-contiguous]",),
    "scaling": (
        "tests/test_gpu_optimizers.py::test_no_host_sync[adamw]",
        "tests/test_optimizer_gpu_kernels.py::test_zero_tensors[cuda]",
    ),
}
TESTS = ROOT / "tests"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 9  # compute-sanitizer's exit code where it found something
BACKEND_TESTS = ("tests/test_gpu.py", "tests/test_gpu_optimizers.py", "tests/test_gpu_amp.py",
                 "tests/test_autograd.py", "tests/test_activations.py")  # fmt: skip
FIRST = ("amp_step", "batch_norm")  # benchmarks that the project stands or falls with
FAMILIES = (*FIRST, "activations", "chains", "few_bit", "pool", "images", "conv_bn", "apex",
            "memory")  # fmt: skip


@dataclass
class Part:
    """Steps that are one after another; ``skip`` says why there are none here."""

    name: str
    title: str
    steps: list[Step] = field(default_factory=list)
    skip: str = ""


def files_of(kind: str) -> list[str]:
    """The files that have tests of the kind: to collect them all takes 20 s a process."""
    names = re.search(r"ON_THE_GPU_TOO = \{(.*?)\}", (TESTS / "conftest.py").read_text(), re.S)
    too = re.findall(r"\w+", names[1]) if names and kind == "cuda" else []
    return [
        f"tests/{path.name}"
        for path in sorted(TESTS.glob("test_*.py"))
        if not path.name.startswith(NO_GPU)
        and (path.name.startswith(("test_gpu", f"test_{kind}"))
             or path.stem in too or re.search(r"\bBACKENDS\b", path.read_text()))
    ]  # fmt: skip


def parts(m: Machine, whole: bool) -> dict[str, Part]:
    """All parts in their order: first what only this machine can tell.

    Args:
        m: the machine.
        whole: every case of the Triton tests rather than a sample.
    """
    many = pytest_command(m.workers)
    triton = {"FUSEDTRAIN_BACKEND": "triton", "FUSEDTRAIN_TEST_GPU_BACKEND": "triton"}
    gpu = bool(m.gpu)
    every, cases = (" whole", "every case") if whole else ("", "a sample of the cases")
    found = [
        Part("cuda", "tests/test_gpu*.py and the kernel tests on CUDA", [
            # The variable makes tests/test_gpu.py insist on the backend that is meant.
            Step("cuda", [*many, *files_of("cuda")], "cuda",
                 environment={"FUSEDTRAIN_TEST_GPU_BACKEND": "cuda"} if gpu else {}),
        ]),
        Part("triton", f"the Triton kernels, {cases}", [
            Step(f"triton{every}", [*many, *files_of("triton")], "triton", sample=not whole),
            Step(f"triton backend{every}", [*many, *BACKEND_TESTS], "cuda", sample=not whole,
                 environment=triton if gpu else {}),
        ]),
        Part("bench", "benchmarks without torch.compile", _benchmarks(m, "bench", "--no-compile")),
        Part("sanitize", "compute-sanitizer on a test of each kernel file"),
        Part("compile", "benchmarks against torch.compile",
             _benchmarks(m, "compile", "--only-compile")),
        Part("rest", "the rest of the suite, which needs no GPU", [Step("rest", many, "rest")]),
    ]  # fmt: skip
    by_name = {part.name: part for part in found}
    if importlib.util.find_spec("pytest_benchmark") is None:
        for name in ("bench", "compile"):
            by_name[name].steps, by_name[name].skip = [], "pytest-benchmark is not installed"
    elif not gpu:  # a smoke test on the CPU, which has no rival that is compiled
        by_name["compile"].steps, by_name["compile"].skip = [], "no GPU"
    tool = find_sanitizer()
    if not gpu or not tool:
        by_name["sanitize"].skip = "compute-sanitizer is not found" if gpu else "no GPU"
    else:
        names = [name for names in SANITIZED.values() for name in names]
        by_name["sanitize"].steps = [
            Step(
                name,
                [tool, "--tool", name, "--error-exitcode", str(FOUND), "--print-limit", "20",
                 *pytest_command(), "-p", "no:xdist", *dict.fromkeys(names)],
                # Without torch's cache each tensor is an allocation whose bounds are known.
                environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                patience=300.0, alarm=FOUND,
            )
            for name in TOOLS
        ]  # fmt: skip
    return by_name


def sanitizer_refuses(c: Context, deadline: float) -> bool:
    """Whether compute-sanitizer does not know this device or driver, which is no fault."""
    code = "import torch; torch.ones(3, device='cuda').sum().item()"
    probe = [find_sanitizer(), "--error-exitcode", "1", sys.executable, "-c", code]
    return c.command(probe, min(deadline, c.clock() + 120), {}).code != 0


def _benchmarks(m: Machine, name: str, option: str) -> list[Step]:
    command = [sys.executable, "-m", "benchmarks.run", "--no-chart", "--keep-rows", "-vv",
               f"--also={STATE_RESULTS}", option]  # fmt: skip
    command += ["--device", "cuda"] if m.gpu else ["--quick"]
    steps = [Step(f"{name} {f}", [*command, f"--family={f}"], patience=300.0) for f in FAMILIES]
    if m.gpu and name == "bench":
        ops = [f"--op={op}" for op in ("mish", "silu", "relu")]
        triton = {"FUSEDTRAIN_BACKEND": "triton"}
        steps.append(
            Step("bench triton", [*command, "--family=activations", *ops], environment=triton)
        )
    return steps


STATE_RESULTS = "build/gpu/results"  # what $RESULTS_DIR has, where the next call finds it
