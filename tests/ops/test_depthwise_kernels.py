"""The kernels of depthwise convolutions, of every backend, against the formula in float64."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import depthwise as reference
from helpers.activations import DTYPES
from helpers.backends import Kernels, placed
from helpers.launches import parameters

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")


class Case(NamedTuple):
    """A call; numbers have one for each dimension behind channels."""

    shape: tuple[int, ...]
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    end: list[int]
    multiplier: int = 1


def square(
    shape: tuple[int, ...], kernel: int, stride: int = 1, padding: int | None = None,
    dilation: int = 1, *, more: int = 0, multiplier: int = 1,
) -> Case:  # fmt: skip
    """The same numbers in all dimensions; padding, if none is named, keeps the size."""
    pad = (kernel - 1) * dilation // 2 if padding is None else padding
    numbers = (kernel, stride, pad, dilation, pad + more)
    return Case(shape, *([number] * (len(shape) - 2) for number in numbers), multiplier)


CASES = {
    "3 x 3": square((2, 8, 11, 9), 3),
    "3 x 3, stride 2": square((2, 16, 9, 12), 3, 2),
    "3 x 3, stride 2, no padding": square((2, 3, 8, 13), 3, 2, 0),
    "3 x 3, stride 2, padding at the end": square((1, 8, 8, 6), 3, 2, 0, more=1),
    "3 x 3 of planes of 7": square((3, 35, 7, 7), 3),
    "5 x 5": square((1, 17, 9, 7), 5),
    "5 x 5, stride 2": square((2, 8, 10, 11), 5, 2),
    "7 x 7": square((1, 8, 14, 10), 7),
    "7 x 7, stride 2, odd padding": square((2, 3, 9, 15), 7, 2, 1),
    "7 x 7 of planes of 3": square((2, 24, 3, 3), 7),
    "wide padding": square((1, 8, 4, 5), 3, 1, 4),
    "wide padding, 5 x 5": square((1, 16, 4, 5), 5, 1, 6),
    "wide padding, stride 2": square((1, 8, 4, 5), 3, 2, 5),
    "one pixel": square((3, 17, 1, 1), 3),
    "multiplier 2": square((2, 3, 8, 7), 3, multiplier=2),
    "multiplier 3, stride 2": square((1, 8, 7, 6), 5, 2, multiplier=3),
    "multiplier 2, one channel": square((2, 1, 9, 9), 7, multiplier=2),
    "1 x 1": square((2, 8, 5, 6), 1),
    "1 x 1, stride 3": square((2, 3, 7, 8), 1, 3),
    "2 x 2": square((2, 17, 6, 9), 2),
    "2 x 2, stride 2": square((2, 8, 7, 6), 2, 2, 0),
    "4 x 4": square((1, 8, 9, 6), 4),
    "4 x 4, stride 2": square((1, 8, 9, 6), 4, 2, 1),
    "9 x 9": square((1, 8, 10, 12), 9),
    "9 x 9, multiplier 2": square((1, 3, 6, 5), 9, multiplier=2),
    "11 x 11": square((1, 3, 13, 6), 11),
    "11 x 11, stride 2": square((1, 8, 12, 12), 11, 2),
    "31 x 31": square((1, 8, 9, 5), 31),
    "3 x 3, stride 3": square((2, 17, 10, 8), 3, 3),
    "3 x 3, dilation 2": square((2, 8, 8, 9), 3, dilation=2),
    "3 x 3, stride 2, dilation 2": square((2, 3, 9, 8), 3, 2, dilation=2),
    "5 x 5, stride 3, dilation 2": square((1, 8, 11, 12), 5, 3, dilation=2),
    "3 x 3, stride 2, dilation 4": square((1, 8, 9, 8), 3, 2, dilation=4, more=3),
    "1 x 7": Case((2, 8, 5, 9), [1, 7], [1, 1], [0, 3], [1, 1], [0, 3]),
    "7 x 1": Case((2, 8, 9, 5), [7, 1], [1, 1], [3, 0], [1, 1], [3, 0]),
    "3 x 5": Case((2, 17, 8, 7), [3, 5], [1, 2], [1, 0], [2, 1], [0, 3]),
    "5 x 11": Case((1, 8, 7, 14), [5, 11], [1, 1], [2, 5], [1, 1], [2, 5]),
    "9 x 3, stride 1 x 2": Case((1, 8, 12, 7), [9, 3], [1, 2], [4, 1], [1, 2], [4, 2]),
    "5 x 5, stride 1 x 2": Case((1, 8, 8, 9), [5, 5], [1, 2], [2, 2], [1, 1], [2, 2]),
    "7 x 7, stride 2 x 1": Case((1, 3, 8, 9), [7, 7], [2, 1], [3, 3], [1, 2], [3, 6]),
    "1-d, causal": Case((2, 35, 19), [4], [1], [3], [1], [0]),
    "1-d, 3": square((3, 8, 40), 3),
    "1-d, 31": square((2, 3, 45), 31),
    "1-d, stride 2, dilation 3": square((2, 8, 23), 5, 2, dilation=3, multiplier=2),
    "3-d": square((2, 8, 4, 5, 6), 3),
    "3-d, stride 2": square((1, 17, 5, 6, 7), 3, 2),
    "3-d, 5": square((1, 3, 5, 5, 5), 5, multiplier=2),
    "3-d, 3 x 7 x 7": Case((1, 8, 4, 8, 8), [3, 7, 7], [2, 1, 1], [1, 3, 3], [1] * 3, [1, 3, 3]),
    "3-d, 2 x 3 x 1": Case((2, 3, 4, 6, 5), [2, 3, 1], [2, 1, 3], [1, 1, 0], [2, 1, 1], [0, 1, 0]),
    "3-d, 5 x 3 x 3, stride 3": Case((1, 8, 9, 6, 5), [5, 3, 3], [3, 2, 2], [2, 1, 1], [2, 1, 1],
                                    [4, 1, 1]),
    "64-bit indices": Case((2, 8, 2, 5, 6), [1, 3, 3], [1, 2, 1], [0, 1, 1], [2**29, 1, 1],
                           [0, 1, 1]),
    "nothing but padding": square((2, 8, 0, 5), 3, 1, 2),
    "no samples": square((0, 8, 6, 6), 3),
    "no samples, 1-d": square((0, 3, 9), 5),
}  # fmt: skip
LARGE = {
    "many groups": square((9, 2, 40, 33), 3),
    "many groups of 7 x 7": square((3, 24, 24, 40), 7, 2),
    "many tiles": square((2, 72, 17, 40), 5),
    "long rows": square((2, 3, 3000), 9),
    "many channels": square((2, 600, 5, 4), 5),
    "many channels, odd": square((2, 301, 6, 5), 3, 2),
    "dilated": square((4, 16, 30, 31), 3, 1, dilation=2),
}


def laid(t: Tensor, last: bool) -> Tensor:
    format = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return t.contiguous(memory_format=format) if last else t.contiguous()


def has_layout(t: Tensor, last: bool) -> bool:
    format = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    return t.is_contiguous(memory_format=format if last else torch.contiguous_format)


class Call:
    """Random tensors of a case in a dtype, and their truth in float64."""

    def __init__(self, case: Case, dtype: torch.dtype, last: bool) -> None:
        channels = case.shape[1] * case.multiplier
        self.last, self.dtype = last, dtype
        self.input = laid(torch.randn(case.shape).to(dtype), last)
        self.weight = torch.randn(channels, 1, *case.kernel).to(dtype)
        self.bias = torch.randn(channels).to(dtype)
        self.forward = (case.stride, case.padding, case.end, case.dilation, last)
        self.rest = (case.stride, case.padding, case.dilation, last)
        self.want = reference.depthwise_conv(
            self.input.double(), self.weight.double(), self.bias.double(), *self.forward
        )
        self.grad = laid(torch.randn(self.want.shape).to(dtype), last)

    def gradients(self, *tensors: Tensor, asked: tuple[bool, ...] = (True,) * 3) -> list[Tensor]:
        values = [t.double() for t in tensors or (self.grad, self.input, self.weight)]
        return list(reference.depthwise_conv_backward(*values, *self.rest, *asked))

    def close(self, ops: Kernels, result: Tensor, want: Tensor, products: Tensor) -> None:
        """Sums are of the compute type, over numbers of that size, and rounded once."""
        assert result.dtype is self.dtype
        assert result.shape == want.shape
        numbers = torch.finfo(self.dtype)
        wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        summed = torch.finfo(wide).eps if ops.kernel else numbers.eps
        rounding = 0.51 * numbers.eps * want.abs().clamp(min=numbers.smallest_normal)
        assert ((result.cpu().double() - want).abs() <= rounding + 8 * summed * products).all()

    def check_forward(self, ops: Kernels, input: Tensor | None = None) -> None:
        x = self.input if input is None else input
        arguments = [placed(t, ops.device) for t in (x, self.weight, self.bias)]
        y = ops("depthwise_conv", *arguments, *self.forward)
        sizes = [t.double().abs() for t in (self.input, self.weight, self.bias)]
        self.close(ops, y, self.want, reference.depthwise_conv(*sizes, *self.forward))
        assert has_layout(y, self.last)
        plain = ops("depthwise_conv", *arguments[:2], None, *self.forward)
        values = [t.double() for t in (self.input, self.weight)]
        want, products = (
            reference.depthwise_conv(*tensors, None, *self.forward)
            for tensors in (values, sizes[:2])
        )
        self.close(ops, plain, want, products)

    def check_backward(self, ops: Kernels, grad: Tensor | None = None) -> tuple[Tensor, ...]:
        tensors = (self.grad if grad is None else grad, self.input, self.weight)
        results: tuple[Tensor, ...] = ops(
            "depthwise_conv_backward", *(placed(t, ops.device) for t in tensors), *self.rest,
            True, True, True,
        )  # fmt: skip
        products = self.gradients(*(t.abs() for t in (self.grad, self.input, self.weight)))
        for result, want, product in zip(results, self.gradients(), products, strict=True):
            self.close(ops, result, want, product)
        assert has_layout(results[0], self.last) or not self.input.numel()
        return results


def dtypes_of(ops: Kernels, name: str, last: bool) -> list[torch.dtype]:
    """All, but where kernels are slow one that depends on the case."""
    turn = (list({**CASES, **LARGE}).index(name) + last) % len(DTYPES)
    return DTYPES[turn : turn + 1] if ops.slow else DTYPES


def smaller_if_slow(ops: Kernels, case: Case, last: bool, channels: int) -> Case:
    """Interpreted kernels take a channel at a time where it is contiguous."""
    if not ops.slow:
        return case
    if max(case.kernel) > 15:
        pytest.skip("needs a GPU: 12 s in an interpreter, and 11 x 11 is the same loop")
    if last:
        return case
    return case._replace(shape=(case.shape[0], min(channels, case.shape[1]), *case.shape[2:]))


LAYOUTS = pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])


@LAYOUTS
@pytest.mark.parametrize("name", parameters(CASES, "no samples", "no samples, 1-d"))
def test_every_case(ops: Kernels, name: str, last: bool) -> None:
    if last and len(CASES[name].shape) == 3:
        last = False  # there is no such layout: another dtype
    case = smaller_if_slow(ops, CASES[name], last, 2)
    for dtype in dtypes_of(ops, name, last):
        call = Call(case, dtype, last)
        call.check_forward(ops)
        call.check_backward(ops)


@LAYOUTS
@pytest.mark.parametrize("padding", [[1, 0], [0, 1], [2, 1]], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_unequal_padding(
    ops: Kernels, kernel: int, stride: int, padding: list[int], last: bool
) -> None:
    """The usual square kernels."""
    shape = (2, 8, 9, 10) if last else (2, 2, 9, 10)
    case = Case(shape, [kernel] * 2, [stride] * 2, padding, [1, 1], padding)
    call = Call(case, DTYPES[(kernel + stride + last) % len(DTYPES)], last)
    call.check_forward(ops)
    call.check_backward(ops)


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("name", LARGE)
def test_several_blocks(ops: Kernels, name: str, last: bool) -> None:
    last = last and len(LARGE[name].shape) > 3
    for dtype in dtypes_of(ops, name, last):
        call = Call(smaller_if_slow(ops, LARGE[name], last, 20), dtype, last)
        call.check_forward(ops)
        call.check_backward(ops)


FEW = ("3 x 3", "4 x 4, stride 2", "multiplier 2")


@LAYOUTS
@pytest.mark.parametrize("name", FEW)
def test_only_what_is_asked_for(ops: Kernels, name: str, last: bool) -> None:
    call = Call(CASES[name], torch.float32, last)
    whole = call.check_backward(ops)
    tensors = [placed(t, ops.device) for t in (call.grad, call.input, call.weight)]
    for number in range(8):
        asked = tuple(bool(number >> i & 1) for i in range(3))
        some = ops("depthwise_conv_backward", *tensors, *call.rest, *asked)
        for result, full, wanted in zip(some, whole, asked, strict=True):
            assert result.numel() == (full.numel() if wanted else 0)
            if wanted and ops.kernel:
                assert (result - full).abs().max() <= 1e-5 * full.abs().max()


def off_16_bytes(t: Tensor) -> Tensor:
    memory = torch.empty(t.numel() + 1, dtype=t.dtype)
    return memory.as_strided(t.shape, t.stride(), 1).copy_(t)


def sliced(t: Tensor) -> Tensor:
    larger = torch.randn(*t.shape[:-1], t.size(-1) + 3).to(t.dtype)
    larger[..., 1:-2] = t
    return larger[..., 1:-2]


@LAYOUTS
@pytest.mark.parametrize("name", FEW)
def test_other_layouts(ops: Kernels, name: str, last: bool) -> None:
    for dtype in DTYPES[2:] if ops.slow else DTYPES:
        call = Call(CASES[name], dtype, last)
        for change in (off_16_bytes, sliced, partial(laid, last=not last)):
            call.check_forward(ops, change(call.input))
            call.check_backward(ops, change(call.grad))


@pytest.mark.parametrize(("channels", "multiplier"), [(35, 1), (136, 1), (8, 2)])
def test_blocks_of_channels(ops: Kernels, channels: int, multiplier: int) -> None:
    """A last block with fewer numbers, or fewer vectors (34 and 17 are blocks of 12 and of 9); and
    as many channels as a vector has, but two outputs of each."""
    for dtype in (torch.float32, torch.bfloat16):
        call = Call(square((1, channels, 3, 4), 3, multiplier=multiplier), dtype, True)
        call.check_forward(ops)
        call.check_backward(ops)


@LAYOUTS
@pytest.mark.parametrize(
    "name", ["3 x 3", "7 x 7", "7 x 7, stride 2, odd padding", "9 x 9", "2 x 2"]
)
def test_infinities_reach_what_sees_them(ops: Kernels, name: str, last: bool) -> None:
    """And nothing else: strips and blocks go beyond the tensors, where they must not compute."""
    call = Call(CASES[name], torch.float32, last)
    call.input[:, 0, -1, -1] = call.input[:, -1, 0, 0] = float("inf")
    call.grad[:, 0, -1, 0] = call.grad[:, -1, 0, -1] = float("inf")
    values = [t.double() for t in (call.input, call.weight, call.bias)]
    tensors = [placed(t, ops.device) for t in (call.input, call.weight, call.bias)]
    y = ops("depthwise_conv", *tensors, *call.forward)
    want = reference.depthwise_conv(*values, *call.forward)
    assert y.isfinite().cpu().equal(want.isfinite())
    finite = placed(call.grad.nan_to_num(0, 0, 0), ops.device)
    grad = placed(call.grad, ops.device)
    backward = "depthwise_conv_backward"
    grad_input = ops(backward, grad, *tensors[:2], *call.rest, True, False, False)[0]
    want = call.gradients(asked=(True, False, False))[0]
    assert grad_input.isfinite().cpu().equal(want.isfinite())
    grad_weight = ops(backward, finite, *tensors[:2], *call.rest, False, True, False)[1]
    want = call.gradients(finite.cpu(), call.input, call.weight)[1]
    assert grad_weight.isfinite().cpu().equal(want.isfinite())
    numbers = want.isfinite()
    torch.testing.assert_close(grad_weight.cpu()[numbers], want.float()[numbers])
