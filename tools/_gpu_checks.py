"""Steps of `make gpu` that are no tests of the suite, as tests: the journal has a line for each,
with the reason of a failure, and one that was cut runs again. What they print is in the log."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import _gpu_numbers
import fusedtrain
from _devices import GPUS
from _gpu_parts import OPTIONS, find
from benchmarks.experiments import NAMES
from benchmarks.experiments.command import INTERRUPTED, main
from benchmarks.harness import networks
from benchmarks.harness.memory import most_allocated
from fusedtrain.advisor.bench.clock import cuda_clock, device_slug

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
COPIED = 1 << 31  # bytes
LEAST_COPY = 0.7  # of the published peak; a slower copy has a neighbour, or a throttled GPU
WORST = 4
NCU = (
    "--profile-from-start", "off", "--clock-control", "none", "--section", "SpeedOfLight",
    "--section", "MemoryWorkloadAnalysis", "--section", "LaunchStats", "--section", "Occupancy",
    "--section", "WarpStateStats",
)  # fmt: skip


def test_backends() -> None:
    """The kernels that the GPU will run."""
    info = fusedtrain.backend_info()
    print(f"\n{info}")
    assert not torch.cuda.is_available() or info.backends["cuda"].loaded


@on_gpu
def test_clocks() -> None:
    """Clocks, limits and neighbours, as the driver tells them."""
    facts = "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit"
    facts += ",temperature.gpu,driver_version,memory.used"
    command = ["nvidia-smi", f"--query-gpu={facts}", "--format=csv"]
    subprocess.run(command, check=True)


@on_gpu
def test_copy() -> None:
    """A copy of 2 GB, beside the published bandwidth."""
    source = torch.ones(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    nanoseconds = min(cuda_clock(lambda: target.copy_(source), 1) for _ in range(10))
    speed = 2 * COPIED / nanoseconds
    peak = _published()
    print(f"\ncopy of 2 GB: {speed:.0f} GB/s read and written; published: {peak:.0f}")
    assert speed > LEAST_COPY * peak


def _published() -> float:
    """GB/s of this GPU's memory by its maker; 0.0 where it is not in the list."""
    words = torch.cuda.get_device_name().split()
    known = [g for g in GPUS if g.arch == _arch() and g.name.split()[0] in words]
    return known[0].bandwidth / 1e9 if known and "PCIe" not in words else 0.0


def _arch() -> str:
    return "{}{}".format(*torch.cuda.get_device_capability())


@on_gpu
@pytest.mark.parametrize("place", range(WORST))
def test_ncu(place: int) -> None:
    """Nsight Compute on a row that is far below its prediction: one call of ours."""
    program = find("ncu")
    if not program:
        pytest.skip("needs ncu (Nsight Compute)")
    path = Path(os.environ["RESULTS_DIR"]) / f"{device_slug('cuda')}.json"
    rows = _gpu_numbers.measured(path, torch.cuda.get_device_name())
    rows = _gpu_numbers.worst(rows, WORST)
    if len(rows) <= place:
        pytest.skip("needs a measured row that is below its prediction")
    row = rows[place]
    print(f"\nncu: {row.name}: {row.share:.0%} of {row.guess:.0f} GB/s")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", row.name]
    command = [program, *NCU, *run, "--device=cuda", "--first", "--profile"]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, **out, text=True, check=False)  # type: ignore[call-overload]
    print(done.stdout)
    assert "==PROF== Profiling" in done.stdout


def _resnet() -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    setup = networks.Setup("train", "resnet50", 64, 224)
    images, labels = networks.batch_of(setup, "cuda")
    return networks.build(setup, "cuda"), images, lambda output: F.cross_entropy(output, labels)


def _gpt() -> tuple[nn.Module, Any, Callable[[Any], Tensor]]:
    from scripts.nanogpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(1024, 50304, n_layer=12, n_head=12, n_embd=768)).cuda()
    tokens = torch.randint(50304, (2, 8, 1024), device="cuda")
    return model, (tokens[0], tokens[1]), lambda output: output[1]


@on_gpu
@pytest.mark.parametrize("budget", [0.85, 0.7])
@pytest.mark.parametrize("make", [_resnet, _gpt], ids=["resnet50", "gpt"])
def test_plan(make: Callable[[], tuple[Any, Any, Any]], budget: float) -> None:
    """The peak of a training step under a plan, beside the predicted one."""
    check_plan(*make(), budget)


def check_plan(model: nn.Module, example: Any, loss: Callable[[Any], Tensor], budget: float) -> int:
    """Plans, trains a step, and returns its peak; fails if that is above the budget."""
    arguments = example if isinstance(example, tuple) else (example,)
    device = arguments[0].device.type
    with torch.autocast(device, torch.bfloat16):
        plan = fusedtrain.plan_memory(model, example, budget, loss=loss)
    fusedtrain.convert(model, memory=plan)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        # Its end drops the 16-bit copies of weights: 51 MB of a ResNet-50.
        with torch.autocast(device, torch.bfloat16):
            output = model(*arguments)
            value = loss(output)
        value.backward()

    step()
    model.zero_grad(set_to_none=True)
    peak, _ = most_allocated(step, device)
    sizes = {"eager's peak": plan.eager_peak, "allowed": plan.budget, "predicted": plan.predicted,
             "measured by the planner": plan.peak, "in training": peak}  # fmt: skip
    print("\nMB:", ", ".join(f"{size / 1e6:.1f} {what}" for what, size in sizes.items()))
    assert peak <= 1.02 * plan.budget
    return peak


@pytest.mark.parametrize("name", NAMES)
def test_experiment(name: str) -> None:
    """No run raises. A verdict against a published claim is a result and no failure."""
    code = main([name, *os.environ[OPTIONS].split()])
    if code == INTERRUPTED:  # the time is up: neither passed nor failed
        raise KeyboardInterrupt
    assert code == 0
