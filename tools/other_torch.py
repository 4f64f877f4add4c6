"""The suite under another torch, in an environment and a copy of the checkout of its own.

    python3 tools/other_torch.py oldest [--short] [pytest options]     # make oldest-torch
    python3 tools/other_torch.py rehearsal [pytest options]            # make rehearse-gpu

`oldest`: the tests of what differs between releases of torch, under the oldest supported one.
--short, for .ci/run: some of them, with the checkout's _C.so, whose ABI is stable; where pip cannot
get that torch, it says so and passes. `rehearsal`: on a machine without a GPU, all that it can run
with the versions of the machines with GPUs that the project meets first.

The environment is .venv-NAME (5 to 7 GB), the copy build/NAME; both are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from _checkout import copy_tree
from _test_files import all_located

ROOT = Path(__file__).resolve().parent.parent
PINS = dict(re.findall("^(.+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))
# With the pins: timm 1.0.31 changed numbers of optimizers that 1.0.28 had.
PACKAGES = [
    f"{name}=={PINS[name]}" if name in PINS else name
    for name in (
        "timm", "scikit-learn", "setuptools>=77", "wheel", "ninja", "numpy", "pytest",
        "pytest-xdist", "hypothesis", "expecttest", "mpmath", "rich", "matplotlib",
    )
]  # fmt: skip


def _tests(names: str) -> list[str]:
    return all_located(names.split())


# Tests of what differs between releases: compilers, export, torch.fx, hooks of optimizers, the
# profiler, headers.
SHORT = _tests(
    """
    test_export test_fx test_autograd_cpp test_batch_norm_compilers test_convert test_fold
    test_compiled_steps test_captured_steps test_optimizer_checkpoints test_depthwise_compiled
    """
)
OLDEST = [
    *SHORT, "tests/apex_calls/amp", "tests/advisor/profiling",
    *_tests(
        """
        test_autograd test_every_function test_cpp_nodes test_sync_batch_norm test_laws
        test_convert_calls test_convert_gates test_convert_norm_stays test_fold_activations
        """
    ),
]  # fmt: skip
# Triton's compiler for sm_90 in the dtypes that the short tier leaves out, and what is slow there,
# the tests of `make gpu` above all.
GPU_TOOL = [
    "-m", "long or slow", "-k", "not sm_80 and not gfx942", "tests/backends",
    *all_located(["test_gpu_tool", "test_gpu_tool_order"]),
]  # fmt: skip
COLLECTED = ["--collect-only", "-qq", "tests/backends/gpu", "tools/_gpu_checks.py", "benchmarks"]
LOADED = """
import sys, torch, fusedtrain
info = fusedtrain.backend_info()
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}\\n{info}")
missing = [name for name in sys.argv[1:] if not info.backends[name].loaded]
sys.exit(f"not loaded: {', '.join(missing)}" if missing else 0)
"""
# Methods of a tensor are in no list of names (_torch_names.py).
BINDINGS = """
import shlex, subprocess, setup
flags = f"{setup.CXX_FLAGS} {setup.torch_flags(setup.torch_folder())[0]}"
for name in ("cpu", "cuda"):
    command = f"{setup.cxx()} -fsyntax-only {flags} csrc/bindings/{name}.cpp"
    subprocess.run(shlex.split(command), check=True)
"""
say = partial(print, flush=True)


@dataclass(frozen=True)
class Torch:
    """A release, its environment, and its tests by what they are of: arguments of pytest."""

    target: str  # of make
    minutes: int  # on two idle cores, behind the installation
    torch: str
    tests: Mapping[str, Sequence[str]]
    python: str = ""  # "" for the one that runs this
    build: Mapping[str, str] = field(default_factory=dict)  # environment of setup.py


KINDS = {
    "oldest": Torch(
        "oldest-torch", 10, "torch==2.10.0 torchvision==0.25.0", {"tests": OLDEST},
        build={"FUSEDTRAIN_CUDA": "0"},
    ),
    "rehearsal": Torch(
        "rehearse-gpu", 15, "torch==2.11.0 torchvision==0.26.0 triton==3.6.0",
        {
            "collection": COLLECTED,
            "tests that need no GPU": [],
            "Triton ahead of time, `make gpu`": GPU_TOOL,
        },
        "3.12", {"FUSEDTRAIN_CUDA_ARCHS": "90"},
    ),
}  # fmt: skip


def interpreter(version: str) -> str:
    """A Python of the version: this one, one on PATH, of pyenv or of uv; "" if there is none."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    homes = [Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions",
             Path.home() / ".local/share/uv/python"]  # fmt: skip
    kept = [path for home in homes for path in sorted(home.glob(f"*{version}*/bin/python3"))]
    for command in (sys.executable, f"python{version}", *map(str, kept)):
        if shutil.which(command):
            run = subprocess.run([command, "-c", code], capture_output=True, text=True, check=False)
            if not version or run.stdout.strip() == version:
                return command
    return ""


