"""Depthwise convolutions in Triton, several small tiles: every way in which tensors, taps and sums
are cut, indices of 32 and of 64 bits; and how many kernels a call launches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedtrain.reference import depthwise as reference
from helpers.backends import BACKENDS
from helpers.compiling import fake_driver, run

pytest.importorskip("triton", reason="triton is not installed")

# Sizes, kernel, stride, dilation, padding in front and behind; channels and multiplier.
CASES = {
    "two tiles a line": ((2, 66), (2, 3), (1, 1), (1, 1), (1, 1), (0, 1), 1, 1),
    "a program with one tile fewer": ((3, 33), (1, 2), (1, 1), (1, 1), (0, 0), (0, 1), 2, 1),
    "phases": ((5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 3, 1),
    "phases without taps": ((6, 5), (2, 2), (2, 3), (2, 1), (1, 0), (2, 1), 3, 2),
    "a divisor in common": ((31,), (5,), (6,), (4,), (8,), (9,), 2, 1),
    "taps in an order of their own": ((19,), (7,), (5,), (3,), (4,), (9,), 2, 1),
    "a loop of rows": ((6, 7), (3, 10), (1, 2), (1, 1), (1, 4), (1, 5), 2, 2),
    "a loop over parts of a row": ((40,), (35,), (1,), (1,), (17,), (17,), 1, 2),
    "a loop of planes": ((4, 5, 4), (2, 4, 4), (1, 2, 1), (1, 1, 1), (0, 1, 2), (1, 2, 1), 2, 1),
    "channels of two tiles": ((2, 3), (1, 2), (1, 2), (1, 1), (0, 1), (0, 0), 34, 1),
    "a stride that 32 bits cannot hold": ((4, 5), (2, 3), (2**32, 1), (1, 1), (1, 1), (1, 1), 3, 1),
    "a dilation of one tap": ((4, 5), (1, 3), (2, 1), (2**32, 1), (0, 1), (0, 1), 2, 1),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with tiles of few elements, several of which a program adds up."""
    from fusedtrain.triton import _layout, depthwise

    plans = (depthwise._plan, depthwise._weight_plan)
    for plan in plans:
        plan.cache_clear()
    monkeypatch.setattr(depthwise, "_BLOCK", 64)
    monkeypatch.setattr(depthwise, "_BLOCK_LAST", dict.fromkeys((2, 4, 8), 128))
    monkeypatch.setattr(depthwise, "_BLOCK_WEIGHT", 128)
    monkeypatch.setattr(depthwise, "_TAPS", 8)
    monkeypatch.setattr(_layout, "_PROGRAMS", 2)
    yield depthwise
    for plan in plans:
        plan.cache_clear()


def close(result: torch.Tensor, expected: torch.Tensor, terms: int) -> None:
    eps = torch.finfo(result.dtype).eps
    wide = 4 * torch.finfo(torch.float32).eps * terms**0.5
    torch.testing.assert_close(result.cpu().double(), expected, rtol=eps, atol=max(wide, eps / 4))


