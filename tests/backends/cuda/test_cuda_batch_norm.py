"""Batch norm on CUDA alone, emulated: how its kernels walk over every size and alignment,
and how many are launched.

test_batch_norm_kernels.py and test_batch_norm_numbers.py have the numbers, and
test_cuda_batch_norm_walks.py the passes over each tensor.
"""

from __future__ import annotations

import pytest
import torch

import cuda_emulator
from helpers.activations import DTYPES
from helpers.batch_norm import Case, check, forward, last
from helpers.emulated import EmulatedOnce, launches, misaligned

pytestmark = pytest.mark.skipif(bool(cuda_emulator.why_not()), reason=cuda_emulator.why_not())

F32, F64, F16, BF16 = DTYPES


@pytest.fixture
def emulator() -> EmulatedOnce:
    return EmulatedOnce()


def full(shape: tuple[int, ...], is_last: bool) -> torch.Tensor:
    return last(*shape) if is_last else torch.randn(shape)


@pytest.mark.parametrize("is_last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("channels", [1, 3, 5, 64, 257])
def test_shapes(emulator: EmulatedOnce, channels: int, is_last: bool) -> None:
    for i, (inner, samples) in enumerate(((1, 40), (2, 9), (7, 3), (49, 2), (1023, 2))):
        if channels * inner > 15000:  # a second of emulation
            continue
        shape = (samples, channels) if inner == 1 else (samples, channels, inner, 1)
        dtype = DTYPES[(i + channels + is_last) % 4]
        check(
            emulator,
            Case(full(shape, is_last), dtype, residual=True, branch=True, ops=emulator),
        )


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize(
    ("shape", "is_last"),
    [
        ((2, 3, 64, 32), False),  # a line is a channel, 16 bytes at a time
        ((2, 3, 40, 25), False),  # the same, with an end that fills half a warp
        ((1, 1, 8192), False),
        ((16, 8, 7, 7), False),  # rows of an odd length: wide where there are no sums
        ((300, 48), False),  # 12 lines side by side: 8 and 4
        ((16, 8, 17, 5), True),  # one line
    ],
    ids=str,
)
def test_walks(
    emulator: EmulatedOnce, shape: tuple[int, ...], is_last: bool, dtype: torch.dtype
) -> None:
    emulator.orders = cuda_emulator.ORDERS
    x = full(shape, is_last)
    check(emulator, Case(x, dtype, "silu", residual=True, branch=True, ops=emulator))


@pytest.mark.parametrize("shape", [(4, 16, 8, 8), (3, 8, 48, 16)], ids=str)
@pytest.mark.parametrize("is_last", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("name", ["x", "residual", "grad"])
def test_alignment(
    emulator: EmulatedOnce, name: str, is_last: bool, shape: tuple[int, ...]
) -> None:
    for dtype, activation in ((F32, "mish"), (F16, "relu")):
        x = full(shape, is_last)
        case = Case(x, dtype, activation, residual=True, branch=True, ops=emulator)
        setattr(case, name, misaligned(getattr(case, name)))
        check(emulator, case)


def test_vectors_that_are_not_aligned(emulator: EmulatedOnce) -> None:
    """weight, bias and the rest begin 4 bytes after a multiple of 16."""
    case = Case(last(3, 24, 5, 3), residual=True, branch=True, ops=emulator)
    for name in ("branch", "weight", "bias", "running_mean", "running_var"):
        setattr(case, name, misaligned(getattr(case, name)))
    truth, arguments = case.truth(), list(case.forward())
    arguments[5:7] = map(misaligned, arguments[5:7])
    output, mean, invstd = emulator("batch_norm_act", *arguments)
    case.check_forward((output, mean, invstd), truth)
    case.check_running(*arguments[5:7], truth)
    call = case.backward(output, misaligned(mean), misaligned(invstd))
    case.check_backward(emulator("batch_norm_act_backward", *call), truth)


def test_number_of_launches(emulator: EmulatedOnce) -> None:
    x = last(3, 24, 5, 3)
    case = Case(x, residual=True, branch=True, ops=emulator)
    assert launches("batch_norm_act", case.forward()) == 3
    output, mean, invstd = forward(emulator, case)
    assert launches("batch_norm_act_backward", case.backward(output, mean, invstd)) == 3
    case.training = False
    assert launches("batch_norm_act", case.forward()) == 1
    assert launches("batch_norm_act_backward", case.backward(output, mean, invstd)) == 2