def install(environment: Path, kind: Torch) -> str:
    """Makes or completes the environment; returns why it cannot be had."""
    python = environment / "bin" / "python"
    if not python.exists():
        base = interpreter(kind.python)
        if not base:
            command = f"make {kind.target} PYTHON=/path/to/python{kind.python}"
            return f"it needs Python {kind.python}, none on PATH, of pyenv or of uv: {command}"
        subprocess.run([base, "-m", "venv", environment], check=True)
    # To compile all files of Python takes 28 s, and few are imported.
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    if subprocess.call([*pip, *kind.torch.split(), *PACKAGES]):
        return f"pip cannot install {kind.torch}; its message is above"
    return ""


class Run:
    """Steps in the copy, one after another, and the names of those that fail."""

    def __init__(self, python: Path, copy: Path) -> None:
        self.python, self.copy = python, copy
        self.failed: list[str] = []

    def step(self, name: str, arguments: Sequence[str], **environment: str) -> bool:
        """Runs the environment's Python; returns whether the exit code is 0."""
        say(f"== {name}")
        begun = time.monotonic()
        paths = os.pathsep.join((str(self.copy), str(self.copy / "tools")))
        code = subprocess.call(
            [self.python, *arguments], cwd=self.copy,
            env={**os.environ, "PYTHONPATH": paths, **environment},
        )  # fmt: skip
        say(f"== {name}: {f'exit {code}' if code else 'passed'}, {time.monotonic() - begun:.0f} s")
        self.failed += [name] * (code != 0)
        return code == 0


def build(run: Run, kind: Torch, short: bool) -> bool:
    """Builds in the copy; returns whether all that was built is loaded."""
    package = run.copy / "fusedtrain"
    # A file is taken if its sources are the same; those of _C_autograd.so are not compared.
    (package / "_C_autograd.so").unlink(missing_ok=True)
    if short:
        for name in ("_C.so", "_build_info.json"):
            with contextlib.suppress(FileNotFoundError):  # then it is built
                shutil.copy2(ROOT / "fusedtrain" / name, package)
        run.step("the bindings with its headers", ["-c", BINDINGS])
    if not run.step("build", ["tools/gpu.py", "build"], **kind.build):
        return False
    loads = partial(run.step, "what is loaded")
    if not (package / "_C_cuda.so").exists():  # no nvcc, or not wanted
        return loads(["-c", LOADED, "cpu", "autograd"])
    cuda = loads(["-c", LOADED, "cpu", "autograd", "cuda"])
    return loads(["-c", LOADED, "triton"], FUSEDTRAIN_BACKEND="triton") and cuda


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--short", action="store_true", help="some tests, nothing built twice")
    options, more = parser.parse_known_args()
    kind, begun = KINDS[options.kind], time.monotonic()
    environment = ROOT / f".venv-{options.kind}"
    copy = ROOT / "build" / options.kind
    new = "" if environment.exists() else "; first 1 to 5 minutes of downloads, 7 GB"
    minutes = 3 if options.short else kind.minutes
    say(f"make {kind.target}: {kind.torch}, about {minutes} minutes on 2 cores{new}")
    if why := install(environment, kind):
        say(f"make {kind.target}: nothing is tested: {why}")
        return 0 if options.short else 1
    for results in ("benchmarks/results", "build/gpu"):  # of earlier runs, which are no results
        shutil.rmtree(copy / results, ignore_errors=True)
    copy_tree(copy)
    run = Run(environment / "bin" / "python", copy)
    if build(run, kind, options.short):
        workers = os.environ.get("WORKERS", "2")
        tests = {"tests": SHORT} if options.short else kind.tests
        for name, arguments in tests.items():
            run.step(name, ["-m", "pytest", "-q", "-n", workers, *arguments, *more])
    end = f"FAILED: {', '.join(run.failed)}" if run.failed else "passed"
    say(f"make {kind.target}: {end}, {(time.monotonic() - begun) / 60:.1f} minutes")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
