"""Steps of `make gpu` that are no tests of the suite, as tests: the journal has a line for each,
with the reason of a failure, and one that was cut runs again. What they print is in the log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedtrain
from _devices import GPUS
from _gpu_numbers import first_rows
from _gpu_parts import OPTIONS, find
from benchmarks.experiments import NAMES
from benchmarks.experiments.__main__ import INTERRUPTED, main
from fusedtrain.advisor.bench.clock import cuda_clock, device_slug

COPIED = 1 << 31  # bytes
LEAST_COPY = 0.7  # of the published peak; a slower copy has a neighbour, or a throttled GPU
CLOCKS = (
    "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,power.limit,"
    "temperature.gpu,driver_version,memory.used"
)
NCU = (
    "--profile-from-start", "off", "--clock-control", "none", "--section", "SpeedOfLight",
    "--section", "MemoryWorkloadAnalysis", "--section", "LaunchStats", "--section", "Occupancy",
    "--section", "WarpStateStats",
)  # fmt: skip


def test_machine() -> None:
    """The kernels that the GPU will run, its clocks, limits and neighbours, and a copy of 2 GB."""
    info = fusedtrain.backend_info()
    print(f"\n{info}")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    subprocess.run(["nvidia-smi", CLOCKS, "--format=csv"], check=False)
    source = torch.ones(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    speed = 2 * COPIED / min(cuda_clock(lambda: target.copy_(source), 1) for _ in range(10))
    words = torch.cuda.get_device_name().split()
    known = [g.bandwidth / 1e9 for g in GPUS if g.name.split()[0] in words and "PCIe" not in words]
    print(f"copy of 2 GB: {speed:.0f} GB/s read and written; published: {known or 'unknown'}")
    assert info.backends["cuda"].loaded
    assert speed > LEAST_COPY * sum(known)


@pytest.mark.parametrize("place", range(4))
def test_ncu(place: int) -> None:
    """Nsight Compute on a row that is far below its prediction: one call of ours."""
    path = Path(os.environ["RESULTS_DIR"]) / f"{device_slug('cuda')}.json"
    rows = first_rows(path, torch.cuda.get_device_name())
    if len(rows) <= place:
        pytest.skip("needs a measured row")
    print(f"\nncu: {rows[place].name}: {rows[place].share:.0%} of {rows[place].guess:.0f} GB/s")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", rows[place].name]
    command = [find("ncu"), *NCU, *run, "--device=cuda", "--first", "--profile"]
    done = subprocess.run(command, stdout=-1, stderr=-2, text=True, check=False)
    print(done.stdout)
    assert "==PROF== Profiling" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_experiment(name: str) -> None:
    """No run raises. Numbers that differ from published ones are results and no failure."""
    code = main([name, *os.environ[OPTIONS].split()])
    if code == INTERRUPTED:  # the time is up: neither passed nor failed
        raise KeyboardInterrupt
    assert code == 0
