"""The truth of activations that keep their derivative in few bits."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtrain.reference import ACTIVATIONS, few_bit
from fusedtrain.reference.bits import BLOCK, packed_bytes, unpack
from fusedtrain.reference.pointwise import INDEX
from helpers.backends import Kernels, same_bits


def slope_of(name: str, x: Tensor) -> Tensor:
    """The derivative in float64, by autograd of torch's own function."""
    x = x.double().requires_grad_()
    (slope,) = torch.autograd.grad(ACTIVATIONS[name].forward(x).sum(), x)
    return slope


LIMITS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(ops: Kernels, name: str, bits: int, x: Tensor) -> None:
    op, table, n = INDEX[name], few_bit.TABLES[name], x.numel()
    before = x.clone()
    y, codes = ops("few_bit", x, op, bits)
    assert same_bits(x, before)
    assert y.shape == x.shape
    assert y.stride() == torch.empty_like(x).stride()
    # On the CPU: torch's hardswish on CUDA multiplies float64 by a sixth in float32.
    exact = ACTIVATIONS[name].forward(x.cpu().double())
    limit = LIMITS[x.dtype]
    torch.testing.assert_close(y.cpu().double(), exact, rtol=limit, atol=limit)
    # The nearest level, unless rounding leaves a doubt.
    assert codes.shape == (packed_bytes(n, bits),)
    in_memory = torch.empty_like(x, dtype=torch.float64).copy_(slope_of(name, x.detach().cpu()))
    slope = in_memory.as_strided((n,), (1,)).cpu()
    unpacked, want = unpack(codes.cpu(), bits, n), table.codes(slope, bits)
    off = (table.values(bits)[unpacked] - slope).abs() - (table.values(bits)[want] - slope).abs()
    assert not n or off.max() <= 1.01 / table.unit
    assert (unpacked != want).sum() <= 1 + 0.01 * n
    rest = unpack(codes.cpu(), bits, -(-n // BLOCK) * BLOCK)[n:]
    assert not rest.any()
    # Backward multiplies by these levels, in the order of memory.
    grad = torch.empty_like(x).copy_(torch.randn(x.shape))
    levels = torch.empty_like(grad, dtype=torch.float64)
    levels.as_strided((n,), (1,)).copy_(table.values(bits)[unpacked])
    gradient = ops("few_bit_backward", grad, codes, op, bits)
    assert gradient.stride() == grad.stride()
    torch.testing.assert_close(gradient.double(), grad.double() * levels, rtol=limit, atol=limit)
    # In place: the same.
    z = x.clone(memory_format=torch.preserve_format)
    assert same_bits(ops("few_bit_", z, op, bits), codes)
    if ops.kernel:
        assert same_bits(z, y)
    else:  # eager torch rounds dense and sliced tensors by different loops
        torch.testing.assert_close(z, y, rtol=limit, atol=limit)
