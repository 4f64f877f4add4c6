"""The parts of `make gpu`: a list of commands with limits. docs/gpu.md says what each is for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _gpu_plugin import NO_GPU
from _sanitized import setup_module
from _test_files import all_located, files, located
from benchmarks.experiments import NAMES
from benchmarks.harness.store import FAMILIES as ALL_FAMILIES

# By the file of kernels the test's file and the test, both without test_: compute-sanitizer slows a
# kernel down a hundredfold, so these are few, small and odd. test_gpu_tool.py sees that every file
# of kernels has its own and that they exist.
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
# The first rows, those of the project's name before others; depthwise runs torch's kernels, still.
FIRST = ("batch_norm", "amp_step", "conv_bn", "activations", "chains", "pool", "few_bit", "images",
         "depthwise")  # fmt: skip
# Benchmarks: whole networks, those that the project stands or falls with, the others.
NETWORKS = ("conv_bn", "memory")
FAMILIES = tuple(dict.fromkeys((*NETWORKS, "amp_step", "batch_norm", *ALL_FAMILIES)))
TINY = "import torch; torch.ones(3, device='cuda').sum().item()"


@dataclass
class Part:
    """Tests that are run by one command. A call goes through the parts that have limits, until they
    have had so many seconds in all calls together, then through all that are not done."""

    name: str  # in the journal and the results; its first word names a group of parts
    command: Sequence[str]  # runs pytest, without the options of the plugin
    seconds: float = 0.0  # the limit
    kind: str = ""  # of tests (kind_of() in _gpu_plugin.py), "" for all
    sample: bool = False  # whether a sample of the tests will do
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = 180.0  # seconds after which a test hangs; a third of the limit at most
    alarm: int = 0  # the exit code that says: something is wrong beside failed tests
    probe: Sequence[str] = ()  # a command that fails where the part cannot run: no fault of ours
    rows: bool = False  # whether it measures rows that have predictions
    skip: str = ""  # why it does not run here


def find(program: str) -> str:
    """A program of the CUDA toolkit, nvcc as setup.py finds it, the others on PATH or beside nvcc;
    "" where there is none."""
    nvcc = ""
    with contextlib.suppress(setup_module().CannotBuild):
        nvcc = str(setup_module().nvcc())
    beside = str(Path(nvcc).resolve().parent)
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), beside))
    return nvcc if program == "nvcc" else shutil.which(program, path=path) or ""


def files_of(kind: str) -> list[str]:
    """The files that have tests of the kind: to collect them all takes 20 s a process. Those of
    GPU_FILES on CUDA are named by their folder."""
    marks = r"\b(BACKENDS|EVERY_BACKEND)\b" + (r"|^ON_THE_GPU_TOO\b" if kind == "cuda" else "")
    return [
        located(name)
        for name, path in files().items()
        if not path.name.startswith(NO_GPU)
        and (kind != "cuda" or GPU_FILES not in path.as_posix())
        and (path.name.startswith(("test_gpu", f"test_{kind}"))
             or re.search(marks, path.read_text(), re.M))
    ]  # fmt: skip


def pytest_command(workers: int = 0) -> list[str]:
    """pytest with a line per test and nothing that stops at a failure."""
    python = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    python += ["--continue-on-collection-errors"]
    if not workers or importlib.util.find_spec("xdist") is None:
        return [*python, "-p", "no:xdist"]
    # A worker that dies is replaced; each gets one test at a time, so that the order counts.
    return [*python, "-n", str(workers), "--max-worker-restart=1000", "--maxschedchunk=1"]


def parts(gpu: str, slug: str, workers: int) -> list[Part]:
    """All parts in their order: first those that teach the most in the shortest time.

    Args:
        gpu: the device's name; "" for none.
        slug: the name of its files of results.
        workers: test processes at a time.
    """
    many, sanitizer = pytest_command(workers), find("compute-sanitizer")
    no_gpu = "" if gpu else "no GPU"
    backend = "FUSEDTRAIN_TEST_GPU_BACKEND"  # test_gpu.py insists on this backend
    on_cuda = {backend: "cuda"} if gpu else {}
    on_triton = {"FUSEDTRAIN_BACKEND": "triton", backend: "triton"} if gpu else {}
    refused = no_gpu or ("" if sanitizer else "compute-sanitizer is not found")
    ncu = find("ncu") or "ncu"
    profiled = f'{ncu} --section SpeedOfLight {sys.executable} -c "{TINY}" | tee /dev/stderr'
    counters = ["sh", "-c", f"{profiled} | grep -q 'DRAM Throughput'"]

    def sanitized(tool: str, seconds: float = 0.0) -> Part:
        tests = dict.fromkeys(name for names in SANITIZED.values() for name in names)
        options = ["--error-exitcode", str(FOUND), "--print-limit", "20", *pytest_command()]
        # Without torch's cache each tensor is an allocation whose bounds are known.
        return Part(
            tool if seconds else f"sanitize {tool}",
            [sanitizer, "--tool", tool, *options, *tests], seconds, alarm=FOUND, skip=refused,
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            probe=[sanitizer, "--error-exitcode", "1", sys.executable, "-c", TINY],
        )  # fmt: skip

    def bench(name: str, family: str, *options: str, **more: object) -> Part:
        command = [sys.executable, "-m", "benchmarks.run", "--no-chart", "--keep-rows", "-vv",
                   f"--also={STATE_RESULTS}", f"--family={family}", *options]  # fmt: skip
        # Without a GPU this is a smoke test, which has no rival that is compiled.
        command += ["--device", "cuda", "--flush-l2"] if gpu else ["--quick"]
        return Part(f"{name} {family}", command, patience=300.0, rows=bool(gpu), **more)  # type: ignore[arg-type]

    def checks(name: str, *tests: str, **more: object) -> Part:
        """Tests of tools/_gpu_checks.py."""
        paths = [f"tools/_gpu_checks.py::test_{test}" for test in tests]
        return Part(name, [*pytest_command(), "-s", *paths], **more)  # type: ignore[arg-type]

    # All in one process, with the L2 cache flushed before each call.
    folders = (os.environ.get("RESULTS_DIR", "benchmarks/results"), STATE_RESULTS)
    first = [*pytest_command(), *(f"benchmarks/bench_{name}.py" for name in FIRST)]
    first += ["--device=cuda", "--first", "--flush-l2", "--keep-rows"]
    first += [f"--store={folder}/{slug}.json" for folder in folders]
    networks = [bench("networks", family, "--no-compile") for family in NETWORKS]
    networks[0].seconds = 180.0
    options = {OPTIONS: f"{'--device cuda' if gpu else '--quick'} --resume --also={STATE_RESULTS}"}
    some = ("--op=mish", "--op=silu", "--op=relu")
    return [
        checks("machine", "backends", "clocks", "copy", seconds=60.0),
        Part("kernels", [*many, GPU_FILES, *files_of("cuda")], 200.0, "cuda", environment=on_cuda,
             patience=45.0),
        Part("rows", first, 150.0, patience=60.0, rows=True, skip=no_gpu),
        sanitized("memcheck", 90.0),
        checks("ncu", "ncu", seconds=100.0, probe=counters, skip=no_gpu),
        checks("plans", "plan", seconds=120.0, skip=no_gpu),
        *networks,
        Part("triton", [*many, *files_of("triton")], kind="triton", sample=True),
        Part("triton backend", [*many, *BACKEND_TESTS], 0.0, "cuda", True, on_triton),
        *(sanitized(tool) for tool in ("racecheck", "initcheck", "synccheck")),
        *(bench("bench", family, "--no-compile") for family in FAMILIES[len(NETWORKS):]),
        *([bench("bench triton", "activations", "--no-compile", *some, environment=on_triton)]
          if gpu else []),
        *(bench("compile", family, "--only-compile", skip=no_gpu) for family in FAMILIES),
        # A process of its own: an experiment that dies takes no other one with it.
        *(checks(f"experiments {name}", f"experiment[{name}]", environment=options)
          for name in NAMES),
        Part("rest", many, kind="rest", sample=True),
    ]  # fmt: skip
