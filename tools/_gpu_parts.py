"""The parts of `make gpu` and their steps."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from _gpu_experiments import OPTIONS
from _gpu_machine import Machine, find_sanitizer
from _gpu_plugin import NO_GPU
from _gpu_steps import Context, Step, pytest_command
from _test_files import all_located, files, located
from benchmarks.experiments import NAMES
from benchmarks.harness.store import FAMILIES as ALL_FAMILIES

# By the file of kernels the test's file and the test, both without test_: compute-sanitizer slows a
# kernel down a hundredfold, so these are few, small and odd. test_gpu_tool_parts.py sees that every
# file has its own and that they exist.
_SANITIZED = """
pointwise activation_kernels numbers[cuda-mish-torch.float16]
pointwise activation_kernels numbers[cuda-mish-torch.float32]
channelwise activation_kernels numbers[cuda-prelu-torch.float16]
channelwise activation_kernels two_parameters_of_a_channel_each[cuda-shape0]
batch_norm batch_norm_kernels sums_of_half_a_batch_each[cuda]
batch_norm_normalise batch_norm_kernels every_layout[cuda-planes of 49]
batch_norm_reduce batch_norm_kernels every_layout[cuda-257 last]
batch_norm_grad_input batch_norm_kernels gradient_and_residual_in_another_layout[cuda-torch.float16]
batch_norm_restore batch_norm_in_place kernels[cuda-planes of 49]
gated chain_kernels every_packing[cuda-sliced]
gated chain_kernels every_packing[cuda-channels last]
scale_add chain_kernels every_scale[cuda-odd channels last]
scale_add chain_kernels every_scale[cuda-planes]
bias_act chain_kernels every_bias[cuda-odd channels last]
bias_act chain_kernels every_bias[cuda-planes]
few_bit few_bit kernels[cuda-one-torch.float16]
few_bit few_bit kernels[cuda-off 16 bytes-torch.bfloat16]
depthwise depthwise_kernels every_case[cuda-5 x 5, stride 3, dilation 2-contiguous]
depthwise depthwise_kernels every_case[cuda-2 x 2-channels_last]
depthwise_strips depthwise_kernels every_case[cuda-7 x 7, stride 2, odd padding-contiguous]
depthwise_strips depthwise_kernels every_case[cuda-5 x 5, stride 2-channels_last]
depthwise_weight depthwise_kernels every_case[cuda-3 x 5-channels_last]
depthwise_weight depthwise_kernels every_case[cuda-3 x 3 of planes of 7-contiguous]
fold fold_kernels shapes[cuda-2d]
images image_kernels layouts[cuda-odd-torch.bfloat16]
optimizers gpu_optimizers same_numbers_as_the_cpu[LAMB-dtype1]
optimizers optimizer_gpu_kernels units[cuda-offset]
optimizers optimizer_gpu_kernels parts_of_a_step[cuda]
optimizer_update gpu_optimizers same_numbers_as_the_cpu[AdamW-dtype0]
optimizer_update optimizer_gpu_kernels sizes[cuda-adam-torch.bfloat16-offset]
optimizer_update_codes optimizer_gpu_kernels bits_of_codes[cuda-squares-offset]
optimizer_update_codes optimizer_gpu_kernels states_in_codes[cuda-lamb]
pool pool_kernels every_window[cuda-of ResNet-odd-contiguous]
pool_backward pool_kernels every_window[cuda-of ResNet-small-contiguous]
scaling gpu_optimizers no_host_sync[AdamW]
scaling optimizer_gpu_kernels zero_tensors[cuda]
"""
SANITIZED: dict[str, list[str]] = {}
for _kernels, _file, _test in (row.split(maxsplit=2) for row in _SANITIZED.strip().splitlines()):
    SANITIZED.setdefault(_kernels, []).append(located(f"test_{_file}::test_{_test}"))
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 9  # compute-sanitizer's exit code where it found something
STATE_RESULTS = "build/gpu/results"  # what $RESULTS_DIR has, where the next call finds it
BACKEND_TESTS = all_located(
    (
        "test_gpu", "test_gpu_graphs", "test_gpu_optimizers", "test_gpu_amp", "test_autograd",
        "test_every_function", "test_activations",
    )
)  # fmt: skip
FIRST = ("amp_step", "batch_norm")  # benchmarks that the project stands or falls with
FAMILIES = (*FIRST, *(name for name in ALL_FAMILIES if name not in FIRST))


@dataclass
class Part:
    """Steps that are one after another; ``skip`` says why there are none here."""

    name: str
    title: str
    steps: list[Step]
    skip: str = ""


def files_of(kind: str) -> list[str]:
    """The files that have tests of the kind: to collect them all takes 20 s a process."""
    marks = r"\bBACKENDS\b" + (r"|^ON_THE_GPU_TOO\b" if kind == "cuda" else "")
    return [
        located(name)
        for name, path in files().items()
        if not path.name.startswith(NO_GPU)
        and (path.name.startswith(("test_gpu", f"test_{kind}"))
             or re.search(marks, path.read_text(), re.M))
    ]  # fmt: skip


def parts(m: Machine, whole: bool) -> dict[str, Part]:
    """All parts in their order: first those that only this machine can run.

    Args:
        m: the machine.
        whole: every case of the Triton tests rather than a sample.
    """
    many = pytest_command(m.workers)
    gpu, sanitizer = bool(m.gpu), find_sanitizer()
    backend = "FUSEDTRAIN_TEST_GPU_BACKEND"  # test_gpu.py insists on this backend
    on_cuda = {backend: "cuda"} if gpu else {}
    on_triton = {"FUSEDTRAIN_BACKEND": "triton", backend: "triton"} if gpu else {}
    every, cases = (" whole", "every case") if whole else ("", "a sample of the cases")
    no_gpu = "" if gpu else "no GPU"
    ordered = (
        Part("cuda", "tests/backends/gpu and the kernel tests on CUDA", [
            Step("cuda", [*many, *files_of("cuda")], "cuda", environment=on_cuda),
        ]),
        Part("triton", f"the Triton kernels, {cases}", [
            Step(f"triton{every}", [*many, *files_of("triton")], "triton", not whole),
            Step(f"triton backend{every}", [*many, *BACKEND_TESTS], "cuda", not whole, on_triton),
        ]),
        Part("bench", "benchmarks without torch.compile",
             _benchmarks(m, "bench", "--no-compile")),
        Part("experiments", "published experiments; what the time does not suffice for is measured "
             "by the next call", _experiments(m)),
        Part("sanitize", "compute-sanitizer on a test of each kernel file", _sanitized(sanitizer),
             no_gpu or ("" if sanitizer else "compute-sanitizer is not found")),
        # On the CPU the benchmarks are a smoke test, which has no rival that is compiled.
        Part("compile", "benchmarks against torch.compile",
             _benchmarks(m, "compile", "--only-compile"), no_gpu),
        Part("rest", "the rest of the suite, which needs no GPU", [
            Step(f"rest{every}", many, "rest", not whole),
        ]),
    )  # fmt: skip
    for part in ordered:
        part.steps = [] if part.skip else part.steps
    return {part.name: part for part in ordered}


def _sanitized(program: str) -> list[Step]:
    tests = dict.fromkeys(name for names in SANITIZED.values() for name in names)
    # Without torch's cache each tensor is an allocation whose bounds are known.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--error-exitcode", str(FOUND), "--print-limit", "20", *pytest_command(), *tests]
    return [
        Step(tool, [program, "--tool", tool, *options], "", False, environment, 300.0, FOUND)
        for tool in TOOLS
    ]


def sanitizer_refuses(c: Context, deadline: float) -> bool:
    """Whether compute-sanitizer does not know this device or driver, which is no fault."""
    code = "import torch; torch.ones(3, device='cuda').sum().item()"
    probe = [find_sanitizer(), "--error-exitcode", "1", sys.executable, "-c", code]
    return c.run(probe, min(deadline, c.clock() + 120), {})[0] != 0


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


def _experiments(m: Machine) -> list[Step]:
    """A step, and so a process, for each: an experiment that dies takes no other one with it."""
    options = "--device cuda" if m.gpu else "--quick"
    environment = {OPTIONS: f"{options} --resume --also={STATE_RESULTS}"}
    command = [*pytest_command(), "-s"]
    test = "tools/_gpu_experiments.py::test_experiment"
    return [
        Step(f"experiment {name}", [*command, f"{test}[{name}]"], "", False, environment, 300.0)
        for name in NAMES
    ]
