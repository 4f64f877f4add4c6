"""The compiled code of states in 8-bit codes in Triton.

test_state_code_kernels.py has the numbers. Compilation has processes of its own, for the reason
that helpers/compiling.py gives: this file, run as a script with a target's name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.compiling import TARGETS, run, source_of

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

quantised: Any = None  # imported when it is known who interprets
dequantised: Any = None


def import_functions() -> None:
    global quantised, dequantised
    from fusedtrain.triton import state_codes

    quantised, dequantised = state_codes.quantise, state_codes.dequantise


@triton.jit
def codes_kernel(x_ptr, random_ptr, codes_ptr, scales_ptr, SIGNED: tl.constexpr, N: tl.constexpr):
    at, group = tl.arange(0, N), tl.arange(0, N // 32)
    random = tl.load(random_ptr + group).to(tl.uint32)
    codes, scales = quantised(tl.load(x_ptr + at), random, SIGNED)
    tl.store(codes_ptr + at, codes)
    tl.store(scales_ptr + group, scales)


@triton.jit
def numbers_kernel(codes_ptr, scales_ptr, x_ptr, N: tl.constexpr):
    at, group = tl.arange(0, N), tl.arange(0, N // 32)
    tl.store(x_ptr + at, dequantised(tl.load(codes_ptr + at), tl.load(scales_ptr + group)))


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(t, marks=pytest.mark.long) for t in ("sm_80", "gfx942"))]
)
def test_code(target: str, tmp_path: Path) -> None:
    run(__file__, target, TRITON_CACHE_DIR=str(tmp_path))


def compiled_for(target: str, kernel: Any, constants: tuple[Any, ...], codes: str) -> str:
    """PTX, or the assembly of AMD."""
    from triton.backends.compiler import GPUTarget

    from fusedtrain.triton.launch import _OPTIONS

    names = {"codes_ptr": codes, "random_ptr": "i64"}
    source = source_of(kernel, constants, lambda name: names.get(name, "fp32"))
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=dict(_OPTIONS))
    return compiled.asm["ptx" if "ptx" in compiled.asm else "amdgcn"]


def check_target(target: str) -> None:
    """No sum follows a product that is not exact, divisions and roots are those of IEEE."""
    import_functions()
    for signed, name, divisions in ((True, "i8", 8), (False, "u8", 1)):
        code = compiled_for(target, codes_kernel, (signed, 1024), name)
        numbers = compiled_for(target, numbers_kernel, (1024,), name)
        if target == "gfx942":
            # Four elements of a thread at once, in two turns or in one.
            assert code.count("v_div_fixup_f32") >= min(4, divisions)
            continue
        assert "fma" not in numbers
        assert code.count("fma.rn.f32") == (0 if signed else 8)  # chance * (2 k + 1) + k * k
        products = set(re.findall(r"mul(?:\.rn)?\.f32 \t?(%\w+),", code))
        sums = re.findall(r"(?:add|sub)(?:\.rn)?\.f32 \t?%\w+, (%?\w+), (%?\w+);", code)
        assert products
        assert sums
        assert not products & {operand for pair in sums for operand in pair}
        assert len(re.findall(r"div\.rn\.f32", code)) >= divisions
        assert not re.findall(r"div\.(?:full|approx)|sqrt\.approx|\.ftz", code + numbers)
        assert code.count("sqrt.rn.f32") == (0 if signed else 8)
        assert numbers.count("div.rn.f32") == (8 if signed else 0)


if __name__ == "__main__":
    check_target(sys.argv[1])
