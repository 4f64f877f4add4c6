"""The walks of scaled sums and bias + activation over tensors with channels: every number of rows
that a thread can have, and planes that end anywhere in a block's step.

Numbers are small integers, so outputs and sums are exact in every dtype, whatever their order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.backends import BACKENDS, Kernels

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# rows, channels, inner, dtype. The emulator has 2 multiprocessors: 32 blocks, and so many rows or
# vectors of each until a thread has 2 to 5 steps or more.
COLUMNS = {
    "one row": (1, 16, 1, F16),
    "a row a warp": (8, 16, 1, F16),
    "some warps have two": (8 * 32 + 3, 16, 1, BF16),
    "two and three": (8 * 32 * 2 + 9, 16, 1, F16),
    "four": (8 * 32 * 4, 8, 1, F32),
    "five": (8 * 32 * 4 + 1, 8, 1, F16),
    "nine and a rest": (8 * 32 * 9 - 5, 4, 1, F32),
    "element by element": (8 * 32 * 5 + 77, 5, 1, F16),
    "float64": (8 * 32 * 3 - 2, 3, 1, F64),
    "more columns than a warp has": (70, 264, 1, F16),
    "as many columns as a warp has": (300, 256, 1, F16),
    "short planes": (200, 6, 4, F32),
    "planes of two": (300, 8, 2, F16),
}
PLANES = {
    "seven rows a step": (37, 2, 264, F16),
    "a row a step": (9, 3, 1024, F32),
    "a vector more than a step": (9, 3, 1028, F32),
    "a vector less than a step": (40, 2, 1020, F32),
    "long rows": (1, 2, 9 * 1024 * 4 + 12, F32),
    "element by element": (60, 3, 257, F16),
    "float64": (33, 2, 300, F64),
    "one row": (1, 2, 400, BF16),
    "five steps and more": (82, 2, 1024 + 4, F32),
}
CASES = {
    **{f"columns, {name}": case for name, case in COLUMNS.items()},
    **{f"planes, {name}": case for name, case in PLANES.items()},
}


@pytest.fixture(params=["cpu", "emulated", "cuda"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return BACKENDS[request.param]()


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape).to(dtype)


@pytest.mark.parametrize("case", CASES)
def test_every_element_and_every_sum(ops: Kernels, case: str) -> None:
    rows, channels, inner, dtype = CASES[case]
    shape = (rows, channels, inner)

    def tensor() -> Tensor:
        return integers(*shape, dtype=dtype).to(ops.device)

    x, grad, residual = tensor(), tensor(), tensor()
    scale = integers(1, channels, dtype=dtype).to(ops.device)
    column = scale.view(1, channels, 1)
    assert ops("scale_add", x, scale, residual, 1).equal(x * column + residual)
    assert ops("scale_add", x, scale, None, 1).equal(x * column)
    grad_x, sums = ops("scale_add_backward", grad, x, scale, 1, True)
    assert grad_x.equal(grad * column)
    assert sums.double().view(-1).equal((grad.double() * x.double()).sum((0, 2)))
    assert ops("scale_add_backward", grad, None, scale, 1, True)[0].equal(grad_x)

    bias, seed = integers(channels, dtype=dtype).to(ops.device), torch.zeros(2, dtype=torch.int64)
    seed = seed.to(ops.device)
    identity, finish = (-1, 0.0, 0.0), (1.0, -1.0, 0.0)
    y = ops("bias_act", x, bias, seed, None, 1, *identity, *finish)
    assert y.equal(x + bias.view(1, channels, 1))
    y = ops("bias_act", x, bias, seed, residual, 1, *identity, *finish)
    assert y.equal(x + bias.view(1, channels, 1) + residual)
    grad_x, sums = ops("bias_act_backward", grad, x, bias, seed, 1, *identity, *finish, True)
    assert grad_x.equal(grad)
    assert sums.double().view(-1).equal(grad.double().sum((0, 2)))


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_samples_with_scales_of_their_own(ops: Kernels, dtype: torch.dtype) -> None:
    """A walk ends with its sample."""
    for shape, dim in (((3, 300, 8), 2), ((3, 2, 1028), 1), ((5, 9, 1), 1)):
        x, grad = (integers(*shape, dtype=dtype).to(ops.device) for _ in range(2))
        scale = integers(shape[0], shape[dim], dtype=dtype).to(ops.device)
        column = scale.unsqueeze(1 if dim == 2 else 2)
        assert ops("scale_add", x, scale, None, dim).equal(x * column)
        grad_x, sums = ops("scale_add_backward", grad, x, scale, dim, True)
        assert grad_x.equal(grad * column)
        assert sums.double().equal((grad.double() * x.double()).sum(3 - dim))
