"""tools/occupancy.py: how it reads machine code, and that the kernels have enough in flight."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fusedtrain
from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
import _sass
import occupancy
from _devices import GPUS, MULTIPROCESSORS

pytestmark = pytest.mark.slow

LIBRARY = Path(fusedtrain.__file__).parent / "_C_cuda.so"


def code(*lines: str) -> list[_sass.Instruction]:
    """As cuobjdump writes it: an address, the instruction, and its encoding in the next line."""
    text = ""
    for i, line in enumerate(lines):
        text += f"        /*{16 * i:04x}*/                   {line} ;    /* 0x000000000000 */\n"
        text += "                                            /* 0x000fe20000000000 */\n"
    return _sass.instructions(text)


LOAD_1, LOAD_2 = "LDG.E.128 R4, desc[UR4][R2.64]", "LDG.E.128 R8, desc[UR4][R2.64+0x200]"
STORE = "STG.E.128 desc[UR4][R2.64], R4"
END = ("@P0 BRA 0x10", "EXIT")


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        pytest.param((LOAD_1, "FADD R4, R4, R5", STORE), 16, id="one load"),
        pytest.param((LOAD_1, LOAD_2, "FADD R4, R4, R8", STORE), 32, id="two before the use"),
        pytest.param((LOAD_1, "FADD R4, R4, R5", LOAD_2, STORE), 16, id="a use in between"),
        pytest.param((LOAD_1, "FADD R12, R7, R7", LOAD_2), 16, id="of the last register"),
        pytest.param((LOAD_1, "FADD R12, R13, R14", LOAD_2), 32, id="of others"),
        pytest.param((LOAD_1, "STG.E.128 desc[UR4][R2.64], R4", LOAD_2), 16, id="stored"),
        pytest.param(("LDG.E.128 R4, desc[UR4][R0.64]", LOAD_2), 32, id="an address is a pair"),
        pytest.param((LOAD_1, "LDG.E R20, desc[UR4][R2.64]"), 16, id="a scale does not count"),
        pytest.param(("LDG.E.64 R4, desc[UR4][R2.64]", LOAD_2), 24, id="of two widths"),
        pytest.param(("LDG.E.U16 R4, desc[UR4][R2.64]", "LDG.E.U16 R5, desc[UR4][R2.64]"), 4,
                     id="of 2 bytes"),
        pytest.param((LOAD_1, "@P1 BRA 0x40", LOAD_2, "FADD R4, R4, R8"), 32, id="a branch over"),
        pytest.param((LOAD_1, "DADD R12, R2, R4", LOAD_2), 16, id="of a pair"),
    ],
)  # fmt: skip
def test_bytes_in_flight(lines: tuple[str, ...], want: int) -> None:
    used = ("FADD R8, R8, R9", "FADD R4, R4, R5")
    assert _sass.bytes_in_flight(code("S2R R0, SR_TID.X", *lines, *used, *END)) == want


def test_loads_of_the_next_turn_count() -> None:
    """A prefetch: the load at the end of a turn is used in the next one."""
    turn = (LOAD_2, "FADD R4, R4, R5", STORE, "MOV R4, R8")
    assert _sass.bytes_in_flight(code(LOAD_1, *turn, *END)) == 16
    rotating = ("FADD R4, R4, R5", STORE, LOAD_1, "FADD R8, R8, R9", LOAD_2)
    assert _sass.bytes_in_flight(code(LOAD_1, *rotating, *END)) == 32


def test_hints_of_blackwell_are_no_operands() -> None:
    hints = [
        f"{line}   ?trans6 &req={2} ?WAIT4_END_GROUP" for line in (LOAD_1, "FADD R4, R4, R5", *END)
    ]
    assert _sass.bytes_in_flight(code("MOV R1, R1", *hints)) == 16


def test_loads_before_the_loop_do_not_count() -> None:
    weights = ("LDG.E.128 R16, desc[UR4][R2.64]", "LDG.E.128 R20, desc[UR4][R2.64]")
    listing = code(*weights, LOAD_1, "FADD R4, R4, R16", "FADD R4, R4, R20", "@P0 BRA 0x20", "EXIT")
    assert _sass.bytes_in_flight(listing) == 16
    assert _sass.bytes_in_flight(code(*weights, "EXIT")) == 32  # there is no loop


def test_a_jump_by_a_table_reaches_what_nothing_else_does() -> None:
    lines = (LOAD_1, "BRX R10 -0x100", LOAD_2, "FADD R4, R4, R8", *END)
    assert _sass.bytes_in_flight(code("MOV R1, R1", *lines)) == 32


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        ("90", 256, 32, 0, 8), ("90", 256, 33, 0, 6), ("90", 256, 128, 0, 2),
        ("90", 128, 64, 0, 8), ("90", 32, 16, 0, 32), ("90", 256, 16, 100 << 10, 2),
        ("80", 1024, 32, 0, 2), ("80", 256, 32, 48 << 10, 3), ("89", 256, 32, 0, 6),
        ("120", 512, 40, 0, 3), ("90", 512, 255, 0, 0), ("75", 256, 64, 0, 4),
    ],
)  # fmt: skip
def test_resident_blocks(arch: str, threads: int, registers: int, shared: int, blocks: int) -> None:
    """As NVIDIA's occupancy calculator has them."""
    assert MULTIPROCESSORS[arch].resident(threads, registers, shared) == blocks


def test_littles_law() -> None:
    (h200,) = (gpu for gpu in GPUS if gpu.name == "H200")
    one = occupancy.Prediction("a", "b", "float16", "90", 32, 0, 256, 8, 16, 16, 2, "")
    assert one.warps == 64
    assert one.bytes == 4096
    # 4 KB on each of 132 multiprocessors, once a microsecond: 0.54 of 4.8 TB/s.
    assert one.bandwidth(h200, 1e-6) == pytest.approx(4096 * 132 / 1e-6 / 4.8e12)
    assert one.bandwidth(h200, 1e-9) == 1.0


def test_too_few_bytes_are_told() -> None:
    few = occupancy.Prediction("pool", "k", "float16", "90", 32, 0, 256, 7, 16, 16, 16, "k<x>")
    enough = occupancy.Prediction("pool", "k", "float16", "90", 32, 0, 256, 8, 16, 16, 16, "k<x>")
    assert occupancy.too_few([few, enough]) == [
        "pool.cu: k<x>: 28 KB in flight on an sm_90 multiprocessor, 32 are needed"
    ]


@pytest.fixture(scope="module")
def predicted() -> list[occupancy.Prediction]:
    if not LIBRARY.exists():
        pytest.skip("_C_cuda.so is not built (no nvcc)")
    if _sass.cuobjdump() is None:
        pytest.skip("cuobjdump is not installed (the CUDA toolkit and Triton have it)")
    if occupancy.CHECKED not in fusedtrain.backend_info().build.get("cuda_archs", ()):
        pytest.skip(f"_C_cuda.so is built without sm_{occupancy.CHECKED}")
    return occupancy.worst(LIBRARY, occupancy.CHECKED)


def test_every_streaming_kernel_has_enough_in_flight(
    predicted: list[occupancy.Prediction],
) -> None:
    assert occupancy.too_few(predicted) == []


def test_every_family_is_there(predicted: list[occupancy.Prediction]) -> None:
    assert {(p.source, p.kernel) for p in predicted} == set(occupancy.STREAMS)
    assert all(p.blocks > 0 and p.registers > 0 and p.in_flight > 0 for p in predicted)
