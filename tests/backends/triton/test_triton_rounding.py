"""Stochastic rounding in Triton of what must stay what it is, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.backends import BACKENDS

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

stochastic_bfloat16: Any = None  # imported by the test, when it is known who interprets


@triton.jit
def rounding_kernel(x_ptr, y_ptr, key_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    key = tl.load(key_ptr).to(tl.uint32)
    tl.store(y_ptr + at, stochastic_bfloat16(tl.load(x_ptr + at), at, key))


@pytest.mark.parametrize("key", range(8))
def test_infinities_nan_and_exact_numbers(key: int) -> None:
    """A NaN whose bits are all ones would become -0.0, one with a single bit infinite."""
    global stochastic_bfloat16
    from fusedtrain.triton.stochastic_rounding import stochastic_bfloat16 as function

    stochastic_bfloat16 = function
    device = BACKENDS["triton"]().device
    nan = [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF, 0x7FC00000]
    others = [
        0x7F800000,
        -0x800000,
        0,
        -0x80000000,
        0x3F800000,
        -0x40800000,
        0x00010000,
        0x7F7F0000,
    ]
    bits = torch.tensor([*nan, *others] * 5, dtype=torch.int32)[:64]
    x, y = bits.view(torch.float32).to(device), torch.zeros(64, dtype=torch.bfloat16, device=device)
    rounding_kernel[(1,)](x, y, torch.tensor([key], dtype=torch.int64, device=device), 64)
    x, y = x.cpu(), y.cpu().float()
    assert torch.equal(x.isnan(), y.isnan())
    kept = ~x.isnan()
    assert torch.equal(x[kept].view(torch.int32), y[kept].view(torch.int32))
