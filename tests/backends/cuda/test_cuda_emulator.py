"""The CUDA emulator finds every planted fault, and nothing in kernels that are right."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from torch import Tensor

import cuda_emulator

pytestmark = pytest.mark.skipif(bool(cuda_emulator.why_not()), reason=cuda_emulator.why_not())

UNWRITTEN = "reads shared memory that nothing has written"
# Messages, whatever the order of the threads. A missing barrier shows as one of two faults.
FAULTS = {
    "neighbour<false>": f"race: .* shared memory|{UNWRITTEN}",
    "reuse<false>": "race: .* shared memory",
    "half_of_the_threads_at_a_barrier": "reached by 32 of 64 threads; 32 have exited",
    "early_return": "reached by 63 of 64 threads; 1 have exited",
    "two_barriers": r"divergent barrier: .* lines \d+ and \d+",
    "shuffle_without_some_lanes": "__shfl_down_sync: thread 0 names the lanes ffffffff, not all",
    "shuffle_of_a_lane_outside_of_the_mask": r"lane \d+ reads lane \d+, which is not in the mask",
    "different_shuffles": "__shfl_.*_sync: thread 0 names the lanes ffffffff, not all",
    "read_past_the_end": "out of bounds: reads 4 bytes .* 0 bytes past the end",
    "read_before_the_start": "out of bounds: reads 4 bytes outside .*: 4 bytes before the start",
    "write_past_the_end": "out of bounds: writes 4 bytes .* 0 bytes past the end",
    "write_an_input": "writes to an input",
    "read_an_output": "reads global memory that nothing has written",
    "atomic_past_the_end": "out of bounds: writes 4 bytes .* 0 bytes past the end",
    "misaligned_vector": "misaligned: reads 16 bytes at an address that is 4 more",
    "vector_over_the_end": "out of bounds: writes 16 bytes",
    "uninitialised_shared": rf"{UNWRITTEN} .*thread \(0, 0, 0\)",
    "all_write_one": "race: .* writes global memory",
    "blocks_write_one": "race: .* writes global memory",
    "blocks_read_each_other": "race: .* global memory|reads global memory that nothing has written",
    "dynamic_shared too small": "at offset 252 of 252 bytes of dynamic shared memory",
    "others_stack": "out of bounds: reads 4 bytes outside of every buffer",
    "too many threads": "invalid configuration argument",
    "no blocks": "invalid configuration argument",
    "warp_alone<false>": f"race: .* shared memory|{UNWRITTEN}",
    "warp_reads_one<false>": "race: .* shared memory",
    "write_an_argument": "writes to an argument of the kernel",
    "read_past_an_argument": "out of bounds: reads 4 bytes outside of every buffer",
}


def x() -> Tensor:
    return torch.arange(-20.0, 44.0)


RIGHT = {
    "neighbour<true>": x().roll(-1),
    "reuse<true>": x().roll(-2),
    "dynamic_shared": x().roll(-1),
    "block_sums": x().sum()[None],
    "votes": torch.cat([(x()[:32] > 0) + 2.0, (x()[32:] > 0) + 6.0]),
    "atomics": x().sum().expand(64),
    "warp_alone<true>": x().view(32, 2).flip(1).flatten(),
    "warp_reads_one<true>": x()[[0, 32]].repeat_interleave(32),
    "argument": torch.arange(63.0, -1.0, -1.0),
}

# Within the memory of the block or of the thread: `make sanitize` runs these (tools/sanitize.py).
FOR_SANITIZERS = {"shared_into_shared", "local_array"}


@pytest.fixture(scope="module")
def emulator() -> cuda_emulator.Emulator:
    return cuda_emulator.load()


def cases(c: ctypes.CDLL) -> dict[str, int]:
    c.fault_name.restype = c.fault_run.restype = ctypes.c_char_p
    numbers: dict[str, int] = {}
    while name := c.fault_name(len(numbers)):
        numbers[name.decode()] = len(numbers)
    return numbers


def run(emulator: cuda_emulator.Emulator, name: str, order: str) -> tuple[str, Tensor]:
    """The message that launch.cuh throws (empty where it does not) and the output of one case."""
    data, y = torch.full((64 * 3,), 7.0), torch.zeros(64 * 3)
    data[64:128] = x()
    emulator.set_order(order)
    emulator.c.emulator_reset()
    pointers = [ctypes.c_void_p(t[64:].data_ptr()) for t in (data, y)]
    for pointer, writes in zip(pointers, (0, 1), strict=True):
        emulator.c.emulator_buffer(pointer, ctypes.c_int64(256), writes)
    message = emulator.c.fault_run(cases(emulator.c)[name], *pointers).decode()
    emulator.set_order("forward")
    return message, y[64:128]


@pytest.mark.parametrize("order", cuda_emulator.ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(emulator: cuda_emulator.Emulator, name: str, order: str) -> None:
    message, _ = run(emulator, name, order)
    assert message.startswith("fusedtrain: kernel launch: "), "not found"
    assert re.search(FAULTS[name], message), message
    assert "FUSEDTRAIN_BACKEND" not in message, "the way round kernels that a GPU cannot run"


@pytest.mark.parametrize("order", cuda_emulator.ORDERS)
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernel_passes(emulator: cuda_emulator.Emulator, name: str, order: str) -> None:
    message, y = run(emulator, name, order)
    assert message == ""
    want = RIGHT[name]
    torch.testing.assert_close(y[: want.numel()], want)


def test_no_case_is_forgotten(emulator: cuda_emulator.Emulator) -> None:
    assert cases(emulator.c).keys() == FAULTS.keys() | RIGHT.keys() | FOR_SANITIZERS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_conversions_are_those_of_torch(
    emulator: cuda_emulator.Emulator, dtype: torch.dtype
) -> None:
    """relu of every bit pattern: from 16 bits and back without change."""
    x = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    y = emulator.call("relu", x)
    assert isinstance(y, Tensor)
    torch.testing.assert_close(y, torch.relu(x), rtol=0, atol=0, equal_nan=True)


def test_divisions_are_as_inexact_as_the_flags_allow(emulator: cuda_emulator.Emulator) -> None:
    """softsign has one division, of numbers that are known: -2 to 2 ULP, in each run the same."""
    if not emulator.c.emulator_is_inexact():
        pytest.skip("needs x86-64, whose code alone is given inexact divisions")
    x = torch.linspace(-3, 3, 4096)
    results = []
    for order in cuda_emulator.ORDERS:
        emulator.set_order(order)
        y = emulator.call("softsign", x)
        assert isinstance(y, Tensor)
        results.append(y)
    exact = x / (1 + x.abs())
    off = results[0].view(torch.int32) - exact.view(torch.int32)
    assert set(off.tolist()) == {-2, -1, 0, 1, 2}
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
