"""The machine `make gpu` runs on: its GPU, what is installed, the build for it."""

from __future__ import annotations

import contextlib
import functools
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

# Run in another process, since a process that has started CUDA keeps memory of the GPU.
ASK = """
import json, torch
facts = ["", "", torch.__version__, 0]
if torch.cuda.is_available():
    arch = "%d%d" % torch.cuda.get_device_capability()
    facts = [torch.cuda.get_device_name(), arch, torch.__version__, torch.cuda.mem_get_info()[1]]
print(json.dumps(facts))
"""
ASK_BACKENDS = """
import json, fusedtrain
backends = fusedtrain.backend_info().backends
print(json.dumps({name: "" if b.loaded else f"{name}: {b}" for name, b in backends.items()}))
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
        name = f"{self.gpu}, sm_{self.arch}" if self.gpu else "no GPU: what needs one is skipped"
        return f"{name}, torch {self.torch}, Python {sys.version.split()[0]}"


@functools.cache
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


def why_not(backend: str) -> str:
    """Why a backend is not loaded; "" where it is."""
    answer = _ask(ASK_BACKENDS)
    if isinstance(answer, str):
        return f"fusedtrain cannot be imported: {answer.splitlines()[-1] if answer else '?'}"
    return str(answer[backend])


def find(program: str) -> str:
    """A program of the CUDA toolkit, nvcc as setup.py finds it, the others on PATH or beside nvcc;
    "" where there is none."""
    nvcc = ""
    with contextlib.suppress(setup_module().CannotBuild):
        nvcc = str(setup_module().nvcc())
    beside = str(Path(nvcc).resolve().parent)
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), beside))
    return nvcc if program == "nvcc" else shutil.which(program, path=path) or ""


def tree_key(m: Machine) -> str:
    """A key of test results: they do not hold for other sources, another GPU or torch."""
    state = hashlib.sha256(f"{m.gpu}\0{m.torch}".encode())
    kinds = {".py", ".h", ".cpp", ".cu", ".cuh"}
    folders = [ROOT / name for name in ("csrc", "fusedtrain", "tests", "benchmarks")]
    sources = [p for folder in folders for p in folder.rglob("*") if p.suffix in kinds]
    for path in sorted([*sources, ROOT / "setup.py"]):
        state.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return state.hexdigest()[:16]


def unfit(m: Machine) -> str:
    """Why the files that are there must be built again; "" where they will do.

    They may come from another machine: the two with the stable ABI serve every torch and Python.
    Their sources are known by the contents: a copy of the checkout may have new times.
    """
    package, has_nvcc = ROOT / "fusedtrain", bool(find("nvcc"))
    record = package / "_build_info.json"
    built = json.loads(record.read_text()) if record.exists() else {}
    if built.get("sources") != setup_module().sources_key():
        return "no files of these sources are there"
    if has_nvcc and not (package / "_C_cuda.so").exists():
        return "_C_cuda.so is missing"
    return why_not("cpu") or (why_not("cuda") if m.gpu and has_nvcc else "")


def build(c: Context, m: Machine, deadline: float) -> str:
    """In place, for this GPU alone; without one for all. Files that will do are taken.

    Returns:
        "done", "cut" (the objects that are there stay) or "broken".
    """
    if why := unfit(m):
        say(f"build: {why}")
        environment = {"FUSEDTRAIN_REQUIRE": "cpu,cuda" if find("nvcc") else "cpu"}
        environment |= {"FUSEDTRAIN_CUDA_ARCHS": m.arch} if m.arch else {}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        code, cut = c.run(command, deadline, environment)
        _ask.cache_clear()
        return "done" if code == 0 else "cut" if cut else "broken"
    say("build: the files are there, of these sources")
    if why_not("autograd"):  # that file is for one torch and one Python; its lack is no failure
        c.run([sys.executable, "-m", "fusedtrain", "build-autograd"], deadline, {})
        _ask.cache_clear()
    return "done"
