"""The machine `make gpu` runs on: its GPU, what is installed, the build for it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _gpu_steps import ROOT, Context, say
from _sanitized import setup_module

# Runs in another process, since a process that has started CUDA keeps memory of the GPU.
ASK = """
import json, torch
facts = ["", "", torch.__version__, 0]
if torch.cuda.is_available():
    arch = "%d%d" % torch.cuda.get_device_capability()
    facts = [torch.cuda.get_device_name(), arch, torch.__version__, torch.cuda.mem_get_info()[1]]
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
    return Machine(*facts)


def kernels(gpu: str) -> str:
    """Whether the GPU runs the CUDA kernels, for the first line of each part."""
    answer = _ask(ASK_BACKEND)
    if isinstance(answer, str):
        return f"fusedtrain cannot be imported: {answer.splitlines()[-1] if answer else '?'}"
    loaded, words = answer
    without = "GPU run without " if gpu and not loaded else ""
    return f"{without}_C_cuda.so{':' if without else ''} {words}"


def find_nvcc() -> str:
    """nvcc, found as setup.py finds it; "" where there is none."""
    setup = setup_module()
    try:
        return str(setup.nvcc())
    except setup.CannotBuild:
        return ""


def find_sanitizer() -> str:
    """compute-sanitizer, on PATH or beside nvcc."""
    beside = str(Path(find_nvcc()).resolve().parent)
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), beside))
    return shutil.which("compute-sanitizer", path=path) or ""


def _hash(folders: tuple[str, ...], files: tuple[str, ...], *more: str) -> str:
    """A key of the sources in some folders, some files, and other facts."""
    state = hashlib.sha256("\0".join(more).encode())
    kinds = {".py", ".h", ".cpp", ".cu", ".cuh"}
    sources = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in kinds]
    for path in sorted([*sources, *(ROOT / file for file in files)]):
        state.update(f"{path.relative_to(ROOT)}\0".encode())
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def tree_key(m: Machine) -> str:
    """A key of test results: they do not hold for other sources, another GPU or torch."""
    folders = ("csrc", "fusedtrain", "tests", "benchmarks")
    return _hash(folders, ("setup.py",), m.gpu, m.torch)


def build(c: Context, m: Machine, deadline: float) -> str:
    """In place, for this GPU alone; without one for all.

    What is built already is known by the contents of the sources: a copy of the checkout may have
    new times, by which ninja would build everything again.

    Returns:
        "done", "cut" (the objects that are there stay) or "broken".
    """
    compiler = find_nvcc()
    files = ("setup.py", "tools/ninja_build.py")
    key = _hash(("csrc",), files, m.arch, m.torch, compiler, sys.version)
    stamp = c.state / "built"
    names = ("_C.so", "_build_info.json", *(["_C_cuda.so"] if compiler else []))
    there = stamp.exists() and all((ROOT / "fusedtrain" / name).exists() for name in names)
    if there and stamp.read_text() == key:
        say("built already")
        return "done"
    code, cut = c.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], deadline,
        {"FUSEDTRAIN_REQUIRE": "cpu,cuda" if compiler else "cpu",
         **({"FUSEDTRAIN_CUDA_ARCHS": m.arch} if m.arch else {})},
    )  # fmt: skip
    if code == 0:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(key)
        return "done"
    return "cut" if cut else "broken"
