"""One table of cases for the kernels of every backend: numbers, layouts, special values, in place.

The ops are called as the functions call them (test_activations.py has the functions).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import ACTIVATIONS
from helpers.activations import (
    DTYPES,
    NAMES,
    POINTWISE,
    assert_close,
    backward_scale,
    layouts,
    special_values,
)
from helpers.backends import Kernels, in_layout_of


def tensors_of(name: str, x: Tensor) -> list[Any]:
    """The parameters of the op: floats, or tensors of one value or one a channel."""
    row = ACTIVATIONS[name]
    if not row.tensors:
        return list(row.arguments)
    channels = x.size(1) if row.per_channel and x.dim() > 1 else 1
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(channels, generator=generator) for _ in row.parameters]
    return [t.to(x) for t in tensors]


def want(name: str, x: Tensor, grad: Tensor, parameters: list[Any]) -> list[Tensor]:
    """Output, gradient of the input and of tensor parameters: eager torch in float64."""
    row = ACTIVATIONS[name]
    wide = [
        p.detach().double().cpu().requires_grad_() if isinstance(p, Tensor) else p
        for p in (x, *parameters)
    ]
    y = row.forward(*wide)
    leaves = [p for p in wide if isinstance(p, Tensor)]
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.double().cpu())]


def cases(dtype: torch.dtype, name: str, ops: Kernels) -> Iterator[tuple[str, Tensor]]:
    """A slow backend has every layout with every name and every dtype, but not with every two."""
    device = ops.device
    at = NAMES.index(name) + DTYPES.index(dtype)
    for i, (kind, x) in enumerate(layouts(dtype).items()):
        if ops.slow and (i + at) % 2:
            continue
        if name == "star_relu" and kind == "0-dim":
            continue  # broadcasts with its parameters to one dimension
        moved = x.to(device)
        if x.numel() and (moved.stride() != x.stride() or x.storage_offset()):
            moved = torch.as_strided(
                x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device),
                x.size(), x.stride(), x.storage_offset(),
            )  # fmt: skip
        yield kind, moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_numbers(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    row = ACTIVATIONS[name]
    generator = torch.Generator().manual_seed(2)
    for kind, x in cases(dtype, name, ops):
        parameters = tensors_of(name, x)
        grad = torch.randn(x.shape, generator=generator).to(dtype).to(ops.device)
        kept = x.clone()
        y = ops(name, x, *parameters)
        assert y.dtype == dtype, kind
        if ops.kernel and (kind != "0-dim" or not row.tensors):
            assert y.stride() == torch.empty_like(x).stride(), kind
        grads = ops(f"{name}_backward", grad, y if row.saves == "output" else x, *parameters)
        assert torch.equal(x, kept), kind
        expected = want(name, x, grad, parameters)
        if name == "hardsigmoid" and dtype == torch.float64:
            # torch's own float64 gradient is 1/6 rounded to float32.
            expected[1] = torch.where(expected[1] == 0, 0.0, grad.double().cpu() / 6)
        loose = 1 if ops.kernel else 4
        assert_close(y.cpu(), expected[0], loose)
        gradients = grads if isinstance(grads, tuple) else (grads,)
        assert_close(gradients[0].cpu(), expected[1], loose * backward_scale(row))
        for sums, exact in zip(gradients[1:], expected[2:], strict=True):
            rtol = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps)
            torch.testing.assert_close(sums.cpu().double(), exact, rtol=rtol, atol=rtol * 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POINTWISE)
def test_inplace(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    for kind, x in cases(dtype, name, ops):
        if kind == "expanded":
            continue
        parameters = tensors_of(name, x)
        expected = ops(name, x, *parameters)
        assert ops(f"{name}_", x, *parameters) is None
        assert torch.equal(x, expected), kind


@pytest.mark.parametrize("name", NAMES)
def test_gradient_in_another_layout(ops: Kernels, name: str) -> None:
    x = torch.randn(4, 6, 5, 3).contiguous(memory_format=torch.channels_last).to(ops.device)
    parameters = tensors_of(name, x)
    row = ACTIVATIONS[name]
    base = torch.randn(4, 6, 5, 3).to(ops.device)
    for grad in (base, base[:, :1].expand(4, 6, 5, 3), base.transpose(2, 3).contiguous().mT):
        saved = ops(name, x, *parameters) if row.saves == "output" else x
        gradients = ops(f"{name}_backward", grad, saved, *parameters)
        first = gradients[0] if isinstance(gradients, tuple) else gradients
        assert first.stride() == x.stride() or not ops.kernel
        assert_close(first.cpu(), want(name, x, grad, parameters)[1], backward_scale(row))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_special_values(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    """Infinities, NaN, zeros of both signs, denormals: through the vectors and through the tail."""
    x, expected = special_values(name, dtype)
    row = ACTIVATIONS[name]
    x = x.to(ops.device)
    parameters = row.arguments_for(x)
    y = ops(name, x, *parameters).cpu()
    tiny = torch.finfo(dtype).smallest_normal
    if not ops.kernel:
        expected = row.eager(x)
    assert torch.equal(y.isnan(), expected.isnan())
    torch.testing.assert_close(
        y, expected, equal_nan=True,
        rtol=4e-2 if dtype.itemsize == 2 else 1e-5,
        atol=tiny if dtype == torch.bfloat16 else tiny / 256,  # torch's bfloat16 gelu flushes
    )  # fmt: skip
    if name != "softshrink":  # torch's vector body and its tail disagree on the sign of zero
        zeros = (y == 0) & (expected == 0) & (x.cpu() == 0)
        assert torch.equal(y[zeros].signbit(), expected[zeros].signbit())
    if ops.kernel:  # at infinity
        saved = y.to(x.device) if row.saves == "output" else x
        gradients = ops(f"{name}_backward", torch.ones_like(x), saved, *parameters)
        gradient = gradients[0] if isinstance(gradients, tuple) else gradients
        assert not gradient[:2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_16_bit_number(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    if not ops.kernel:
        pytest.skip("not a case: plain torch rounds 16-bit numbers at every step")
    row = ACTIVATIONS[name]
    x = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    x = x[torch.isfinite(x)].clone().to(ops.device)
    parameters = row.arguments_for(x)
    y = ops(name, x, *parameters)
    ones = torch.ones_like(y)
    g = ops(f"{name}_backward", ones, y if row.saves == "output" else x, *parameters)
    g = g[0] if isinstance(g, tuple) else g
    expected = want(name, x, ones, parameters)
    limit = torch.finfo(dtype).max  # squares overflow
    finite = (expected[0].abs() <= limit) & (expected[1].abs() <= limit)
    assert_close(y.cpu()[finite], expected[0][finite])
    assert_close(g.cpu()[finite], expected[1][finite], backward_scale(row))
    if name in ("relu", "relu6", "hardtanh", "hardshrink", "softshrink", "threshold"):
        assert torch.equal(g.cpu().double(), expected[1])
    if name == "hardsigmoid":
        assert torch.equal(g.cpu() == 0, expected[1] == 0)


@pytest.mark.parametrize("name", ["prelu", "star_relu"])
def test_parameter_gradients(ops: Kernels, name: str) -> None:
    """Sums over long and short rows, channels first and last, one channel and many."""
    shapes = [(3, 700), (2, 5, 90, 70), (40_000,), (2, 7), (1, 3, 1), (2, 300, 7), (2, 2, 4_000),
              (33, 2, 5, 5), (5, 16, 8, 8), (7, 256), (100, 256)]  # fmt: skip
    for shape in shapes:
        for dtype in (torch.float32, torch.float16):
            for last in (False, True):
                x = torch.randn(shape).to(dtype).to(ops.device)
                if last and x.dim() == 4:
                    x = x.contiguous(memory_format=torch.channels_last)
                parameters = tensors_of(name, x)
                grad = in_layout_of(torch.randn(shape).to(dtype).to(ops.device), x)
                gradients = ops(f"{name}_backward", grad, x, *parameters)
                expected = want(name, x, grad, parameters)[1:]
                assert_close(gradients[0].cpu(), expected[0], 4 if not ops.kernel else 2)
                rtol = 2e-5 if dtype == torch.float32 else 1e-3
                for sums, exact in zip(gradients[1:], expected[1:], strict=True):
                    scale = (exact.abs().max() + 1).item()
                    torch.testing.assert_close(
                        sums.cpu().double(), exact, rtol=rtol, atol=rtol * scale
                    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_grid_that_goes_round(ops: Kernels, dtype: torch.dtype) -> None:
    """More elements than the blocks take in one turn, with a tail: forward and backward."""
    x = torch.randn(300_001).to(dtype).to(ops.device)
    grad = torch.randn(300_001).clamp_(-3, 3).to(dtype).to(ops.device)
    expected = want("mish", x, grad, [])
    loose = 1 if ops.kernel else 4
    assert_close(ops("mish", x).cpu(), expected[0], loose)
    assert_close(ops("mish_backward", grad, x).cpu(), expected[1], 1.5 * loose)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["mish", "prelu", "star_relu"])
def test_backward_with_one_tensor_misaligned(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    base = torch.randn(2, 4 * 4096 + 8).to(dtype).to(ops.device)
    for first, second in ((0, 1), (1, 0), (3, 3)):
        grad = base[0, first : first + 4 * 4096].view(2, 4, 2048)
        x = base[1, second : second + 4 * 4096].view(2, 4, 2048)
        parameters = tensors_of(name, x)
        gradients = ops(f"{name}_backward", grad, x, *parameters)
        grad_input = gradients[0] if isinstance(gradients, tuple) else gradients
        expected = want(name, x, grad, parameters)[1]
        assert_close(grad_input.cpu(), expected, 4 if not ops.kernel else 2)


@pytest.mark.parametrize("shape", [(2, 4, 2048), (64, 16), (6, 5, 7)])
def test_two_parameters_of_a_channel_each(ops: Kernels, shape: tuple[int, ...]) -> None:
    """The op star_relu takes a value for each channel. Its function takes one for all."""
    if not ops.kernel:
        pytest.skip("not a case: the reference has no star_relu by channel")
    x, grad = torch.randn(shape).to(ops.device), torch.randn(shape).to(ops.device)
    scale, bias = (torch.randn(shape[1]).to(ops.device) for _ in range(2))
    wide = [t.double().cpu().requires_grad_() for t in (x, scale, bias)]
    spread = [t.view(-1, *[1] * (len(shape) - 2)) for t in wide[1:]]
    y = spread[0] * wide[0].relu() ** 2 + spread[1]
    expected = torch.autograd.grad(y, wide, grad.double().cpu())
    assert_close(ops("star_relu", x, scale, bias).cpu(), y.detach())
    gradients = ops("star_relu_backward", grad, x, scale, bias)
    for one, exact in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one.cpu().double(), exact, rtol=2e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "bounds"), [("hardtanh", (-0.1, 0.3)), ("hardshrink", (0.3,)), ("hardshrink", (0.0,))]
)
def test_bounds_that_16_bits_cannot_hold(
    ops: Kernels, name: str, bounds: tuple[float, ...], dtype: torch.dtype
) -> None:
    """They are rounded first: a clipped output compares equal to its bound."""
    x = torch.linspace(-1, 1, 4001)
    x[2000] = 0  # not quite
    x = x.to(dtype).to(ops.device)
    y = ops(name, x, *bounds)
    g = ops(f"{name}_backward", torch.ones_like(x), y, *bounds)
    rounded = [torch.tensor(b).to(dtype).item() for b in bounds]
    inside = (x > rounded[0]) & (x < rounded[-1]) if name == "hardtanh" else x.abs() > rounded[0]
    assert torch.equal(g == 1, inside)


OTHER_PARAMETERS = {"elu": [0.7], "celu": [2.5], "softplus": [0.5, 20.0], "leaky_relu": [0.2]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OTHER_PARAMETERS)
def test_other_parameters(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    """Than the examples, of which many are 1."""
    x = torch.linspace(-7, 7, 999, dtype=dtype).to(ops.device)
    parameters, row = OTHER_PARAMETERS[name], ACTIVATIONS[name]
    y, ones = ops(name, x, *parameters), torch.ones_like(x)
    saved = y if row.saves == "output" else x
    gradient = ops(f"{name}_backward", ones, saved, *parameters)
    expected = want(name, x, ones, parameters)
    assert_close(y.cpu(), expected[0])
    assert_close(gradient.cpu(), expected[1], backward_scale(row))


@pytest.mark.parametrize("name", ["leaky_relu", "elu", "prelu"])
def test_zero_is_on_the_side_of_negative_numbers(ops: Kernels, name: str) -> None:
    """As in torch: zero has the slope of negative numbers and is multiplied by it."""
    x = torch.tensor([0.0, -0.0] * 9).to(ops.device)
    row = ACTIVATIONS[name]
    parameters: list[Any] = [torch.tensor([-0.5]).to(ops.device) if row.tensors else -0.5]
    y = ops(name, x, *parameters)
    assert not y.any()
    assert name == "elu" or y.signbit().tolist() == [True, False] * 9
    gradients = ops(
        f"{name}_backward", torch.ones_like(x), y if row.saves == "output" else x, *parameters
    )
    gradient = gradients[0] if isinstance(gradients, tuple) else gradients
    want = torch.full_like(gradient, -0.5)
    torch.testing.assert_close(gradient, want, rtol=5e-7, atol=0)  # CUDA's exp, even of 0


def test_softplus_at_its_threshold(ops: Kernels) -> None:
    """It is linear above, not there."""
    x = torch.full((17,), 20.0, dtype=torch.float64).to(ops.device)
    y = ops("softplus", x, 1.0, 20.0).cpu()
    assert_close(y, x.cpu() + torch.exp(-x.cpu()).log1p())
    gradient = ops("softplus_backward", torch.ones_like(x), x, 1.0, 20.0).cpu()
    assert_close(gradient, -torch.expm1(-x.cpu()))


def test_squareplus_without_curvature(ops: Kernels) -> None:
    """Half of x + |x|, with half a slope at 0."""
    x = torch.tensor([0.0, -0.0, -2.0, 2.0] * 5).to(ops.device)
    assert ops("squareplus", x, 0.0).tolist() == [0.0, 0.0, 0.0, 2.0] * 5
    gradient = ops("squareplus_backward", torch.ones_like(x), x, 0.0)
    want = torch.tensor([0.5, 0.5, 0.0, 1.0] * 5).to(ops.device)
    torch.testing.assert_close(gradient, want, rtol=5e-7, atol=0)  # CUDA's root and quotient


@pytest.mark.parametrize("name", ["relu_squared", "star_relu"])
def test_infinite_gradients_where_the_slope_is_zero(ops: Kernels, name: str) -> None:
    if not ops.kernel:
        pytest.skip("not a case: plain torch multiplies, and infinity times 0 is NaN")
    x = torch.tensor([0.0, -1.0] * 9).to(ops.device)
    parameters = [x.new_ones(1)] * 2 if ACTIVATIONS[name].tensors else []
    gradients = ops(f"{name}_backward", torch.full_like(x, float("inf")), x, *parameters)
    gradient = gradients[0] if isinstance(gradients, tuple) else gradients
    assert gradient.tolist() == [0.0] * 18
