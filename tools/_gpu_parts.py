"""The parts of `make gpu` and their steps."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace

from _gpu_machine import Machine, find
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
OPTIONS = "FUSEDTRAIN_EXPERIMENT_OPTIONS"  # as tools/_gpu_checks.py reads them
GPU_FILES = "tests/backends/gpu"
BACKEND_TESTS = all_located(
    (
        "test_gpu", "test_gpu_graphs", "test_gpu_optimizers", "test_gpu_amp", "test_autograd",
        "test_every_function", "test_activations",
    )
)  # fmt: skip
# Benchmarks: whole networks, those that the project stands or falls with, the others.
FAMILIES = tuple(dict.fromkeys(("conv_bn", "memory", "amp_step", "batch_norm", *ALL_FAMILIES)))
NETWORKS = 2
PART = 540  # seconds at a time


@dataclass
class Part:
    """Steps that are one after another; ``skip`` says why there are none here.

    A call first goes through the parts that have ``seconds``, until they have had so many in all
    calls together, then through all that are not done. docs/gpu.md says what each is for.
    """

    name: str
    steps: list[Step]
    seconds: int = 0
    skip: str = ""


def files_of(kind: str) -> list[str]:
    """The files that have tests of the kind: to collect them all takes 20 s a process. Those of
    GPU_FILES on CUDA are a part of their own."""
    marks = r"\bBACKENDS\b" + (r"|^ON_THE_GPU_TOO\b" if kind == "cuda" else "")
    return [
        located(name)
        for name, path in files().items()
        if not path.name.startswith(NO_GPU)
        and (kind != "cuda" or GPU_FILES not in path.as_posix())
        and (path.name.startswith(("test_gpu", f"test_{kind}"))
             or re.search(marks, path.read_text(), re.M))
    ]  # fmt: skip


def parts(m: Machine, whole: bool) -> dict[str, Part]:
    """All parts in their order: first those that teach the most in the shortest time.

    Args:
        m: the machine.
        whole: every case of the Triton tests rather than a sample.
    """
    many = pytest_command(m.workers)
    gpu, sanitizer = bool(m.gpu), find("compute-sanitizer")
    backend = "FUSEDTRAIN_TEST_GPU_BACKEND"  # test_gpu.py insists on this backend
    on_cuda = {backend: "cuda"} if gpu else {}
    on_triton = {"FUSEDTRAIN_BACKEND": "triton", backend: "triton"} if gpu else {}
    every, plain = " whole" * whole, "--no-compile"
    no_gpu = "" if gpu else "no GPU"
    refused = no_gpu or ("" if sanitizer else "compute-sanitizer is not found")
    memcheck, *others = (_sanitized(sanitizer, tool) for tool in TOOLS)
    bench = [_benchmark(m, "bench", family, plain) for family in FAMILIES]
    some = _benchmark(m, "bench", "activations", plain, "--op=mish", "--op=silu", "--op=relu")
    bench += [replace(some, name="bench triton", environment=on_triton)] if gpu else []
    # On the CPU the benchmarks are a smoke test, which has no rival that is compiled.
    compiled = [_benchmark(m, "compile", family, "--only-compile") for family in FAMILIES]
    ordered = (
        Part("machine", [_checks("machine", "backends", "clocks", "copy", "predictions")], 60),
        Part("gpu", [Step("gpu", [*many, GPU_FILES], "cuda", environment=on_cuda)], 150),
        Part("memcheck", [memcheck], 90, refused),
        Part("rows", [_first(m)], 270, no_gpu),
        Part("ncu", [_checks("ncu", "ncu")], 120, no_gpu),
        Part("plans", [_checks("plans", "plan")], 180, no_gpu),
        Part("networks", bench[:NETWORKS], PART),
        Part("cuda", [Step("cuda", [*many, *files_of("cuda")], "cuda", environment=on_cuda)]),
        Part("triton", [
            Step(f"triton{every}", [*many, *files_of("triton")], "triton", not whole),
            Step(f"triton backend{every}", [*many, *BACKEND_TESTS], "cuda", not whole, on_triton),
        ]),
        Part("sanitize", others, skip=refused),
        Part("bench", bench[NETWORKS:]),
        Part("compile", compiled, skip=no_gpu),
        Part("experiments", [_experiment(m, name) for name in NAMES]),
        Part("rest", [Step(f"rest{every}", many, "rest", not whole)]),
    )  # fmt: skip
    for part in ordered:
        part.steps = [] if part.skip else part.steps
    return {part.name: part for part in ordered}


def _checks(step: str, *names: str) -> Step:
    """Tests of tools/_gpu_checks.py."""
    tests = [f"tools/_gpu_checks.py::test_{name}" for name in names]
    return Step(step, [*pytest_command(), "-s", *tests], patience=300.0)


def _sanitized(program: str, tool: str) -> Step:
    tests = dict.fromkeys(name for names in SANITIZED.values() for name in names)
    # Without torch's cache each tensor is an allocation whose bounds are known.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--error-exitcode", str(FOUND), "--print-limit", "20", *pytest_command(), *tests]
    command = [program, "--tool", tool, *options]
    return Step(tool, command, "", False, environment, 300.0, FOUND)


def sanitizer_refuses(c: Context, deadline: float) -> bool:
    """Whether compute-sanitizer does not know this device or driver, which is no fault."""
    code = "import torch; torch.ones(3, device='cuda').sum().item()"
    probe = [find("compute-sanitizer"), "--error-exitcode", "1", sys.executable, "-c", code]
    code, cut = c.run(probe, min(deadline, c.clock() + 120), {})
    return code != 0 and not cut


def _first(m: Machine) -> Step:
    """All in one process, with the L2 cache flushed before each call."""
    folders = (os.environ.get("RESULTS_DIR", "benchmarks/results"), STATE_RESULTS)
    stores = [f"--store={folder}/{m.slug}.json" for folder in folders]
    options = ["--device=cuda", "--first", "--flush-l2", "--keep-rows", *stores]
    return Step("rows", [*pytest_command(), "benchmarks", *options], patience=300.0)


def _benchmark(m: Machine, kind: str, family: str, *options: str) -> Step:
    command = [sys.executable, "-m", "benchmarks.run", "--no-chart", "--keep-rows", "-vv",
               f"--also={STATE_RESULTS}", f"--family={family}", *options]  # fmt: skip
    command += ["--device", "cuda", "--flush-l2"] if m.gpu else ["--quick"]
    return Step(f"{kind} {family}", command, patience=300.0)


def _experiment(m: Machine, name: str) -> Step:
    """A process of its own: an experiment that dies takes no other one with it."""
    options = "--device cuda" if m.gpu else "--quick"
    environment = {OPTIONS: f"{options} --resume --also={STATE_RESULTS}"}
    return replace(_checks(f"experiment {name}", f"experiment[{name}]"), environment=environment)
