"""The parts of `make gpu`: commands with limits. docs/make_gpu.md says what each is for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _checkout import setup_module
from _test_files import all_located, located
from benchmarks.experiments import NAMES
from benchmarks.harness.store import FAMILIES

# Files of kernels, and the tests that compute-sanitizer runs: test file and test, both without
# test_, and its cases. It slows a kernel down a hundredfold, so these are few, small and odd.
_SANITIZED = """
pointwise activation_kernels numbers[cuda-mish-torch.float16] [cuda-mish-torch.float32]
channelwise activation_kernels numbers[cuda-prelu-torch.float16]
channelwise activation_kernels two_parameters_of_a_channel_each[cuda-shape0]
batch_norm batch_norm_kernels sums_of_half_a_batch_each[cuda]
batch_norm,batch_norm_reduce batch_norm_kernels every_layout[cuda-64 last]
batch_norm_normalise batch_norm_kernels every_layout[cuda-planes of 49]
batch_norm_reduce batch_norm_kernels every_layout[cuda-257 last]
batch_norm_grad_input batch_norm_kernels gradient_and_residual_in_another_layout[cuda-torch.float16]
batch_norm_restore batch_norm_in_place kernels[cuda-planes of 49]
gated chain_kernels every_packing[cuda-sliced] [cuda-channels last]
group_norm group_norm kernels[cuda-torch.bfloat16] [cuda-torch.float64]
row_norm row_norm_kernels shapes[cuda-rows] [cuda-planes] [cuda-channels last]
scale_add chain_kernels every_scale[cuda-odd channels last] [cuda-planes]
bias_act chain_kernels every_bias[cuda-odd channels last] [cuda-planes]
few_bit few_bit kernels[cuda-one-torch.float16] [cuda-off 16 bytes-torch.bfloat16]
depthwise depthwise_kernels every_case[cuda-5 x 5, stride 3, dilation 2-contiguous]
depthwise depthwise_kernels every_case[cuda-2 x 2-channels_last]
depthwise_planes depthwise_kernels every_case[cuda-7 x 7, stride 2, odd padding-contiguous]
depthwise_strips depthwise_kernels every_case[cuda-5 x 5, stride 2-channels_last]
depthwise_tiles depthwise_kernels several_blocks[cuda-many tiles-channels_last]
depthwise_weight depthwise_kernels every_case[cuda-3 x 5-channels_last]
depthwise_weight_planes depthwise_kernels every_case[cuda-3 x 3 of planes of 7-contiguous]
depthwise_weight_tiles depthwise_kernels several_blocks[cuda-many tiles-channels_last]
fold fold_kernels shapes[cuda-2d]
images image_kernels layouts[cuda-odd-torch.bfloat16]
optimizers optimizer_gpu_kernels units[cuda-offset]
optimizers optimizer_gpu_kernels parts_of_a_step[cuda]
optimizers,optimizer_update gpu_optimizers same_numbers_as_the_cpu[LAMB-dtype1] [AdamW-dtype0]
optimizer_update optimizer_gpu_kernels sizes[cuda-adam-torch.bfloat16-offset]
optimizer_update_codes optimizer_gpu_kernels bits_of_codes[cuda-squares-offset]
optimizer_update_codes optimizer_gpu_kernels states_in_codes[cuda-lamb]
pool,pool_backward pool_kernels every_window[cuda-of ResNet-odd-contiguous]
pool_backward pool_kernels every_window[cuda-of ResNet-small-contiguous]
scaling gpu_optimizers no_host_sync[AdamW]
scaling optimizer_gpu_kernels zero_tensors[cuda]
"""
_rows = [row.split(maxsplit=2) for row in _SANITIZED.strip().splitlines()]
SANITIZED_KERNELS = {kernels for names, _, _ in _rows for kernels in names.split(",")}
SANITIZED = [
    located(f"test_{file}::test_{test.partition('[')[0]}[{case}]")
    for _, file, test in _rows
    for case in test.partition("[")[2].rstrip("]").split("] [")
]
FOUND = 9  # compute-sanitizer's exit code where it found something; pytest has none above 5
PART = 540.0  # seconds at a time of a part that has no limit
STATE_RESULTS = "build/gpu/results"  # what $RESULTS_DIR has, where the next call finds it
OPTIONS = "FUSEDTRAIN_EXPERIMENT_OPTIONS"  # as tools/_gpu_checks.py reads them
# Folders with tests of a backend, by its name. To collect the others, too, takes 10 s a process.
FOLDERS = {
    "cuda": ("tests/backends/gpu", "tests/ops", "tests/optim", "tests/apex_calls/amp",
             "tests/apex_calls/fp16_utils"),
    "triton": ("tests/backends/gpu", "tests/backends/triton", "tests/ops", "tests/optim"),
}  # fmt: skip
OPS = ("test_autograd", "test_every_function", "test_activations")  # on another backend, too
# The first rows, those of the project's name before others; depthwise runs torch's kernels, still.
FIRST = ("batch_norm", "amp_step", "conv_bn", "activations", "chains", "pool", "few_bit", "images",
         "depthwise")  # fmt: skip
NETWORKS = ("conv_bn", "memory")  # families of whole networks, which come first
TINY = "-c \"import torch; torch.ones(3, device='cuda').sum().item()\""


@dataclass
class Part:
    """Tests that are run by one command. A call goes through the parts that have limits, until they
    have had so many seconds in all calls together, then through all that are not done."""

    name: str  # in the journal and the results; its first word names a group of parts
    command: Sequence[str]  # runs pytest, without the options of the plugin
    seconds: float = 0.0  # the limit
    kind: str = ""  # of tests (kind_of() in _gpu_plugin.py), "" for all
    environment: Mapping[str, str] = field(default_factory=dict)
    patience: float = PART  # seconds after which a test hangs; a third of the limit at most
    probe: str = ""  # a shell's command that fails where the part cannot run: no fault of ours
    skip: str = ""  # why it does not run here


def find(program: str) -> str:
    """A program of the CUDA toolkit, nvcc as setup.py finds it, the others on PATH or beside nvcc;
    "" where there is none."""
    nvcc = ""
    with contextlib.suppress(setup_module().CannotBuild):
        nvcc = str(setup_module().nvcc())
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(nvcc).resolve().parent)))
    return nvcc if program == "nvcc" else shutil.which(program, path=path) or ""


def pytest_command(workers: int = 0) -> list[str]:
    """pytest with a line per test and nothing that stops at a failure."""
    python = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    python += ["--continue-on-collection-errors"]
    if not workers or importlib.util.find_spec("xdist") is None:
        return [*python, "-p", "no:xdist"]
    # A worker that dies is replaced; each gets one test at a time, so that the order counts.
    return [*python, "-n", str(workers), "--max-worker-restart=1000", "--maxschedchunk=1"]


def parts(gpu: str, slug: str, workers: int) -> list[Part]:
    """All parts in their order: first those that teach the most in the shortest time. `gpu` is ""
    without one, `slug` the name of its files, `workers` is 0 without pytest-xdist."""
    many, no_gpu = pytest_command(workers), "" if gpu else "no GPU"
    tiny = f"{sys.executable} {TINY}"
    sanitizer = find("compute-sanitizer") or "compute-sanitizer"
    backend = "FUSEDTRAIN_TEST_GPU_BACKEND"  # test_gpu.py insists on this backend
    on_cuda = {backend: "cuda"} if gpu else {}
    on_triton = {"FUSEDTRAIN_BACKEND": "triton", backend: "triton"} if gpu else {}
    # Without a GPU this is a smoke test, which has no rival that is compiled.
    device = ["--device=cuda", "--flush-l2"] if gpu else ["--quick"]

    def checks(name: str, test: str, **more: Any) -> Part:
        """Tests of tools/_gpu_checks.py."""
        return Part(name, [*pytest_command(), "-s", f"tools/_gpu_checks.py::test_{test}"], **more)

    def sanitized(name: str, seconds: float = 0.0) -> Part:
        tool = [sanitizer, "--tool", name.split()[-1], "--error-exitcode", str(FOUND)]
        return Part(
            name, [*tool, "--print-limit", "20", *pytest_command(), *SANITIZED], seconds,
            # Without torch's cache each tensor is an allocation whose bounds are known.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            probe=f"{sanitizer} --error-exitcode 1 {tiny}", skip=no_gpu,
        )  # fmt: skip

    def bench(name: str, family: str, *options: str, **more: Any) -> Part:
        command = [sys.executable, "-m", "benchmarks.run", "--no-chart", "--keep-rows", "-vv",
                   f"--also={STATE_RESULTS}", f"--family={family}", *options]  # fmt: skip
        return Part(f"{name} {family}", [*command, *device], **more)

    # All in one process, with the L2 cache flushed before each call.
    folders = (os.environ.get("RESULTS_DIR", "benchmarks/results"), STATE_RESULTS)
    rows = [*pytest_command(), *(f"benchmarks/bench_{name}.py" for name in FIRST), *device]
    rows += ["--first", "--keep-rows", *(f"--store={folder}/{slug}.json" for folder in folders)]
    counters = f"{find('ncu') or 'ncu'} --section SpeedOfLight {tiny} | tee /dev/stderr"
    counters += " | grep -q 'DRAM Throughput'"
    options = {OPTIONS: f"{device[0]} --also={STATE_RESULTS}"}
    some = ("--no-compile", "--op=mish", "--op=silu", "--op=relu")
    return [
        checks("machine", "machine", seconds=60.0),
        Part("kernels", [*many, *FOLDERS["cuda"]], 200.0, "cuda", on_cuda, 45.0),
        Part("rows", rows, 150.0, skip=no_gpu),
        sanitized("memcheck", 90.0),
        checks("ncu", "ncu", seconds=100.0, probe=counters, skip=no_gpu),
        Part("plans", [*pytest_command(), "-s", located("test_plans_on_a_gpu")], 120.0),
        bench("networks", "conv_bn", "--no-compile", seconds=180.0),
        bench("networks", "memory", "--no-compile"),
        Part("triton", [*many, *FOLDERS["triton"]], kind="triton"),
        Part("triton backend", [*many, FOLDERS["cuda"][0], *all_located(OPS)], 0.0, "cuda",
             on_triton),
        *(sanitized(f"sanitize {tool}") for tool in ("racecheck", "initcheck", "synccheck")),
        *(bench("bench", name, "--no-compile") for name in FAMILIES if name not in NETWORKS),
        bench("bench triton", "activations", *some, environment=on_triton, skip=no_gpu),
        *(bench("compile", name, "--only-compile", skip=no_gpu) for name in FAMILIES),
        # A process of its own: an experiment that dies takes no other one with it.
        *(checks(f"experiments {name}", f"experiment[{name}]", environment=options)
          for name in NAMES),
    ]  # fmt: skip
