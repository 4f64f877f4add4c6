"""The kernels of fold_weight, of every backend, against the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedtrain  # noqa: F401  (its ops)
from fusedtrain.ops.fold import fold_weight
from fusedtrain.reference import fold as reference
from helpers.activations import DTYPES
from helpers.backends import Kernels
from helpers.launches import parameters
from helpers.observed import compiled_plainly

# Relative to the largest magnitude, in eps: sums of up to 2000 products in float32, and one
# rounding in 16 bits.
TOLERANCE = {torch.float32: 32.0, torch.float64: 64.0, torch.float16: 1.0, torch.bfloat16: 1.0}

# Shape of the weight, transposed, groups.
SHAPES: dict[str, tuple[tuple[int, ...], bool, int]] = {
    "linear": ((7, 33), False, 1),
    "1d": ((5, 3, 3), False, 1),
    "2d": ((6, 4, 3, 3), False, 1),
    "3d": ((3, 2, 2, 3, 2), False, 1),
    "depthwise": ((17, 1, 3, 3), False, 17),
    "long": ((3, 220, 3, 3), False, 1),
    "many channels": ((300, 1, 1, 1), False, 1),
    "transposed": ((4, 5, 3, 3), True, 1),
    "transposed, groups": ((6, 5, 3, 2), True, 3),
    "transposed, depthwise": ((6, 1, 3, 3), True, 6),
    "transposed, 1d": ((4, 3, 2), True, 2),
    "no input": ((4, 0, 3, 3), False, 1),
    "no output": ((0, 4, 3, 3), False, 1),
}


def case(
    name: str, dtype: torch.dtype, stats: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, list[Tensor], tuple[Any, ...]]:
    """grad, weight; bias, gamma, beta, mean, var; eps, transposed, groups."""
    shape, transposed, groups = SHAPES[name]
    n = shape[1] * groups if transposed else shape[0]
    grad, weight = (torch.randn(shape).to(device, dtype) for _ in "ab")
    gamma = torch.randn(n)
    gamma[:1] = 0
    vectors = [gamma, torch.randn(n), torch.randn(n), torch.rand(n) + 0.5]
    bias = torch.randn(n).to(device, dtype)
    return grad, weight, [bias, *(v.to(device, stats) for v in vectors)], (1e-3, transposed, groups)


def assert_close(actual: Tensor, expected: Tensor, layout: Tensor | None = None) -> None:
    assert actual.shape == expected.shape
    if actual.numel():
        scale = expected.abs().max().clamp_min(1e-3)
        worst = ((actual.double().cpu() - expected.cpu()).abs().max() / scale.cpu()).item()
        assert worst <= TOLERANCE[actual.dtype] * torch.finfo(actual.dtype).eps
    if layout is not None:
        assert actual.stride() == layout.stride()


def check(ops: Kernels, grad: Tensor, weight: Tensor, vectors: list[Any], rest: Any) -> None:
    bias, gamma, beta, mean, var = vectors
    wide = [None if t is None else t.double() for t in vectors]
    results = ops("fold_weight", weight, bias, gamma, beta, mean, var, *rest)
    want = reference.fold_weight(weight.double(), *wide, *rest)
    assert [t.dtype for t in results] == [weight.dtype] * 2
    for a, b in zip(results, want, strict=True):
        assert_close(a, b, weight if a is results[0] and weight.numel() else None)
    grad_bias = torch.randn(mean.shape).to(weight)
    results = ops(
        "fold_weight_backward", grad, grad_bias, weight, bias, gamma, mean, var, *rest
    )  # fmt: skip
    want = reference.fold_weight_backward(
        grad.double(), grad_bias.double(), weight.double(), *wide[:2], *wide[3:], *rest
    )  # fmt: skip
    assert [t.dtype for t in results] == [weight.dtype] * 2 + [mean.dtype] * 2
    for a, b in zip(results, want, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("name", parameters(SHAPES, "no output"))
def test_shapes(ops: Kernels, name: str) -> None:
    grad, weight, vectors, rest = case(name, torch.float32, torch.float32, ops.device)
    check(ops, grad, weight, vectors, rest)


@pytest.mark.parametrize("stats", ["same", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(ops: Kernels, dtype: torch.dtype, stats: str) -> None:
    chosen = dtype if stats == "same" else torch.float32
    for name in ("2d", "transposed, groups"):
        grad, weight, vectors, rest = case(name, dtype, chosen, ops.device)
        check(ops, grad, weight, vectors, rest)


@pytest.mark.parametrize("absent", [0, 1, 2, (0, 1, 2)], ids=str)
def test_absent_arguments(ops: Kernels, absent: int | tuple[int, ...]) -> None:
    grad, weight, vectors, rest = case("2d", torch.float32, torch.float32, ops.device)
    for i in (absent,) if isinstance(absent, int) else absent:
        vectors[i] = None  # type: ignore[call-overload]
    check(ops, grad, weight, vectors, rest)


@pytest.mark.parametrize(
    "name", ["2d", "transposed", "transposed, groups", "transposed, depthwise"]
)
def test_layouts(ops: Kernels, name: str) -> None:
    grad, weight, vectors, rest = case(name, torch.float32, torch.float32, ops.device)
    last = weight.contiguous(memory_format=torch.channels_last)
    check(ops, grad, last, vectors, rest)
    sliced = torch.randn(*weight.shape[:-1], 2 * weight.size(-1), device=ops.device)[..., ::2]
    swapped = torch.randn(weight.shape[::-1], device=ops.device).permute(3, 2, 1, 0)
    for other in (sliced, swapped):
        bias, gamma, beta, mean, var = vectors
        results = ops("fold_weight", other, bias, gamma, beta, mean, var, *rest)
        wide = [t.double() for t in vectors]
        assert_close(results[0], reference.fold_weight(other.double(), *wide, *rest)[0])
    strided = [torch.stack([v, v], 1)[:, 0] for v in vectors]
    check(ops, grad, weight, strided, rest)


def test_compiled_to_plain_operators() -> None:
    """As eager, and without the op, so that Inductor may fuse it."""
    _, weight, (bias, gamma, beta, mean, var), rest = case("2d", torch.float32, torch.float32)
    arguments = (weight.requires_grad_(), bias, gamma, beta, mean, var, *rest)
    results = compiled_plainly(fold_weight, *arguments, export=False)
    for a, b in zip(results, fold_weight(*arguments), strict=True):
        assert_close(a.detach(), b.detach().double())
