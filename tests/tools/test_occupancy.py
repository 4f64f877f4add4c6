"""tools/occupancy.py: how it reads machine code; bytes in flight and instructions of kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fusedtrain
from helpers import ROOT

sys.path.append(str(ROOT / "tools"))
import _issue
import _sass
import occupancy
from _devices import GPUS, MULTIPROCESSORS
from _kernel_table import STREAMS

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


WEIGHTS = ("LDG.E.128 R16, desc[UR4][R2.64]", "LDG.E.128 R20, desc[UR4][R2.64]")
HINTS = "   ?trans6 &req={2} ?WAIT4_END_GROUP"  # of Blackwell


@pytest.mark.parametrize(
    ("lines", "want"),
    [
        pytest.param(
            (LOAD_1, LOAD_2, "FADD R4, R4, R5", STORE, "MOV R4, R8", *END), 16, id="used next turn"
        ),
        pytest.param(
            (LOAD_1, "FADD R4, R4, R5", STORE, LOAD_1, "FADD R8, R8, R9", LOAD_2, *END),
            32,
            id="both used next turn",
        ),
        pytest.param(
            [line + HINTS for line in ("MOV R1, R1", LOAD_1, "FADD R4, R4, R5", *END)],
            16,
            id="hints are no operands",
        ),
        pytest.param(
            (*WEIGHTS, LOAD_1, "FADD R4, R4, R16", "FADD R4, R4, R20", "@P0 BRA 0x20", "EXIT"),
            16,
            id="before the loop",
        ),
        pytest.param((*WEIGHTS, "EXIT"), 32, id="no loop"),
        pytest.param(
            ("MOV R1, R1", LOAD_1, "BRX R10 -0x100", LOAD_2, "FADD R4, R4, R8", *END),
            32,
            id="a jump by a table",
        ),
    ],
)
def test_bytes_in_flight_of_a_whole_kernel(lines: tuple[str, ...], want: int) -> None:
    assert _sass.bytes_in_flight(code(*lines)) == want


ADD, OVER = "FADD R4, R4, R5", "@P1 BRA 0x{:x}"
LOOP = (LOAD_1, ADD, ADD, STORE, "@P0 BRA 0x10")


@pytest.mark.parametrize(
    ("lines", "options", "want"),
    [
        pytest.param((LOAD_1, ADD, STORE, "EXIT", "NOP"), {}, (5, 32), id="no loop"),
        pytest.param((*LOOP, "EXIT"), {}, (5, 32), id="a loop"),
        pytest.param((*LOOP, ADD, "EXIT"), {"turns": 3}, (1 + 3 * 5 + 2, 96), id="three turns"),
        pytest.param((*LOOP, STORE, "EXIT"), {"turns": 0}, (8, 48), id="a loop for what is left"),
        pytest.param((ADD, ADD, ADD, *LOOP[:-1], "@P0 BRA 0x40", "EXIT"), {"fewest": 2},
                     (5 + 4 / 2, 32), id="few turns share what comes before"),
        pytest.param((*LOOP, "EXIT"), {"moved": 1.5}, (5, 24), id="loads from a cache"),
        pytest.param((LOAD_1, OVER.format(0x50), ADD, ADD, STORE, "EXIT"), {}, (5, 32),
                     id="the shorter of two ways"),
        pytest.param((LOAD_1, OVER.format(0x50), ADD, STORE, "EXIT"), {}, (6, 32),
                     id="a way that moves less does not count"),
        pytest.param((LOAD_1, OVER.format(0x50), "SHFL.BFLY R8, R4", ADD, STORE, "EXIT"),
                     {"by": "SHFL"}, (7, 32), id="by an instruction"),
        pytest.param((LOAD_1, LOAD_2, ADD, STORE, "@P0 BRA 0x30", "@P2 BRA 0x10", "EXIT"),
                     {"inner": 2}, (2 + 2 * 3 + 1, 64), id="a loop in a loop"),
        pytest.param((ADD, "FFMA R4, R4, R5", "@P0 BRA 0x20", STORE, "EXIT"),
                     {"by": "FFMA", "silent": 3}, (2 + 3 * 2 + 2, 16), id="a loop without bytes"),
        pytest.param((LOAD_1, "FFMA R4, R4, R5", "@P0 BRA 0x10", STORE, "EXIT"),
                     {"by": "FFMA", "turn": 24}, (3, 24), id="a turn of the loop of sums"),
        pytest.param((LOAD_1, "CALL.REL.NOINC 0x50", STORE, "EXIT", ADD, ADD, "RET.REL R2 0x0"),
                     {}, (8, 32), id="a call"),
        pytest.param(("BRX R10 -0x100", LOAD_1, STORE, "EXIT", ADD, STORE, "EXIT"), {},
                     (5, 32), id="a table of cases"),
    ],
)  # fmt: skip
def test_instructions_and_bytes(
    lines: tuple[str, ...], options: dict[str, Any], want: tuple[int, int]
) -> None:
    way = _issue.route(code("MOV R1, R1", *lines), **options)
    assert (way.instructions, way.bytes) == want


def test_too_many_instructions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """3.0 TB/s are 12.95 bytes a clock and multiprocessor, beside 128 instructions."""
    exact, slow, slower = (prediction(8, instructions=n) for n in (988, 1300, 1400))
    assert exact.of_copy == pytest.approx(1, abs=1e-3)
    line = "pool.cu: k<y>: 13.0 instructions a byte, 76% of a copy's bandwidth; 80% are needed"
    assert occupancy.too_slow([exact, slow]) == [line]
    monkeypatch.setattr(occupancy, "SLOW", {("pool", "", "k<y"): (75, "(why)")})
    assert occupancy.too_slow([slow]) == []
    assert occupancy.too_slow([slower]) == [
        "pool.cu: k<y>: 14.0 instructions a byte, 71% of a copy's bandwidth; 75% are needed (why)"
    ]


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


def prediction(blocks: int, in_flight: int = 16, instructions: int = 0) -> occupancy.Prediction:
    return occupancy.Prediction(
        "pool", "k", "float16", "90", 32, 0, 256, blocks, 16, 16, in_flight, "k<x>",
        _issue.Route(instructions, 100), "k<y>",
    )  # fmt: skip


def test_littles_law() -> None:
    (h200,) = (gpu for gpu in GPUS if gpu.name == "H200")
    one = prediction(blocks=8, in_flight=2)
    assert one.warps == 64
    assert one.bytes == 4096
    # 4 KB on each of 132 multiprocessors, once a microsecond: 0.54 of 4.8 TB/s.
    assert one.bandwidth(h200, 1e-6) == pytest.approx(4096 * 132 / 1e-6 / 4.8e12)
    assert one.bandwidth(h200, 1e-9) == 1.0


def test_the_kinds_of_amp_steps_are_predicted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(occupancy, "LIBRARY", tmp_path)
    kernels = (("optimizers", "measure_kernel"), ("optimizer_update", "update_kernel"))
    known = [
        replace(prediction(8), source=source, kernel=name, dtype="float32")
        for source, name in kernels
    ]
    monkeypatch.setattr(occupancy, "worst", lambda *_: known)
    speeds = occupancy.predictions("NVIDIA H200", "90")
    kinds = ("float32", "bfloat16+master", "bfloat16+q8")
    assert [*speeds] == [("amp_step", "", "", kind) for kind in kinds]
    floats, masters, codes = speeds.values()
    assert masters == floats > 0
    assert codes == pytest.approx(0.61 * floats, rel=0.01)


@pytest.fixture(scope="module")
def predicted() -> list[occupancy.Prediction]:
    if not LIBRARY.exists():
        pytest.skip("needs _C_cuda.so: install nvcc, then FUSEDTRAIN_CUDA=1 make build")
    if _sass.cuobjdump() is None:
        pytest.skip("cuobjdump is not installed (the CUDA toolkit and Triton have it)")
    if occupancy.CHECKED not in fusedtrain.backend_info().build.get("cuda_archs", ()):
        pytest.skip(f"_C_cuda.so is built without sm_{occupancy.CHECKED}")
    return occupancy.worst(LIBRARY, occupancy.CHECKED)


def test_every_streaming_kernel_has_enough_in_flight(
    predicted: list[occupancy.Prediction],
) -> None:
    assert occupancy.too_few(predicted) == []


def test_no_kernel_waits_for_its_instructions(predicted: list[occupancy.Prediction]) -> None:
    assert occupancy.too_slow(predicted) == []


def test_every_family_is_there(predicted: list[occupancy.Prediction]) -> None:
    assert {(p.source, p.kernel) for p in predicted} == set(STREAMS)
    assert all(p.blocks > 0 and p.registers > 0 and p.in_flight > 0 for p in predicted)
