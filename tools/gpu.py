"""`make gpu`: what only a machine with a GPU can tell. Installs nothing; uses its own python.

    python3 tools/gpu.py build|test|sanitize|bench|bench-norms

Each part writes <device>-<part>.log into $RESULTS_DIR (default benchmarks/results), the benchmarks
also <device>.json, and ends within 9 minutes. Without a GPU each part starts all the same and shows
what it skips, and why: a rehearsal.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 9 * 60  # seconds of one part

# compute-sanitizer slows a kernel down a hundredfold: one op of each family, forward and backward.
SANITIZED = [
    f"tests/test_kernels.py::test_numbers[cuda-{name}-torch.{dtype}]"
    for name in ("mish", "prelu") for dtype in ("float16", "float32")
] + [
    "tests/test_batch_norm_kernels.py::test_every_layout[cuda-planes of 49]",
    "tests/test_batch_norm_kernels.py::test_every_layout[cuda-257 last]",
    "tests/test_fold_kernels.py::test_shapes[cuda-2d]",
    "tests/test_pool_kernels.py::test_every_window[cuda-of ResNet-odd-contiguous]",
]  # fmt: skip
FOUND = 9  # the exit code that says the tool found something
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


class Part:
    """Runs commands one after another, shows and keeps what they print, within the time."""

    def __init__(self, log: TextIO) -> None:
        self.log = log
        self.deadline = time.monotonic() + LIMIT
        self.failed: list[str] = []

    def say(self, line: str) -> None:
        print(line, flush=True)
        print(line, file=self.log, flush=True)

    def run(self, *command: str, needed: bool = True, **environment: str) -> int:
        settings = " ".join(f"{k}={v}" for k, v in environment.items())
        self.say(f"$ {settings} {' '.join(command)}".replace("$  ", "$ "))
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
        signal.alarm(max(1, int(self.deadline - start)))
        for line in process.stdout:
            self.say(line.rstrip("\n"))
        code = process.wait()
        signal.alarm(0)
        seconds = time.monotonic() - start
        ended = "ended by the time limit" if code == -signal.SIGKILL else f"exit {code}"
        self.say(f"[{ended}, {seconds:.0f} s]")
        if code != 0 and needed:
            self.failed.append(" ".join(command[:6]))
        return code


def missing() -> list[str]:
    """What the python that is there lacks."""
    needs = {"torch": "", "pytest": "", "hypothesis": "", "ninja": "", "setuptools": ""}
    return [f"{name} is not installed for {sys.executable}" for name in needs
            if importlib.util.find_spec(name) is None]  # fmt: skip


def device() -> tuple[str, str, str]:
    """Name of the GPU (empty: none), its architecture for nvcc, and what torch says."""
    import torch

    what = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    if not torch.cuda.is_available():
        return "", "", f"{what}: no GPU is seen, so everything that needs one is skipped"
    name = torch.cuda.get_device_name()
    major, minor = torch.cuda.get_device_capability()
    return name, f"{major}{minor}", f"{what}, {name}, sm_{major}{minor}"


def build(part: Part, arch: str) -> bool:
    """In place, for this GPU alone; without one for all, as ever."""
    require = "cpu,cuda" if shutil.which("nvcc") or os.environ.get("CUDA_HOME") else "cpu"
    code = part.run(
        sys.executable, "setup.py", "-q", "build_ext", "--inplace",
        FUSEDTRAIN_REQUIRE=require, **({"FUSEDTRAIN_CUDA_ARCHS": arch} if arch else {}),
    )  # fmt: skip
    return code == 0


def test(part: Part, gpu: str) -> None:
    """The whole suite (CUDA kernels where a test is on the GPU), then the GPU's part on Triton."""
    workers = "2" if not gpu else str(min(8, os.cpu_count() or 2))
    xdist = ["-n", workers] if importlib.util.find_spec("xdist") else []
    pytest = (sys.executable, "-m", "pytest", "-q", "--durations=10", *xdist)
    # The variable makes tests/test_gpu.py insist on the backend that is meant.
    part.run(*pytest, **({"FUSEDTRAIN_TEST_GPU_BACKEND": "cuda"} if gpu else {}))
    triton = {"FUSEDTRAIN_BACKEND": "triton", "FUSEDTRAIN_TEST_GPU_BACKEND": "triton"}
    part.run(
        *pytest, "tests/test_gpu.py", "tests/test_autograd.py", "tests/test_activations.py",
        "-k", "cuda or gpu", **(triton if gpu else {}),
    )  # fmt: skip


def sanitize(part: Part, gpu: str) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None or not gpu:
        part.say(f"skipped: {'compute-sanitizer is not on PATH' if gpu else 'no GPU'}")
        return
    pytest = (sys.executable, "-m", "pytest", "-q", "-x", *SANITIZED)
    for name in TOOLS:
        # Without torch's cache each tensor is an allocation of its own, whose bounds are known.
        code = part.run(
            tool, "--tool", name, "--error-exitcode", str(FOUND), "--print-limit", "20", *pytest,
            needed=False, PYTORCH_NO_CUDA_MEMORY_CACHING="1",
        )  # fmt: skip
        if code == FOUND:
            part.failed.append(name)
        elif code != 0:
            part.say(f"{name}: it did not run; a device that it does not support is no fault")


def benchmark(part: Part, gpu: str, *families: str) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:
        part.say("skipped: pytest-benchmark is not installed")
        return
    options = ("--device", "cuda") if gpu else ("--quick", "--no-compile")
    chosen = [f"--family={family}" for family in families]
    part.run(sys.executable, "-m", "benchmarks.run", *options, *chosen)


def bench(part: Part, gpu: str) -> None:
    benchmark(part, gpu, "activations", "amp_step", "apex")
    if gpu and importlib.util.find_spec("pytest_benchmark") is not None:
        part.run(
            sys.executable, "-m", "benchmarks.run", "--device", "cuda", "--no-compile",
            "--family=activations", "--op", "mish", "--op", "silu", "--op", "relu",
            needed=False, FUSEDTRAIN_BACKEND="triton",
        )  # fmt: skip


def bench_norms(part: Part, gpu: str) -> None:
    benchmark(part, gpu, "batch_norm", "conv_bn", "chains", "images", "few_bit", "pool", "memory")


PARTS = {"test": test, "sanitize": sanitize, "bench": bench, "bench-norms": bench_norms}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("build", *PARTS))
    chosen = parser.parse_args().part
    if lacking := missing():
        print("make gpu cannot run:", *lacking, sep="\n  ")
        return 1
    gpu, arch, what = device()
    results = Path(os.environ.get("RESULTS_DIR") or ROOT / "benchmarks/results").resolve()
    results.mkdir(parents=True, exist_ok=True)
    os.environ["RESULTS_DIR"] = str(results)
    slug = re.sub(r"[^a-z0-9]+", "-", (gpu or "no gpu").lower()).strip("-")
    path = results / f"{slug}-{chosen}.log"
    with path.open("w") as log:
        part = Part(log)
        part.say(f"gpu-{chosen}: {what}")
        if build(part, arch) and chosen != "build":
            PARTS[chosen](part, gpu)
        for command in part.failed:
            part.say(f"FAILED: {command}")
        part.say(f"gpu-{chosen}: {'failed' if part.failed else 'done'}; log: {path}")
    return 1 if part.failed else 0


if __name__ == "__main__":
    sys.exit(main())
