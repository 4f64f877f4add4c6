"""The parts of `make gpu` and their steps."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

from _gpu_experiments import OPTIONS
from _gpu_machine import Machine, find_sanitizer
from _gpu_plugin import NO_GPU
from _gpu_steps import Context, Step, pytest_command
from _test_files import ROOT, all_located, files, located
from benchmarks.experiments import NAMES

# By the file of kernels: compute-sanitizer slows a kernel down a hundredfold, so these are few,
# small and odd. test_gpu_tool.py sees that every file has its own and that they exist.
_SANITIZED: dict[str, tuple[str, ...]] = {
    "pointwise": (
        "test_activation_kernels::test_numbers[cuda-mish-torch.float16]",
        "test_activation_kernels::test_numbers[cuda-mish-torch.float32]",
    ),
    "channelwise": (
        "test_activation_kernels::test_numbers[cuda-prelu-torch.float16]",
        "test_activation_kernels::test_two_parameters_of_a_channel_each[cuda-shape0]",
    ),
    "batch_norm": ("test_batch_norm_kernels::test_sums_of_half_a_batch_each[cuda]",),
    "batch_norm_normalise": ("test_batch_norm_kernels::test_every_layout[cuda-planes of 49]",),
    "batch_norm_reduce": ("test_batch_norm_kernels::test_every_layout[cuda-257 last]",),
    "batch_norm_grad_input": (
        "test_batch_norm_kernels::test_gradient_and_residual_in_another_layout[cuda-torch.float16]",
    ),
    "batch_norm_restore": ("test_batch_norm_in_place::test_kernels[cuda-planes of 49]",),
    "gated": (
        "test_chain_kernels::test_every_packing[cuda-sliced]",
        "test_chain_kernels::test_every_packing[cuda-channels last]",
    ),
    "scale_add": (
        "test_chain_kernels::test_every_scale[cuda-odd channels last]",
        "test_chain_kernels::test_every_scale[cuda-planes]",
    ),
    "bias_act": (
        "test_chain_kernels::test_every_bias[cuda-odd channels last]",
        "test_chain_kernels::test_every_bias[cuda-planes]",
    ),
    "few_bit": (
        "test_few_bit::test_kernels[cuda-one-torch.float16]",
        "test_few_bit::test_kernels[cuda-off 16 bytes-torch.bfloat16]",
    ),
    "fold": ("test_fold_kernels::test_shapes[cuda-2d]",),
    "images": ("test_image_kernels::test_layouts[cuda-odd-torch.bfloat16]",),
    "optimizers": (
        "test_gpu_optimizers::test_same_numbers_as_the_cpu[LAMB-dtype1]",
        "test_optimizer_gpu_kernels::test_units[cuda-offset]",
        "test_optimizer_gpu_kernels::test_parts_of_a_step[cuda]",
    ),
    "optimizer_update": (
        "test_gpu_optimizers::test_same_numbers_as_the_cpu[AdamW-dtype0]",
        "test_optimizer_gpu_kernels::test_sizes[cuda-adam-torch.bfloat16-offset]",
    ),
    "optimizer_update_codes": (
        "test_optimizer_gpu_kernels::test_bits_of_codes[cuda-squares-offset]",
        "test_optimizer_gpu_kernels::test_states_in_codes[cuda-lamb]",
    ),
    "pool": ("test_pool_kernels::test_every_window[cuda-of ResNet-odd-contiguous]",),
    "scaling": (
        "test_gpu_optimizers::test_no_host_sync[AdamW]",
        "test_optimizer_gpu_kernels::test_zero_tensors[cuda]",
    ),
}
SANITIZED = {file: all_located(tests) for file, tests in _SANITIZED.items()}
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 9  # compute-sanitizer's exit code where it found something
BACKEND_TESTS = all_located(
    (
        "test_gpu", "test_gpu_graphs", "test_gpu_optimizers", "test_gpu_amp", "test_autograd",
        "test_activations",
    )
)  # fmt: skip
FIRST = ("amp_step", "batch_norm")  # benchmarks that the project stands or falls with
_FILES = sorted((ROOT / "benchmarks").glob("bench_*.py"))
_NAMES = [path.stem.removeprefix("bench_") for path in _FILES]
FAMILIES = (*FIRST, *(name for name in _NAMES if name not in FIRST))


@dataclass
class Part:
    """Steps that are one after another; ``skip`` says why there are none here."""

    name: str
    title: str
    steps: list[Step] = field(default_factory=list)
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
    triton = {"FUSEDTRAIN_BACKEND": "triton", "FUSEDTRAIN_TEST_GPU_BACKEND": "triton"}
    gpu = bool(m.gpu)
    every, cases = (" whole", "every case") if whole else ("", "a sample of the cases")
    ordered = [
        Part("cuda", "tests/backends/gpu and the kernel tests on CUDA", [
            # The variable makes test_gpu.py insist on this backend.
            Step("cuda", [*many, *files_of("cuda")], "cuda",
                 environment={"FUSEDTRAIN_TEST_GPU_BACKEND": "cuda"} if gpu else {}),
        ]),
        Part("triton", f"the Triton kernels, {cases}", [
            Step(f"triton{every}", [*many, *files_of("triton")], "triton", sample=not whole),
            Step(f"triton backend{every}", [*many, *BACKEND_TESTS], "cuda", sample=not whole,
                 environment=triton if gpu else {}),
        ]),
        Part("bench", "benchmarks without torch.compile", _benchmarks(m, "bench", "--no-compile")),
        Part("experiments", "published experiments; what the time does not suffice for is measured "
             "by the next call", _experiments(m)),
        Part("sanitize", "compute-sanitizer on a test of each kernel file"),
        Part("compile", "benchmarks against torch.compile",
             _benchmarks(m, "compile", "--only-compile")),
        Part("rest", "the rest of the suite, which needs no GPU", [
            Step(f"rest{every}", many, "rest", sample=not whole),
        ]),
    ]  # fmt: skip
    by_name = {part.name: part for part in ordered}
    if not gpu:  # a smoke test on the CPU, which has no rival that is compiled
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


def _experiments(m: Machine) -> list[Step]:
    """A step, and so a process, for each: an experiment that dies takes no other one with it."""
    options = ["--device", "cuda"] if m.gpu else ["--quick"]
    options += ["--resume", f"--also={STATE_RESULTS}"]
    environment = {OPTIONS: " ".join(options)}
    command = [*pytest_command(), "-p", "no:xdist", "-s"]
    test = "tools/_gpu_experiments.py::test_experiment"
    return [
        Step(f"experiment {name}", [*command, f"{test}[{name}]"], "", False, environment, 300.0)
        for name in NAMES
    ]


STATE_RESULTS = "build/gpu/results"  # what $RESULTS_DIR has, where the next call finds it
