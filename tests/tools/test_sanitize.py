"""`make sanitize` sees planted faults: in a function, in an emulated kernel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import _checkout
import sanitize

pytestmark = pytest.mark.slow
# Words that the report of a planted fault (tools/sanitizer_faults.cpp) must contain.
FAULTS = {
    "nothing": "",
    "read_past_the_end": "heap-buffer-overflow",
    "read_before_the_start": "heap-buffer-overflow",
    "write_past_the_end": "heap-buffer-overflow",
    "read_past_a_local_array": "stack-buffer-overflow",
    "read_past_a_table": "global-buffer-overflow",
    "index_past_an_array": "index 16 out of bounds",
    "misaligned": "misaligned address",
    "signed_overflow": "signed integer overflow",
    "shift_by_too_much": "shift exponent 32 is too large",
    "float_that_no_integer_holds": "outside the range of representable values",
    "pointer_overflow": "overflowed to",
}
# The same of emulated kernels (tests/cuda_emulator/faults.cu).
EMULATED_FAULTS = {
    "block_sums": "",
    "read_past_the_end": "heap-buffer-overflow",
    "read_before_the_start": "heap-buffer-overflow",
    "write_past_the_end": "heap-buffer-overflow",
    "atomic_past_the_end": "heap-buffer-overflow",
    "atomics": "",
    "misaligned_vector": "misaligned address",
    "dynamic_shared too small": "use-after-poison",
    "shared_into_shared": "global-buffer-overflow",
    "local_array": "stack-buffer-overflow",
}
CALL = """
import ctypes
c, p = ctypes.CDLL(None), ctypes.c_void_p()
c.posix_memalign(ctypes.byref(p), 16, 64)
c.memset(p, 0, 64)
getattr(ctypes.CDLL({library!r}), {name!r})(p, ctypes.c_int64(16))
"""
EMULATED = """
import sys; sys.path[:0] = ["tests", "tests/backends/cuda"]
import ctypes, cuda_emulator, torch
from test_cuda_emulator import cases
c = cuda_emulator.load().c
tensors = torch.arange(64.0), torch.zeros(64)
pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
said = c.fault_run(cases(c)[{name!r}], *pointers)
assert said == b"", said
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The planted faults, compiled with the flags of the kernels and those of `make sanitize`."""
    if sys.platform != "linux" or not shutil.which("c++"):
        pytest.skip("needs Linux and a C++ compiler")
    try:
        sanitize.runtime()
    except sanitize.CannotRun as reason:
        pytest.skip(str(reason))
    setup, path = _checkout.setup_module(), tmp_path_factory.mktemp("faults") / "faults.so"
    command = f"{setup.cxx()} {setup.CXX_FLAGS} {sanitize.FLAGS} -shared -o {path}"
    subprocess.run([*command.split(), ROOT / "tools/sanitizer_faults.cpp"], check=True)
    return str(path)


def report(code: str, env: dict[str, str], folder: Path) -> str:
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    reports = sanitize.reports(run.stderr)
    assert (run.returncode != 0) == bool(reports), run.stderr
    return "; ".join(reports)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(library: str, name: str, tmp_path: Path) -> None:
    code = CALL.format(library=library, name=name)
    headlines = report(code, sanitize.environment("default"), tmp_path)
    assert FAULTS[name] in headlines
    assert bool(FAULTS[name]) == bool(headlines)


@pytest.mark.parametrize("name", EMULATED_FAULTS)
def test_a_fault_of_an_emulated_kernel_is_reported(name: str) -> None:
    if not (sanitize.TREE / "build/emulator").exists():
        pytest.skip("needs the build of `make sanitize`")
    headlines = report(EMULATED.format(name=name), sanitize.environment(), sanitize.TREE)
    assert EMULATED_FAULTS[name] in headlines
    assert bool(EMULATED_FAULTS[name]) == bool(headlines)
