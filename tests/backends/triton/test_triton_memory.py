"""The watch over interpreted kernels notices planted faults (helpers/triton_memory.py)."""

from __future__ import annotations

import os

import pytest
import torch

from helpers.backends import HAS_GPU
from helpers.triton_interpreter import round_to_nearest

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(
    HAS_GPU or os.environ.get("TRITON_INTERPRET") != "1", reason="watches the interpreter"
)


@triton.jit
def copy_kernel(x_ptr, y_ptr, first, n, BLOCK: tl.constexpr):
    at = first + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n, other=0.0), mask=at < n)


@pytest.mark.parametrize(
    ("first", "n", "message"),
    [
        (0, 5, None), (0, 6, "reads 1 elements"), (-1, 5, "reads 1 elements"),
        (8, 9, "reads 1 elements"),
    ],
)  # fmt: skip
def test_reads(first: int, n: int, message: str | None) -> None:
    round_to_nearest()
    x, y = torch.ones(16)[:5], torch.zeros(16)  # what lies behind x is not x
    if message is None:
        copy_kernel[(1,)](x, y, first, n, 8)
        assert torch.equal(y[:5], x)
        return
    with pytest.raises(triton.runtime.errors.InterpreterError, match=message):
        copy_kernel[(1,)](x, y, first, n, 8)


def test_writes() -> None:
    round_to_nearest()
    y = torch.zeros(16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="writes 3 elements"):
        copy_kernel[(1,)](torch.ones(16), y[:5], 0, 8, 8)
    assert not y.any()


def test_memory_is_nan() -> None:
    from fusedtrain.triton import OPS, pointwise

    round_to_nearest()
    run, pointwise._run = pointwise._run, lambda *_: None  # launches nothing
    try:
        assert OPS["mish"](torch.ones(5)).isnan().all()
    finally:
        pointwise._run = run
    assert not torch.are_deterministic_algorithms_enabled()
