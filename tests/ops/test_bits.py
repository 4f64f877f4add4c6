"""Codes of few bits: the layout in words, in Python and in C++."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fusedtrain.reference.bits import pack, packed_bytes, unpack
from helpers import ROOT

COUNTS = (0, 1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 1000)


def in_words(codes: list[int], bits: int) -> list[int]:
    """One code after another; `bits` divides 8."""
    part = 256 * bits // 8
    packed = [0] * (-(-len(codes) // 256) * part)
    for i, code in enumerate(codes):
        packed[i // 256 * part + i % 256 % part] |= code << (i % 256 // part * bits)
    return packed


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", COUNTS)
def test_pack_and_unpack(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (count,))
    packed = pack(codes, bits)
    assert packed.dtype is torch.uint8
    assert packed.shape == (packed_bytes(count, bits),)
    assert unpack(packed, bits, count).equal(codes)
    if bits != 3:
        assert packed.tolist() == in_words(codes.tolist(), bits)
        return
    for block in range(packed_bytes(count, bits) // 96):
        some = codes[256 * block : 256 * (block + 1)]
        both = in_words((some & 3).tolist(), 2) + in_words((some >> 2).tolist(), 1)
        assert packed[96 * block : 96 * (block + 1)].tolist() == both


def test_any_shape_and_integer_dtype() -> None:
    codes = torch.randint(0, 4, (3, 5, 7)).permute(2, 0, 1)
    for dtype in (torch.uint8, torch.int32, torch.int64):
        assert pack(codes.to(dtype), 2).equal(pack(codes.contiguous().view(-1), 2))


SOURCE = """
#include "bits.h"
using namespace fusedtrain;
static_assert(packed_bytes(257, 3) == 192 && spot_of(65, 2).byte == 1, "");
extern "C" long bytes(long n, int bits) { return packed_bytes(n, bits); }
extern "C" long byte_of(long i, int bits) { return spot_of(i, bits).byte; }
extern "C" int shift_of(long i, int bits) { return spot_of(i, bits).shift; }
"""


def test_header(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source, library = tmp_path / "bits.cpp", tmp_path / "bits.so"
    source.write_text(SOURCE)
    csrc = ROOT / "csrc"
    command = [*compiler.split(), "-std=c++17", "-shared", "-fPIC", f"-I{csrc}", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    c = ctypes.CDLL(str(library))
    c.bytes.restype = c.byte_of.restype = ctypes.c_long
    for bits in (1, 2, 4, 8):
        for i in range(600):
            assert c.bytes(ctypes.c_long(i), bits) == packed_bytes(i, bits)
            codes = torch.zeros(600, dtype=torch.int64)
            codes[i] = 1
            packed = pack(codes, bits)
            (byte,) = packed.nonzero().flatten().tolist()
            assert c.byte_of(ctypes.c_long(i), bits) == byte
            assert packed[byte] == 1 << c.shift_of(ctypes.c_long(i), bits)
