"""One table of cases for the norms of rows of every backend, against the formula in float64.

test_row_norm.py has the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain.reference import row_norm as reference
from helpers.activations import DTYPES
from helpers.backends import Kernels
from helpers.batch_norm import last
from helpers.launches import parameters

pytestmark = pytest.mark.usefixtures("memory_is_full_of_nan")

F32, F64, F16, BF16 = DTYPES
# Errors relative to one plus the size of the number.
LIMITS = {F32: 4e-6, F64: 1e-13, F16: 2e-3, BF16: 1.6e-2}

# Input, start_dim, end_dim.
SHAPES: dict[str, Callable[[], tuple[Tensor, int, int]]] = {
    "rows": lambda: (torch.randn(5, 34), 1, 1),
    "rows of one": lambda: (torch.randn(7, 1), 1, 1),
    "aligned rows": lambda: (torch.randn(2, 3, 48), 2, 2),
    "two dimensions": lambda: (torch.randn(3, 4, 6), 1, 2),
    "all": lambda: (torch.randn(40), 0, 0),
    "many rows": lambda: (torch.randn(530, 8), 1, 1),
    "several elements a thread": lambda: (torch.randn(2, 523), 1, 1),
    "several vectors a thread": lambda: (torch.randn(2, 4160), 1, 1),
    "long rows": lambda: (torch.randn(2, 8200), 1, 1),
    "planes": lambda: (torch.randn(2, 10, 5, 7), 1, 1),
    "large planes": lambda: (torch.randn(1, 3, 20, 33), 1, 1),
    "many channels": lambda: (torch.randn(2, 300, 2, 3), 1, 1),
    "aligned planes": lambda: (torch.randn(2, 5, 16, 16), 1, 1),
    "channels last": lambda: (last(2, 10, 5, 7), 1, 1),
    "one channel": lambda: (torch.randn(3, 1, 4), 1, 1),
    "transposed": lambda: (torch.randn(6, 8, 5).transpose(0, 2), 1, 1),
    "outermost": lambda: (torch.randn(9, 20), 0, 0),
    "empty": lambda: (torch.randn(0, 5), 1, 1),
    "nothing": lambda: (torch.randn(5, 0), 1, 1),
}
# Centered, residual, weight, bias, weight and bias in the dtype of the math.
CALLS = [
    (True, False, True, True, False),
    (True, True, True, True, True),
    (True, False, False, True, False),
    (False, True, True, False, False),
    (False, False, True, False, True),
    (False, False, False, False, False),
]


def close(result: Tensor, want: Tensor, limit: float) -> None:
    result, want = result.double().cpu(), want.double().cpu()
    assert result.shape == want.shape
    assert torch.equal(result.isnan(), want.isnan())
    error = ((result - want).abs() / (1 + want.abs())).nan_to_num()
    assert not error.numel() or error.max() <= limit, error.max()


def exact(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, start: int, end: int, centered: bool
) -> Tensor:
    """The formula, differentiable, in float64."""
    dims = list(range(start, end + 1))
    distance = x - x.mean(dims, keepdim=True) if centered else x
    y = distance / (distance.square().mean(dims, keepdim=True) + 1e-5).sqrt()
    if weight is not None:
        y = y * reference.broadcast(weight, x, start, end)
    return y if bias is None else y + reference.broadcast(bias, x, start, end)


def check(ops: Kernels, shape: tuple[Tensor, int, int], call: Any, dtype: torch.dtype) -> None:
    x, start, end = shape
    centered, has_residual, has_weight, has_bias, wide = call
    x = x.to(ops.device, dtype)
    kind = (F64 if dtype is F64 else F32) if wide else dtype
    sizes = x.shape[start : end + 1]
    residual = torch.randn(x.shape).to(x) if has_residual else None
    weight = torch.randn(sizes).to(ops.device, kind) if has_weight else None
    bias = torch.randn(sizes).to(ops.device, kind) if has_bias else None
    y, mean, rstd, total = ops("row_norm", x, residual, weight, bias, start, end, 1e-5, centered)
    if residual is None:
        assert total.numel() == 0
        total = x
    else:
        assert torch.equal(total, x + residual)
    assert (mean.numel() > 0) is (centered and rstd.numel() > 0)
    promised = torch.empty_like(x)
    if ops.kernel:
        assert y.stride() == total.stride() == promised.stride()
        assert rstd.stride() == reference.new_statistics(x, start, end).stride()

    leaves = [t.detach().cpu().double().requires_grad_() for t in (total, weight, bias)
              if t is not None]  # fmt: skip
    given = iter(leaves[1:])
    of = [next(given) if t is not None else None for t in (weight, bias)]
    want = exact(leaves[0], of[0], of[1], start, end, centered)
    close(y, want.detach(), LIMITS[dtype])
    if not x.numel():
        assert not y.numel()

    grad = torch.randn(x.shape).to(ops.device, dtype)
    more = torch.randn(x.shape).to(ops.device, dtype) if has_residual else None
    gradients = torch.autograd.grad(want, leaves, grad.cpu().double())
    of_input = gradients[0] + (0 if more is None else more.cpu().double())
    results = ops(
        "row_norm_backward", grad, more, total, weight, mean, rstd, start, end, has_weight, has_bias
    )
    close(results[0], of_input, 4 * LIMITS[dtype])
    if ops.kernel:
        assert results[0].stride() == promised.stride()
    affine = iter(gradients[1:])
    for t, result in zip((weight, bias), results[1:], strict=True):
        assert result.dtype is (F64 if dtype is F64 else F32)
        assert result.dim() == 1
        if t is None:
            assert not result.numel()
            continue
        terms = grad.double().square().sum().sqrt().item() + 1
        error = (result.double().cpu() - next(affine).flatten()).abs()
        assert not error.numel() or error.max() <= terms * (1e-13 if dtype is F64 else 4e-6)


@pytest.mark.parametrize("name", parameters(SHAPES, "empty", "nothing"))
def test_shapes(ops: Kernels, name: str) -> None:
    for number, dtype in enumerate(DTYPES):
        shape = SHAPES[name]()
        # Each dtype sees other calls of the same shape; the next test has all of both.
        calls = CALLS[number : number + 1] if shape[0].numel() > 3000 else CALLS[number % 2 :: 2]
        for call in calls:
            check(ops, shape, call, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls(ops: Kernels, dtype: torch.dtype) -> None:
    for name in ("rows", "planes", "channels last"):
        for call in CALLS:
            check(ops, SHAPES[name](), call, dtype)


def test_a_large_mean(ops: Kernels) -> None:
    if not ops.kernel:
        pytest.skip("not a case: plain torch rounds the mean to float32")
    for shape, dim in (((6, 700), 1), ((2, 9000), 1), ((2, 70, 3, 5), 1)):
        x = (1e4 + torch.randn(shape)).to(ops.device)
        y, _, rstd, _ = ops("row_norm", x, None, None, None, dim, dim, 1e-5, True)
        want = exact(x.cpu().double(), None, None, dim, dim, True)
        close(y, want, 4e-6)
        deviation = x.double().var(dim, unbiased=False, keepdim=True).add(1e-5).rsqrt()
        close(rstd, deviation, 2e-6)


def test_special_numbers(ops: Kernels) -> None:
    """Infinities, NaN, zeros without eps, and squares beyond float32, as torch has them."""
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[1.0, inf, 2.0], [nan, 1.0, 2.0], [-inf, inf, 0.0], [0.0, 0.0, 0.0],
                         [3.0, 3.0, 3.0], [1e30, 0.0, 1.0], [1.0, 2.0, 3.0]])  # fmt: skip
    for eps in (0.0, 1e-5):
        for layout in (rows, rows.t().contiguous().t()):
            x = layout.to(ops.device)
            rms = ops("row_norm", x, None, None, None, 1, 1, eps, False)[0]
            close(rms, torch.nn.functional.rms_norm(rows, (3,), eps=eps), 1e-6)
            norm = ops("row_norm", x, None, None, None, 1, 1, eps, True)[0]
            want, some = torch.nn.functional.layer_norm(rows, (3,), eps=eps), [0, 1, 2, 6]
            close(norm[some], want[some], 1e-6)
            assert bool(norm[3:5].isnan().all()) is (eps == 0.0)  # 0 times infinity
