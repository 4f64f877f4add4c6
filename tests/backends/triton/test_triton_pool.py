"""Max pooling in Triton, several blocks of few elements: pixels whose channels a thread takes at
once, units of every length, and indices of 32 and of 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.backends import BACKENDS

pytest.importorskip("triton", reason="triton is not installed")

# kernel_size, stride, padding, ceil_mode, bits
WINDOWS = [
    ((2, 2), (2, 2), (0, 0), False, 2),
    ((3, 3), (2, 2), (1, 1), False, 4),
    ((3, 2), (1, 3), (1, 0), True, 8),
    ((1, 2), (3, 1), (0, 1), False, 1),
    ((3, 3), (2, 1), (1, 1), True, 0),
]
# Input, channels_last: units of 8, 4, 2 and 1 channels, and planes.
SHAPES = [
    ((1, 24, 5, 4), True), ((1, 12, 4, 5), True), ((2, 6, 3, 5), True), ((1, 5, 4, 5), True),
    ((2, 2, 5, 7), False),
]  # fmt: skip


@pytest.fixture
def ops() -> Any:
    return BACKENDS["triton"]()


@pytest.mark.parametrize("small", [True, False], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize(("shape", "last"), SHAPES)
@pytest.mark.parametrize("window", range(len(WINDOWS)))
def test_windows(
    ops: Any, window: int, shape: tuple[int, ...], last: bool, small: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from fusedtrain.triton import pool

    if not small and window not in (1, 2):
        pytest.skip("not a case: two windows have all of the loop")
    monkeypatch.setattr(pool, "_BLOCK", 64)
    if not small:
        monkeypatch.setattr(pool, "_MOST", 1)
    *arguments, ceil, bits = WINDOWS[window]
    format = torch.channels_last if last else torch.contiguous_format
    dtype = torch.bfloat16 if window % 2 else torch.float32
    # Few numbers: some windows have several that are the largest. And a NaN, and infinities.
    x = (torch.randn(shape) * 3).round().to(dtype)
    x.view(-1)[::29] = torch.nan
    x.view(-1)[5::31] = -torch.inf
    x = x.contiguous(memory_format=format)
    wide = x.double().requires_grad_()
    wanted = torch.nn.functional.max_pool2d(wide, *arguments, ceil_mode=ceil)
    y, codes = ops("max_pool2d", x.to(ops.device), *arguments, ceil, bits, last)
    assert torch.equal(y.cpu().double().nan_to_num(7e9), wanted.detach().nan_to_num(7e9))
    if not bits:
        assert not codes.numel()
        return
    grad = torch.randn(y.shape).to(dtype).contiguous(memory_format=format)
    (expected,) = torch.autograd.grad(wanted, wide, grad.double())
    size = (*x.shape[-2:], *arguments, bits, last)
    grad_input = ops("max_pool2d_backward", grad.to(ops.device), codes, *size)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad_input.cpu().double(), expected, rtol=2 * eps, atol=2 * eps)


def test_strides_that_32_bits_cannot_hold(ops: Any) -> None:
    """There is one row of outputs, as with any stride larger than the input."""
    x = torch.randn(1, 3, 4, 5)
    wide = x.double().requires_grad_()
    wanted = torch.nn.functional.max_pool2d(wide, (2, 3), (50, 1), (1, 1))
    grad = torch.randn(wanted.shape)
    (expected,) = torch.autograd.grad(wanted, wide, grad.double())
    window = ((2, 3), (2**32, 1), (1, 1))
    y, codes = ops("max_pool2d", x.to(ops.device), *window, False, 4, False)
    torch.testing.assert_close(y.cpu().double(), wanted.detach())
    grad_input = ops("max_pool2d_backward", grad.to(ops.device), codes, 4, 5, *window, 4, False)
    torch.testing.assert_close(grad_input.cpu().double(), expected)
