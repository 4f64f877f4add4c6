"""Split weights in Triton: the functions, to the bit, over every weight with every correction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference.split_weights import join_weights, split_weights
from helpers import backends
from helpers.optimizer_cases import BF16, F16

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

joined: Any = None  # imported by the test, when it is known who interprets
in_bfloat16: Any = None
in_half: Any = None


@triton.jit
def parts_kernel(  # type: ignore[no-untyped-def]
    param_ptr, low_ptr, weights_ptr, again_ptr, lower_ptr, N: tl.constexpr
):
    """Joins, and splits what it has joined."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    bits: tl.constexpr = low_ptr.dtype.element_ty.primitive_bitwidth
    weights = joined(tl.load(param_ptr + at), tl.load(low_ptr + at), bits)
    tl.store(weights_ptr + at, weights)
    if param_ptr.dtype.element_ty == tl.bfloat16:
        param, low = in_bfloat16(weights, tl.full((N,), 0x80, tl.uint32), bits)
    else:
        param, low = in_half(weights, bits)
    tl.store(again_ptr + at, param)
    tl.store(lower_ptr + at, low.to(low_ptr.dtype.element_ty))


def words(t: Tensor) -> Tensor:
    return t.cpu().view(torch.int16 if t.itemsize == 2 else torch.int32)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
def test_every_weight(dtype: torch.dtype, bits: int) -> None:
    """With every correction of 8 bits, and as many of 16."""
    global joined, in_bfloat16, in_half
    device = backends.BACKENDS["triton"]().device
    from fusedtrain.triton import split_weights as functions

    joined, in_bfloat16 = functions.join_weights, functions.split_bfloat16
    in_half = functions.split_half
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    values = torch.arange(-128, 128).to(torch.int8)
    if bits == 16:
        random = torch.Generator().manual_seed(2)
        values = torch.randint(-(2**15), 2**15, (256,), generator=random).to(torch.int16)
        values[:4] = torch.tensor([-(2**15), -(2**14) - 1, -1, 2**15 - 1])
    for part in values.split(16):
        param = patterns.expand(len(part), -1).contiguous()
        low = part[:, None].expand(-1, len(patterns)).contiguous()
        weights = torch.empty(param.shape, device=device)
        again, lower = torch.empty_like(param, device=device), torch.empty_like(low, device=device)
        n = 2**12 if backends.HAS_GPU else 2**16
        grid = (param.numel() // n,)
        parts_kernel[grid](param.to(device), low.to(device), weights, again, lower, n)
        expected, nan = join_weights(param, low), param.isnan()
        assert torch.equal(weights.cpu().isnan(), nan)
        assert torch.equal(words(weights)[~nan], words(expected)[~nan])
        split, correction = split_weights(expected, dtype, part.dtype)
        assert torch.equal(words(again)[~nan], words(split)[~nan])
        assert again.cpu().isnan().equal(nan)
        assert torch.equal(lower.cpu(), correction)