@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels_last"])
@pytest.mark.parametrize("case", CASES)
def test_every_cut(case: str, last: bool, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = BACKENDS["triton"]()
    sizes, kernel, stride, dilation, padding, end, channels, multiplier = CASES[case]
    if last and len(sizes) == 1:
        pytest.skip("not a case: three dimensions have no channels_last")
    if (len(case) + last) % 2:
        monkeypatch.setattr(kernels, "_MOST", 1)
    dtype = torch.bfloat16 if case in ("phases", "a loop of rows") else torch.float32
    x = torch.randn(2, channels, *sizes).to(dtype)
    weight = torch.randn(channels * multiplier, 1, *kernel).to(dtype)
    bias = torch.randn(channels * multiplier).to(dtype)
    geometry = (stride, padding, end, dilation, last)
    y = ops("depthwise_conv", *(t.to(ops.device) for t in (x, weight, bias)), *geometry)
    close(
        y,
        reference.depthwise_conv(x.double(), weight.double(), bias.double(), *geometry),
        weight[0].numel(),
    )
    grad = torch.randn(y.shape).to(dtype)
    arguments = (stride, padding, dilation, last, True, True, True)
    on_device = [t.to(ops.device) for t in (grad, x, weight)]
    first, again = (ops("depthwise_conv_backward", *on_device, *arguments) for _ in range(2))
    doubles = [t.double() for t in (grad, x, weight)]
    expected = reference.depthwise_conv_backward(*doubles, *arguments)
    terms = (weight[0].numel() * multiplier, *[grad.numel() // bias.numel()] * 2)
    for one, two, wanted, count in zip(first, again, expected, terms, strict=True):
        assert torch.equal(one, two)
        close(one, wanted, count)


@pytest.mark.parametrize("last", [False, True], ids=["planes", "channels_last"])
def test_infinities_stay_where_they_are_seen(last: bool, kernels: Any) -> None:
    """Lanes beyond the outputs, and taps of other phases, see inputs and gradients that exist."""
    ops = BACKENDS["triton"]()
    x, weight = torch.ones(1, 3, 7, 7), torch.ones(3, 1, 1, 1)
    x[:, :, :, 5:] = torch.inf
    grad = torch.ones(1, 3, 7, 5)
    arguments = ((1, 1), (0, 0), (1, 1), last, True, True, True)
    on_device = [t.to(ops.device) for t in (grad, x, weight)]
    _, grad_weight, _ = ops("depthwise_conv_backward", *on_device, *arguments)
    assert (grad_weight == 35).all()
    # A stride passes over infinite columns: nor may lanes beyond the outputs read those.
    x = torch.ones(1, 3, 7, 9)
    x[..., 1::2] = torch.inf
    arguments = ((1, 2), (0, 0), (1, 1), last, False, True, False)
    on_device = [t.to(ops.device) for t in (grad, x, weight)]
    assert (ops("depthwise_conv_backward", *on_device, *arguments)[1] == 35).all()
    weight = torch.ones(3, 1, 1, 2, 1)
    arguments = ((1, 3, 1), (0, 0, 0), (1, 2, 1), last, True, False, False)
    grad = torch.ones(1, 3, 2, 2, 5)
    grad[:, :, 0, 1] = grad[:, :, 1] = torch.inf
    on_device = [t.to(ops.device) for t in (grad, torch.ones(1, 3, 2, 7, 5), weight)]
    grad_input, _, _ = ops("depthwise_conv_backward", *on_device, *arguments)
    inf = torch.inf
    planes = torch.tensor([[1, 0, 1, inf, 0, inf, 0], [inf, 0, inf, inf, 0, inf, 0]])
    assert torch.equal(grad_input.cpu(), planes[..., None].expand(1, 3, 2, 7, 5))


@pytest.mark.slow
def test_launches(tmp_path: Path) -> None:
    """In a process of its own: interpreted kernels do not tell."""
    run(__file__, TRITON_CACHE_DIR=str(tmp_path))


def check_launches() -> None:
    """A launch for outputs and one for the gradient of the input; two for gradients of weights, and
    a third for those of the bias. The same kernels serve other sizes of the same cut."""
    driver = fake_driver()
    from fusedtrain.triton import OPS, depthwise

    for samples, height in ((8, 40), (9, 48)):
        x, weight = torch.empty(samples, 16, height, 40), torch.empty(16, 1, 3, 3)
        driver.launched.clear()
        OPS["depthwise_conv"](x, weight, None, [1, 1], [1, 1], [1, 1], [1, 1], False)
        assert len(driver.launched) == 1
        for asked, launches in (
            ((True, False, False), 1), ((False, True, False), 2), ((False, False, True), 2),
            ((True, True, True), 4), ((False, False, False), 0),
        ):  # fmt: skip
            driver.launched.clear()
            arguments = ([1, 1], [1, 1], [1, 1], False, *asked)
            OPS["depthwise_conv_backward"](x, x, weight, *arguments)
            assert len(driver.launched) == launches, asked
    assert len(depthwise._launch._compiled) == 2
    driver.launched.clear()
    none = torch.empty(0, 16, 8, 8)
    OPS["depthwise_conv"](none, weight, None, [1, 1], [1, 1], [1, 1], [1, 1], False)
    OPS["depthwise_conv_backward"](
        none, none, weight, [1, 1], [1, 1], [1, 1], False, True, True, True
    )
    assert not driver.launched


if __name__ == "__main__":
    check_launches()
