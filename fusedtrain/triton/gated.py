"""Gated products: kernels, then launchers.

Lengths of rows and distances between them are given in UNITs, a constant: so Triton sees which of
its vectors (16 bytes at most) lie within a row, and on a multiple of their size.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.pointwise import POINTWISE
from . import pointwise
from ._channels import BLOCK, sides_of
from ._layout import cdiv, check_same, dense_like, unit_of
from .formulas import formula_of
from .launch import Launcher, check_dtype
from .pointwise import apply, differentiate
from .scale_add import scale_add, scale_add_backward
from .vecmath import widen


@triton.jit
def tile_of_runs(rows, n, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Numbers of rows and columns of a program's tile, and which elements exist."""
    across = tl.cdiv(n, WIDTH)
    program = tl.program_id(0).to(tl.int64)
    row = (program // across * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    column = (program % across * WIDTH + tl.arange(0, WIDTH))[None, :]
    return row, column, (row < rows) & (column < n)


@triton.jit(do_not_specialize=["rows", "units", "gate_units", "value_units"])
def gated_kernel(  # equal (other=): elements beyond the data are not stored
    gate_ptr, value_ptr, y_ptr, rows: tl.int64, units: tl.int64, gate_units: tl.int64,
    value_units: tl.int64, a: tl.float64, b: tl.float64,
    FORWARD: tl.constexpr, STORED: tl.constexpr, UNIT: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    n = units * UNIT
    row, column, inside = tile_of_runs(rows, n, HEIGHT, WIDTH)
    at = row * (gate_units * UNIT) + column
    gate = widen(tl.load(gate_ptr + at, mask=inside, other=0.0))
    at = row * (value_units * UNIT) + column
    value = widen(tl.load(value_ptr + at, mask=inside, other=0.0))
    y = apply(FORWARD, gate, a, b, STORED) * value
    tl.store(y_ptr + row * n + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "rows",
        "units",
        "gate_units",
        "value_units",
        "grad_gate_units",
        "grad_value_units",
    ]
)
def gated_backward_kernel(  # equal (other=): elements beyond the data are not stored
    grad_ptr, gate_ptr, value_ptr, grad_gate_ptr, grad_value_ptr,
    rows: tl.int64, units: tl.int64, gate_units: tl.int64, value_units: tl.int64,
    grad_gate_units: tl.int64, grad_value_units: tl.int64, a: tl.float64, b: tl.float64,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, BY_OUTPUT: tl.constexpr, STORED: tl.constexpr,
    UNIT: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    n = units * UNIT
    row, column, inside = tile_of_runs(rows, n, HEIGHT, WIDTH)
    grad = widen(tl.load(grad_ptr + row * n + column, mask=inside, other=0.0))
    at = row * (gate_units * UNIT) + column
    gate = widen(tl.load(gate_ptr + at, mask=inside, other=0.0))
    at = row * (value_units * UNIT) + column
    value = widen(tl.load(value_ptr + at, mask=inside, other=0.0))
    opened = apply(FORWARD, gate, a, b, STORED)
    saved = opened if BY_OUTPUT else gate
    grad_gate = differentiate(BACKWARD, grad * value, saved, a, b, STORED)
    kind = grad_gate_ptr.dtype.element_ty
    at = row * (grad_gate_units * UNIT) + column
    tl.store(grad_gate_ptr + at, grad_gate.to(kind), mask=inside)
    at = row * (grad_value_units * UNIT) + column
    tl.store(grad_value_ptr + at, (grad * opened).to(kind), mask=inside)


_launch = Launcher(gated_kernel)
_launch_backward = Launcher(gated_backward_kernel)


def _runs(t: Tensor, model: Tensor) -> tuple[int, int] | None:
    """Length of the longest runs of a tensor, in the order of a dense one's dimensions, and the
    distance between them; None where that differs."""
    dims = sorted(
        (d for d in range(t.dim()) if t.size(d) != 1), key=lambda d: model.stride(d)
    )  # fmt: skip
    n, i = 1, 0
    while i < len(dims) and t.stride(dims[i]) == n:
        n *= t.size(dims[i])
        i += 1
    expected = stride = t.stride(dims[i]) if i < len(dims) else n
    for d in dims[i:]:
        if t.stride(d) != expected or expected < n:
            return None
        expected *= t.size(d)
    return n, stride


def _cut(tensors: list[Tensor], model: Tensor) -> tuple[int, list[int]] | None:
    """The length of the runs that all tensors have, and each tensor's distance between runs."""
    runs = [_runs(t, model) for t in tensors]
    if any(f is None for f in runs):
        return None
    n = min(f[0] for f in runs if f is not None)
    strides = []
    for f in runs:
        assert f is not None
        if f[0] != n and (f[1] != f[0] or f[0] % n):
            return None
        strides.append(f[1] if f[0] == n else n)
    return n, strides


def _in_units(n: int, strides: list[int], rows: int) -> tuple[int, tuple[int, ...]]:
    """The unit of runs and of the distances between them, if there is more than one run; and the
    numbers of units."""
    unit = unit_of(n, *(strides if rows > 1 else ()))
    return unit, (n // unit, *(s // unit for s in strides))


def _check_together(name: str, *tensors: Tensor) -> None:
    check_dtype(name, tensors[0], "value")
    for t in tensors[1:]:
        check_same(name, t, tensors[0], "all tensors", "value")


def gated(gate: Tensor, value: Tensor, activation: int, a: float, b: float) -> Tensor:
    _check_together("gated", value, gate)
    forward, _, _, stored = formula_of(activation, value.dtype)
    y = torch.empty_like(value)
    if not y.numel():
        return y
    cut = _cut([gate, value], y)
    if cut is None:
        gate, value = dense_like(gate, y), dense_like(value, y)
        cut = _cut([gate, value], y)
        assert cut is not None
    n, strides = cut
    rows = y.numel() // n
    unit, units = _in_units(n, strides, rows)
    sides = sides_of(n, rows, BLOCK[y.itemsize])
    _launch(
        (activation, unit, *sides), cdiv(rows, sides[0]) * cdiv(n, sides[1]), (gate, value, y),
        (rows, *units, a, b), (forward, stored, unit, *sides),
    )  # fmt: skip
    return y


def gated_backward(
    grad: Tensor, gate: Tensor, value: Tensor, grad_gate: Tensor, grad_value: Tensor,
    activation: int, a: float, b: float,
) -> None:  # fmt: skip
    _check_together("gated_backward", value, grad, gate, grad_gate, grad_value)
    forward, backward, by_output, stored = formula_of(activation, value.dtype)
    if not value.numel():
        return
    model = torch.empty_like(value)
    grad = dense_like(grad, model)
    outs = [grad_gate, grad_value]
    cut = _cut([gate, value, *outs], model)
    if cut is None:
        gate, value = dense_like(gate, model), dense_like(value, model)
        cut = _cut([gate, value, *outs], model)
    if cut is None:
        outs = [model, torch.empty_like(model)]
        cut = _cut([gate, value, *outs], model)
        assert cut is not None
    n, strides = cut
    rows = value.numel() // n
    unit, units = _in_units(n, strides, rows)
    sides = sides_of(n, rows, BLOCK[value.itemsize])
    _launch_backward(
        (activation, unit, *sides), cdiv(rows, sides[0]) * cdiv(n, sides[1]),
        (grad, gate, value, *outs), (rows, *units, a, b),
        (forward, backward, by_output, stored, unit, *sides),
    )  # fmt: skip
    for target, out in zip((grad_gate, grad_value), outs, strict=True):
        if target is not out:
            target.copy_(out)


def _opened(name: str, gate: Tensor, like: Tensor, activation: int, a: float, b: float) -> Tensor:
    """The activation of a gate of [N, C, 1, ...]: [N, C]."""
    if gate.dim() < 2 or gate.shape[:2] != like.shape[:2] or gate.dim() != like.dim() or (
        gate.numel() != gate.size(0) * gate.size(1)
    ):  # fmt: skip
        raise RuntimeError(f"fusedtrain::{name}: gate must be [samples, channels, 1, ...]")
    formula_of(activation, gate.dtype)  # or an error
    rows = gate.flatten(1)
    if activation < 0:
        return rows
    row = POINTWISE[activation]
    return pointwise.forward(row.name, rows, *(a, b)[: len(row.parameters)])


def gated_spread(gate: Tensor, value: Tensor, activation: int, a: float, b: float) -> Tensor:
    opened = _opened("gated_spread", gate, value, activation, a, b)
    return scale_add(value, opened, None, 1)


def gated_spread_backward(
    grad: Tensor, gate: Tensor, value: Tensor | None, activation: int, a: float, b: float,
    needs_value: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    opened = _opened("gated_spread_backward", gate, grad, activation, a, b)
    grad_value, sums = scale_add_backward(grad, value, opened, 1, needs_value)
    if value is None:
        return sums, grad_value
    grad_gate = sums.to(gate.dtype)
    if activation >= 0:
        row = POINTWISE[activation]
        saved = opened if row.saves == "output" else gate.flatten(1)
        parameters = (a, b)[: len(row.parameters)]
        grad_gate = pointwise.backward(row.name, grad_gate, saved, *parameters)
    return grad_gate.view(gate.shape), grad_value
