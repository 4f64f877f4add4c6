"""Planted faults: what the sanitizers must report, before their silence means anything.

``tools/sanitizer_faults.cpp`` is compiled as the kernels are; kernels with faults for the emulator
are in ``tests/cuda_emulator/faults.cu``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import _sanitized as sanitized

PLUGINS = {"PYTHONPATH": str(Path(__file__).resolve().parent)}
# Both sanitizers' headlines.
REPORT = re.compile(r"ERROR: (?:Address|Leak)Sanitizer: .*|\S+:\d+:\d+: runtime error: .*")

# Words that the report of a planted fault must contain.
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
}  # fmt: skip
# Words in the reports of the emulated kernels of tests/cuda_emulator/faults.cu.
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


@dataclass
class Result:
    """The outcome of one part."""

    part: str
    ran: str  # in words: "412 passed, 3 skipped"
    seconds: float
    wrong: list[str] = field(default_factory=list)  # headlines of reports, and other failures


def reports(lines: list[str]) -> list[str]:
    """The headlines of the sanitizers' reports, each once."""
    headlines = (match.group(0) for line in lines if (match := REPORT.search(line)))
    return list(dict.fromkeys(re.sub(r"==\d+==|0x[0-9a-f]+", "", f).strip() for f in headlines))


def emulator_environment() -> dict[str, str]:
    flags = {"FUSEDTRAIN_TEST_EMULATOR_SANITIZERS": sanitized.SANITIZERS}
    return sanitized.environment(after_return=False, more={**flags, **PLUGINS})


def judge_fault(library: Path, name: str, expected: str) -> list[str]:
    """Errors in the report of one planted fault, in a process of its own."""
    code = (
        "import ctypes; c = ctypes.CDLL(None); p = ctypes.c_void_p(); "
        "c.posix_memalign(ctypes.byref(p), 16, 64); c.memset(p, 0, 64); "
        f"ctypes.CDLL({str(library)!r}).{name}(p, ctypes.c_int64(16))"
    )
    return judge(name, expected, code, sanitized.environment(), library.parent)


def run_faults(library: Path) -> Result:
    """Every planted fault: reported, and named as what it is?"""
    start = time.monotonic()
    wrong = [line for item in FAULTS.items() for line in judge_fault(library, *item)]
    ran = f"{len(FAULTS) - 1} planted faults"
    return Result("faults", ran, time.monotonic() - start, wrong)


def run_emulated_faults() -> Result:
    """The same with kernels of tests/cuda_emulator/faults.cu and memory of torch."""
    start = time.monotonic()
    wrong = []
    env = emulator_environment()
    for name, expected in EMULATED_FAULTS.items():
        code = EMULATED.format(name=name)
        wrong += judge(name, expected, code, env, sanitized.TREE)
    ran = f"{len(EMULATED_FAULTS) - 1} planted faults"
    return Result("emulated faults", ran, time.monotonic() - start, wrong)


def judge(name: str, expected: str, code: str, env: dict[str, str], folder: Path) -> list[str]:
    """Runs Python code that a sanitizer must end with a report; "" expects none."""
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True,
        errors="replace",
    )  # fmt: skip
    headlines = reports(run.stderr.splitlines())
    right = any(expected in headline for headline in headlines) if expected else not headlines
    if right and (run.returncode != 0) == bool(expected):
        return []
    said = headlines or run.stderr.splitlines()[-3:] or ["nothing"]
    return [f"planted: {name}: expected {expected or 'no report'!r}, got {said}"]
