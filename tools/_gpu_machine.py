"""The machine `make gpu` runs on: its GPU, what is installed, the build for it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gpu_steps import ROOT, Context
from _sanitized import setup_module

NEEDED = ("torch", "pytest", "hypothesis", "ninja", "setuptools")
# Runs in another process, since a process that has started CUDA keeps memory of the GPU.
ASK = """
import json, sys, torch
facts = {"torch": torch.__version__, "gpu": "", "arch": "", "memory": 0}
if torch.cuda.is_available():
    major, minor = torch.cuda.get_device_capability()
    facts |= {"gpu": torch.cuda.get_device_name(), "arch": f"{major}{minor}",
              "memory": torch.cuda.mem_get_info()[1]}
print(json.dumps(facts))
"""
ASK_BACKEND = """
import json, fusedtrain
backend = fusedtrain.backend_info().backends["cuda"]
print(json.dumps([backend.loaded, str(backend)]))
"""


@dataclass(frozen=True)
class Machine:
    """A GPU (or "" for none) and the torch that drives it."""

    gpu: str
    arch: str
    torch: str
    memory: int = 0  # bytes of the GPU

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", (self.gpu or "no gpu").lower()).strip("-")

    @property
    def workers(self) -> int:
        """Test processes at a time: 8 GB of the GPU for each, for some tests take large tensors."""
        cores = os.cpu_count() or 2
        return max(1, min(8, cores, self.memory // (8 << 30))) if self.gpu else min(2, cores)

    def __str__(self) -> str:
        python = f"torch {self.torch}, Python {sys.version.split()[0]}"
        if not self.gpu:
            return f"no GPU is seen, so everything that needs one is skipped; {python}"
        return f"{self.gpu}, sm_{self.arch}, {python}"


def _ask(code: str) -> Any:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = run.stdout.splitlines()
    return json.loads(lines[-1]) if run.returncode == 0 and lines else run.stderr[-2000:]


def machine() -> Machine:
    """This one."""
    facts = _ask(ASK)
    if isinstance(facts, str):
        raise SystemExit(f"make gpu cannot run: torch does not work:\n{facts}")
    return Machine(facts["gpu"], facts["arch"], facts["torch"], facts["memory"])


def kernels(gpu: str) -> str:
    """Whether the GPU runs the CUDA kernels, for the first line of each part."""
    answer = _ask(ASK_BACKEND)
    if isinstance(answer, str):
        return f"fusedtrain cannot be imported: {answer.splitlines()[-1] if answer else '?'}"
    loaded, words = answer
    if loaded:
        return f"_C_cuda.so {words}"
    return f"GPU run without _C_cuda.so: {words}" if gpu else f"_C_cuda.so {words}"


def missing() -> list[str]:
    """Packages that this python lacks, a line each."""
    return [f"{name} is not installed for {sys.executable}" for name in NEEDED
            if importlib.util.find_spec(name) is None]  # fmt: skip


def find_nvcc() -> str:
    """nvcc, found as setup.py finds it; "" where there is none."""
    setup = setup_module()
    try:
        return str(setup.nvcc())
    except setup.CannotBuild:
        return ""


def find_sanitizer() -> str:
    """compute-sanitizer, on PATH or beside nvcc."""
    beside = Path(find_nvcc()).resolve().parent
    return (
        shutil.which("compute-sanitizer")
        or shutil.which("compute-sanitizer", path=str(beside))
        or ""
    )


def _hash(paths: list[Path], *more: str) -> str:
    state = hashlib.sha256("\0".join(more).encode())
    for path in sorted(paths):
        state.update(f"{path.relative_to(ROOT)}\0".encode())
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def _files(*folders: str) -> list[Path]:
    kinds = {".py", ".h", ".cpp", ".cu", ".cuh"}
    return [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in kinds]


def tree_key(m: Machine) -> str:
    """A key of test results: they do not hold for other sources, another GPU or torch."""
    files = [*_files("csrc", "fusedtrain", "tests", "benchmarks"), ROOT / "setup.py"]
    return _hash(files, m.gpu, m.torch)


def build(c: Context, m: Machine, deadline: float) -> str:
    """In place, for this GPU alone; without one for all.

    What is built already is known by the contents of the sources: a copy of the checkout may have
    new times, by which ninja would build everything again.

    Returns:
        "done", "cut" (the objects that are there stay) or "broken".
    """
    compiler = find_nvcc()
    how = [ROOT / "setup.py", ROOT / "tools/ninja_build.py"]
    key = _hash([*_files("csrc"), *how], m.arch, m.torch, compiler, sys.version)
    stamp = c.state / "built"
    package = ROOT / "fusedtrain"
    names = ("_C.so", "_build_info.json", *(["_C_cuda.so"] if compiler else []))
    if (
        stamp.exists()
        and stamp.read_text() == key
        and all((package / name).exists() for name in names)
    ):
        c.say("built already")
        return "done"
    ended = c.command(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], deadline,
        {"FUSEDTRAIN_REQUIRE": "cpu,cuda" if compiler else "cpu",
         **({"FUSEDTRAIN_CUDA_ARCHS": m.arch} if m.arch else {})},
    )  # fmt: skip
    if ended.code == 0:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(key)
        return "done"
    return "cut" if ended.by == "time" else "broken"
