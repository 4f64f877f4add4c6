"""Compiles Triton kernels for targets that this machine lacks, and looks at the code: 16-byte
accesses, no spills; and a driver that launches nothing.

Triton decides when a kernel is defined whether to interpret it, so compilation has processes of its
own: a test file is run as a script.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch

import helpers
from helpers.processes import run_python

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SHORT = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.uint8: "u8",
}
# rows x channels x inner: columns that start on 16 bytes or do not, short and long planes
VIEWS = {
    "columns": (64, 64, 1), "inner": (64, 3, 49), "planes": (4, 3, 784), "odd": (1, 5, 4001),
    "eights": (64, 24, 1),
}  # fmt: skip
# Output of Triton's assembler, by the code.
_LOGS: dict[str, str] = {}
_WEIGHTS = ("weight_ptr", "folded_ptr", "grad_ptr", "grad_weight_ptr")


def run(*arguments: str, **environment: str) -> None:
    kept = {k: v for k, v in helpers.environment().items() if k != "TRITON_INTERPRET"}
    done = run_python(*arguments, env={**kept, **environment})
    assert done.returncode == 0, done.stdout + done.stderr


def source_of(kernel: Any, constants: Iterable[Any], pointer: Callable[[str], str]) -> Any:
    """The kernel with these constants; a pointer, to 16 bytes, is to what `pointer` names."""
    from triton.compiler import ASTSource

    signature, constexprs, aligned = {}, {}, {}
    values = iter(constants)
    for p in kernel.params:
        if p.is_constexpr:
            signature[p.name] = "constexpr"
            constexprs[p.name] = next(values)
        elif p.name.endswith("_ptr"):
            signature[p.name] = f"*{pointer(p.name)}"
            aligned[(p.num,)] = [["tt.divisibility", 16]]
        else:
            signature[p.name] = p.annotation_type
    return ASTSource(kernel, signature, constexprs, aligned)


def compile_for(
    target: str, kernel: Any, dtype: torch.dtype, *constants: Any, **others: torch.dtype
) -> Any:
    """As for tensors that start on 16 bytes, of `dtype` but for `others`."""
    import triton
    from triton.backends.compiler import GPUTarget

    from fusedtrain.triton.launch import _OPTIONS

    def pointer(name: str) -> str:
        # Folding: all but weights are in the dtype of the math.
        vector = "fold" in kernel.__name__ and name not in _WEIGHTS
        narrow = (name.endswith("shares_ptr") or vector) and dtype.itemsize < 4
        return SHORT[others.get(name, torch.float32 if narrow else dtype)]

    source = source_of(kernel, constants, pointer)
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(
            source, target=GPUTarget(*TARGETS[target]), options=dict(_OPTIONS)
        )
    if log.getvalue():  # empty where the same code was compiled before
        _LOGS[compiled.asm["ptx"]] = log.getvalue()
    return compiled


def check_code(compiled: Any, loads: int) -> None:
    """16-byte accesses, in at least `loads` loads, and nothing but registers."""
    if "ptx" in compiled.asm:
        code = compiled.asm["ptx"]
        wide = r"\.global\.(?:v4\.b32|v2\.b64)"
        assert len(re.findall(rf"ld{wide}", code)) >= loads
        assert len(re.findall(rf"st{wide}", code)) >= 1
        assert ".local" not in code
        assert spilled_bytes(code) == 0
    else:
        code = compiled.asm["amdgcn"]
        assert re.search(r"(?:global|buffer)_load_dwordx4", code)
        assert re.search(r"(?:global|buffer)_store_dwordx4", code)
        assert set(re.findall(r"_spill_count:\s+(\d+)", code)) == {"0"}
        assert set(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", code)) == {"0"}


def spilled_bytes(ptx: str) -> int:
    """The stack frame and the spills, which Triton's own assembler reports."""
    numbers = re.findall(r"(\d+) bytes (?:stack frame|spill)", assembled(ptx))
    assert len(numbers) == 3
    return sum(map(int, numbers))


def assembled(ptx: str) -> str:
    """Output of ptxas for the code: as Triton ran it, or run here."""
    if ptx in _LOGS:
        return _LOGS[ptx]
    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert arch is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [get_ptxas(int(arch[2])).path, "-v", "-arch", arch[1], "-o", "/dev/null", file.name],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    return done.stdout + done.stderr


def check_widths(compiled: Any, size: int, tile: int, read: int, written: int) -> None:
    """128 threads access tiles of `tile` bytes, of `read` and `written` tensors, `size` bytes at a
    time (0: any width). Nothing spills."""
    if "ptx" not in compiled.asm:
        assert set(re.findall(r"_spill_count:\s+(\d+)", compiled.asm["amdgcn"])) == {"0"}
        return
    code = compiled.asm["ptx"]
    assert ".local" not in code
    assert spilled_bytes(code) == 0
    if size:
        names = {16: r"(?:v4\.b32|v2\.b64)", 8: r"(?:v2\.b32|b64)", 4: r"b32"}[size]
        for kind, tensors in (("ld", read), ("st", written)):
            count = len(re.findall(rf"{kind}\.global\.{names}", code))
            assert count >= tensors * tile // (128 * size), (compiled.metadata.name, kind, count)


def fake_driver() -> Any:
    """A driver that does nothing, and remembers what was launched."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def __init__(self) -> None:
            self.launched: list[Any] = []
            self.utils = self

        def load_binary(self, *_: Any) -> tuple[int, ...]:
            return 1, 2, 32, 0, 1024

        def get_device_properties(self, _: int) -> dict[str, int]:
            return {"max_shared_mem": 2**17}

        def unload_module(self, _: int) -> None:
            pass

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: int) -> int:
            return 7

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def launcher_cls(self, *_: Any) -> Any:
            return lambda *arguments: self.launched.append(arguments)

    driver = Driver()
    triton.runtime.driver.set_active(driver)
    return driver
