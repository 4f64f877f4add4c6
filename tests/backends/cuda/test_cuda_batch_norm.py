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
    each = 1 if emulator.whole else 3
    assert launches("batch_norm_act", case.forward()) == each
    output, mean, invstd = forward(emulator, case)
    assert launches("batch_norm_act_backward", case.backward(output, mean, invstd)) == each
    case.training = False
    assert launches("batch_norm_act", case.forward()) == 1
    assert launches("batch_norm_act_backward", case.backward(output, mean, invstd)) == 2


# One launch: how many vectors a block keeps at most, and shapes of float16 near limits. Whether
# forward without a residual fits, backward or either with one, and backward with one.
MOST = (99 - 20) * 1024 // 16
FITS = {
    "79 KB to the byte": ((MOST // 2, 16), (True, False, False)),
    "a row more": ((MOST // 2 + 1, 16), (False, False, False)),
    "half of it": ((MOST // 4, 16), (True, True, False)),
    "half of it, and a row": ((MOST // 4 + 1, 16), (True, False, False)),
    "a third of it, and a row": ((MOST // 6 + 1, 16), (True, True, False)),
    "a third of it": ((MOST // 6, 16), (True, True, True)),
    "eight channels": ((103, 8, 7, 7), (True, False, False)),
    "eight channels, a sample more": ((104, 8, 7, 7), (False, False, False)),
    "two parts, of 16 and 8 channels": ((40, 24), (True, True, True)),
    "planes of one element": ((300, 40, 1, 1), (True, True, True)),
    "two channels": ((9, 6, 14, 14), (True, True, True)),
    "nine lines": ((30, 16, 3, 3), (True, True, True)),
    "a thread a line": ((8, 8, 17, 15), (True, True, False)),
    "more lines than threads": ((8, 8, 257), (False, False, False)),
    "few rows": ((7, 8, 7, 7), (False, False, False)),
    "one sample": ((1, 3, 32, 16), (True, True, True)),
    "one sample, channels last": ((1, 24, 5, 3), (True, True, True)),
    "one channel": ((40, 1, 8), (True, True, True)),
}


def near_a_limit(emulator: EmulatedOnce, name: str, residual: bool) -> Case:
    shape = FITS[name][0]
    x = full(shape, name.endswith("channels last"))
    x = x + torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) / shape[0]
    return Case(x, F16, "silu", residual=residual, branch=residual, ops=emulator)


@pytest.mark.parametrize("name", FITS)
def test_numbers_near_the_limits(emulator: EmulatedOnce, name: str) -> None:
    for residual in (False, True):
        check(emulator, near_a_limit(emulator, name, residual))


def test_one_launch_where_channels_fit() -> None:
    emulator = EmulatedOnce()
    for name, (_, fits) in FITS.items():
        for residual in (False, True):
            case = near_a_limit(emulator, name, residual)
            vectors = (torch.ones_like(case.running_mean) for _ in range(2))
            counts = [
                launches("batch_norm_act", case.forward()),
                launches("batch_norm_act_backward", case.backward(case.x, *vectors)),
            ]
            assert counts == [1 if one else 3 for one in fits[residual:][:2]], name


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(9, 16, 7, 7), (9, 8, 14, 14), (3, 2, 32, 16)], ids=str)
def test_one_launch_far_from_zero(
    emulator: EmulatedOnce, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A mean of 10,000 deviations, and of a few in 16 bits, which have no more digits."""
    emulator.orders = cuda_emulator.ORDERS
    ratio = 1e4 if dtype is F32 else 50.0
    for x in (torch.randn(shape) + ratio, torch.randn(shape) - ratio):
        case = Case(x, dtype, "silu", ops=emulator)
        check(emulator, case)
