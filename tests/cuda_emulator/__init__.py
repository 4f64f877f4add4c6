"""Builds and loads the emulated CUDA kernels, as the ops of ``torch.ops.fusedtrain_emulated``."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

import fusedtrain  # noqa: F401  (its schemas)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "emulator"
ORDERS = ("forward", "reverse", "shuffled")

# Fortified, longjmp refuses to go from one stack to another.
# -O1 -fno-tree-sra: the sanitizer's hooks see each access as the kernel has it, 16 bytes in one.
_FLAGS = "-U_FORTIFY_SOURCE -std=c++17 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unused-function"
# `make sanitize` sets the variable: GCC has no other sanitizer beside -fsanitize=thread.
SANITIZED = bool(os.environ.get("FUSEDTRAIN_TEST_EMULATOR_SANITIZERS"))
_SANITIZERS = os.environ.get("FUSEDTRAIN_TEST_EMULATOR_SANITIZERS", "")
_WATCH = _SANITIZERS or "-fsanitize=thread --param tsan-instrument-func-entry-exit=0"
# Calls that arithmetic.cpp makes inexact results with use the stack.
_X86 = platform.machine() in ("x86_64", "AMD64")
_RED_ZONE = "-mno-red-zone " if _X86 else ""
KERNEL_FLAGS = (
    f"{_FLAGS} -O1 -fno-tree-sra {_RED_ZONE}{_WATCH} "
    f"-Wno-unknown-pragmas -I{HERE}/include -include cuda_runtime.h -x c++"
)


def why_not() -> str:
    """Why the emulator cannot be built here; empty where it can."""
    if not shutil.which("c++"):
        return "the emulator needs a C++ compiler (c++)"
    if importlib.util.find_spec("ninja") is None:
        return "the emulator needs ninja"
    return ""


LIBRARY = BUILD / "_emulated.so"


@functools.cache
def build() -> str:
    """Builds the library where a source has changed since. Returns the compiler's errors: a test
    after another would wait for them again."""
    import ninja

    torch_folder = Path(torch.__file__).parent
    host = (
        f"{_FLAGS} -O2 -I{HERE}/include -DFT_EMULATED -DTORCH_TARGET_VERSION=0x020A000000000000 "
        f"-isystem {torch_folder}/include -isystem {torch_folder}/include/torch/csrc/api/include"
        f"{' -DFT_NO_HOOKS' if _SANITIZERS else ''}"
    )
    sources = [(s, KERNEL_FLAGS) for s in sorted((ROOT / "csrc/cuda").glob("*.cu"))]
    sources += [(HERE / "faults.cu", KERNEL_FLAGS + f" -I{ROOT}/csrc")]
    sources += [(HERE / f"{name}.cpp", host) for name in ("emulator", "memory", "arithmetic")]
    sources += [(ROOT / "csrc/bindings/cuda.cpp", f"{host} {_SANITIZERS}".strip())]
    lines = [
        "rule compile",
        "  command = c++ $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        # Each division and square root of floats is followed by a call of arithmetic.cpp.
        "rule kernels",
        "  command = c++ $flags -MMD -MF $out.d -MT $out -S $in -o $out.s && "
        r"sed -E -i 's/^\t(div|sqrt)ss\t.*%xmm([0-9]+)$$/&\n\tcall\temulator_inexact_\2/' $out.s"
        " && c++ -c $out.s -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = c++ -shared $in -L{torch_folder}/lib -Wl,--no-as-needed -ltorch -ltorch_cpu "
        f"-lc10 {_SANITIZERS} -o $out",
    ]
    for source, flags in sources:
        rule = "kernels" if source.suffix == ".cu" else "compile"
        lines += [f"build {source.stem}.o: {rule} {source}", f"  flags = {flags}"]
    lines.append(f"build {LIBRARY.name}: link {' '.join(s.stem + '.o' for s, _ in sources)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    # Test processes run side by side: the first one builds.
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (BUILD / "build.ninja").write_text("\n".join(lines) + "\n")
        run = subprocess.run(
            [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(BUILD)], capture_output=True, text=True
        )
    return f"{run.stdout}{run.stderr}" if run.returncode != 0 else ""


@functools.cache
def load() -> Emulator:
    """The emulator; its ops are defined with the schemas of ``torch.ops.fusedtrain``."""
    if errors := build():
        raise RuntimeError(f"the emulator does not build:\n{errors}")
    library = torch.library.Library("fusedtrain_emulated", "DEF")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("Meta"):
        if name.startswith("fusedtrain::"):
            op = getattr(torch.ops.fusedtrain, name.removeprefix("fusedtrain::"))
            library.define(str(op.default._schema).removeprefix("fusedtrain::"))
    torch.ops.load_library(str(LIBRARY))
    return Emulator(ctypes.CDLL(str(LIBRARY)), library)


class Emulator:
    """The controls of the library."""

    def __init__(self, c: ctypes.CDLL, schemas: torch.library.Library) -> None:
        self.c = c
        c.emulator_moved.argtypes = [ctypes.c_void_p, ctypes.c_int]
        c.emulator_moved.restype = ctypes.c_int64
        self.schemas = schemas  # lives as long as the ops

    def set_order(self, order: str) -> None:
        """In which order threads and blocks take turns: one of ORDERS."""
        self.c.emulator_order(ORDERS.index(order))

    def set_device(self, device: int) -> None:
        """0, or 1: a GPU whose blocks have almost no shared memory that a launch may ask for."""
        self.c.emulator_device(device)

    def traffic(self, least: int) -> tuple[int, int, int]:
        """Bytes that the kernels of the last call have loaded, bytes stored, and accesses, of
        tensors of ``least`` bytes or more (smaller ones stay in the caches)."""
        moved = (ctypes.c_int64 * 4)()
        self.c.emulator_traffic(ctypes.c_uint64(least), moved)
        return moved[0], moved[1], moved[2] + moved[3]

    def launches(self) -> int:
        """Kernels started since the library was loaded."""
        return int(self.c.emulator_launches())

    def moved(self, t: torch.Tensor | None = None) -> tuple[int, int, int, int]:
        """Bytes that the last call has loaded from the tensor (or from all memory), bytes stored,
        loads, stores."""
        data = None if t is None else t.data_ptr()
        loaded, stored, loads, stores = (self.c.emulator_moved(data, i) for i in range(4))
        return loaded, stored, loads, stores

    def call(self, name: str, *arguments: object) -> object:
        """One op, with no buffers but its own."""
        self.c.emulator_reset()
        return getattr(torch.ops.fusedtrain_emulated, name)(*arguments)
