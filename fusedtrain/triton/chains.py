"""Pointwise chains: gated, scale_add and bias_act."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _chain_kernels as kernels
from ._layout import cdiv, check_same, dense_like, is_dense, power_of_two, unit_of
from .formulas import formula_of
from .launch import Launcher, check_dtype

# Elements of a tile: 16 bytes of a tensor or twice that in each of 128 threads. So 2,048 threads of
# an sm_90 multiprocessor have 32 KB of one tensor under way or more, where they all fit: up to 32
# registers (computed from ptxas, not measured).
_BLOCK = {8: 512, 4: 1024, 2: 1024}
_BIAS_BLOCK = {8: 256, 4: 512, 2: 1024}  # of bias_act, which draws words besides

_launch_gated = Launcher(kernels.gated_kernel)
_launch_gated_backward = Launcher(kernels.gated_backward_kernel)
_launch_scale = Launcher(kernels.scale_kernel)
_launch_scale_backward = Launcher(kernels.scale_backward_kernel)
_launch_bias_act = Launcher(kernels.bias_act_kernel)
_launch_bias_act_backward = Launcher(kernels.bias_act_backward_kernel)


def _sides(columns: int, rows: int, block: int) -> tuple[int, int]:
    """Height and width of a tile."""
    width = min(block, max(4, power_of_two(columns)))
    return min(block // width, power_of_two(max(rows, 1))), width


# --- gated products


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
    """The length of runs that all of them have, and the distances between these."""
    found = [_runs(t, model) for t in tensors]
    if any(f is None for f in found):
        return None
    n = min(f[0] for f in found if f is not None)
    strides = []
    for f in found:
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
    sides = _sides(n, rows, _BLOCK[y.itemsize])
    _launch_gated(
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
    sides = _sides(n, rows, _BLOCK[value.itemsize])
    _launch_gated_backward(
        (activation, unit, *sides), cdiv(rows, sides[0]) * cdiv(n, sides[1]),
        (grad, gate, value, *outs), (rows, *units, a, b),
        (forward, backward, by_output, stored, unit, *sides),
    )  # fmt: skip
    for given, out in zip((grad_gate, grad_value), outs, strict=True):
        if given is not out:
            given.copy_(out)


# --- tensors with channels


class _Shape(NamedTuple):
    """A dense tensor as a matrix, and how it is cut."""

    samples: int
    rows: int  # of a sample
    channels: int
    inner: int
    planes: bool
    height: int
    width: int

    @property
    def matrix(self) -> tuple[int, int]:
        if self.planes:
            return self.samples * self.rows * self.channels, self.inner
        return self.samples * self.rows, self.channels * self.inner

    @property
    def unit(self) -> int:
        return unit_of(self.matrix[1])

    @property
    def numbers(self) -> tuple[int, ...]:
        rows, columns = self.matrix
        return (rows, columns // self.unit, self.channels, self.inner, self.rows)

    @property
    def constants(self) -> tuple[Any, ...]:
        return (
            self.unit,
            self.planes,
            self.inner == 1 and not self.planes,
            self.height,
            self.width,
        )

    @property
    def tiles(self) -> tuple[int, int]:
        """Down and across."""
        rows, columns = self.matrix
        if self.planes:
            return cdiv(rows, self.height), cdiv(columns, self.width)
        return self.samples * cdiv(self.rows, self.height), cdiv(columns, self.width)

    @property
    def programs(self) -> int:
        down, across = self.tiles
        return down * across

    def new_shares(self, model: Tensor) -> Tensor:
        down, across = self.tiles
        rows, columns = self.matrix
        count = rows * across if self.planes else down * columns
        wide = torch.float64 if model.dtype is torch.float64 else torch.float32
        return model.new_empty(count, dtype=wide)

    def sums(self, shares: Tensor) -> Tensor:
        """Of each sample and channel; few numbers, which torch adds up in a fixed order."""
        if self.planes:
            parts = shares.view(self.samples, self.rows, self.channels, -1)
        else:
            parts = shares.view(self.samples, -1, self.channels, self.inner)
        return parts.double().sum((1, 3)).to(shares.dtype)


def _shape_of(
    name: str, t: Tensor, dim: int, samples: int, blocks: dict[int, int] = _BLOCK
) -> tuple[Tensor, _Shape]:
    """The tensor in a layout whose channels can be walked, and that."""
    if not -1 <= dim < max(t.dim(), 0):
        raise RuntimeError(f"fusedtrain::{name}: dim is not a dimension of input")
    if samples != 1 and (dim == 0 or t.dim() == 0 or samples != t.size(0)):
        raise RuntimeError(
            f"fusedtrain::{name}: there must be one sample, or as many as in dimension 0"
        )
    if not is_dense(t):
        t = torch.empty_like(t).copy_(t.detach())
    numel = t.numel()
    if samples > 1 and numel and t.stride(0) * t.size(0) != numel:
        t = t.detach().contiguous()
    channels = 1 if dim < 0 else t.size(dim)
    if numel == 0:
        return t, _Shape(samples, 0, channels, 1, True, 1, 4)
    inner = numel // samples if channels == 1 else t.stride(dim)
    rows = numel // (samples * channels * inner)
    planes = inner >= 64 or channels == 1
    columns = inner if planes else channels * inner
    height, width = _sides(
        columns, samples * rows * (channels if planes else 1), blocks[t.itemsize]
    )
    if not planes:
        height = min(height, power_of_two(rows))
    return t, _Shape(samples, rows, channels, inner, planes, height, width)


def _as_promised(result: Tensor, input: Tensor) -> Tensor:
    """With the strides that the op promises."""
    promised = torch.empty_like(input)
    return result if result.stride() == promised.stride() else promised.copy_(result)


def _check_scale(name: str, scale: Tensor, input: Tensor, dim: int) -> None:
    channels = 1 if not 0 <= dim < input.dim() else input.size(dim)
    if scale.dim() != 2 or scale.size(1) != channels:
        raise RuntimeError(f"fusedtrain::{name}: scale must be [samples, {channels}]")
    if scale.dtype != input.dtype or scale.device != input.device:
        raise RuntimeError(f"fusedtrain::{name}: scale must have the dtype and device of input")


def scale_add(input: Tensor, scale: Tensor, residual: Tensor | None, dim: int) -> Tensor:
    check_dtype("scale_add", input, "input")
    _check_scale("scale_add", scale, input, dim)
    if residual is not None:
        check_same("scale_add", residual, input, "residual", "input")
    x, shape = _shape_of("scale_add", input, dim, scale.size(0))
    y = torch.empty_like(x)
    if x.numel():
        added = x if residual is None else dense_like(residual, x)
        constants = (residual is not None, *shape.constants)
        tensors = (x, scale.contiguous(), added, y)
        _launch_scale(constants, shape.programs, tensors, shape.numbers, constants)
    return _as_promised(y, input)


def scale_add_backward(
    grad: Tensor, input: Tensor | None, scale: Tensor, dim: int, needs_input: bool
) -> tuple[Tensor, Tensor]:
    name = "scale_add_backward"
    check_dtype(name, grad, "grad")
    model = grad if input is None else input
    check_same(name, grad, model, "grad", "input")
    _check_scale(name, scale, grad, dim)
    x, shape = _shape_of(name, model, dim, scale.size(0))
    sums = input is not None
    grad_input = torch.empty_like(x) if needs_input else grad.new_empty(0)
    wide = torch.float64 if grad.dtype is torch.float64 else torch.float32
    if not x.numel():
        size = scale.shape if sums else (0,)
        found = grad_input if not needs_input else _as_promised(grad_input, model)
        return found, grad.new_zeros(size, dtype=wide)
    shares = shape.new_shares(x) if sums else grad.new_empty(0, dtype=wide)
    constants = (needs_input, sums, *shape.constants)
    tensors = (dense_like(grad, x), x, scale.contiguous(), grad_input, shares)
    _launch_scale_backward(constants, shape.programs, tensors, shape.numbers, constants)
    return (
        _as_promised(grad_input, model) if needs_input else grad_input,
        shape.sums(shares) if sums else shares,
    )


class _BiasCall:
    """What forward and backward of bias_act have in common."""

    def __init__(
        self, name: str, input: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
        sums: bool, activation: int, a: float, b: float, gain: float, clamp: float, p: float,
    ) -> None:  # fmt: skip
        check_dtype(name, input, "input")
        formula = formula_of(activation, input.dtype)
        self.forward, self.backward, self.by_output, self.stored = formula
        if not 0 <= p < 1:
            raise RuntimeError(f"fusedtrain::{name}: p must be from 0 to below 1")
        if bias is not None and not (
            0 <= dim < input.dim()
            and bias.dim() == 1
            and bias.numel() == input.size(dim)
            and bias.dtype == input.dtype
            and bias.device == input.device
        ):
            raise RuntimeError(
                f"fusedtrain::{name}: bias must have one element for each channel, of the dtype "
                "and on the device of input"
            )
        self.drops = seed is not None and p > 0
        if seed is not None and (seed.dtype is not torch.int64 or seed.numel() != 2):
            raise RuntimeError(f"fusedtrain::{name}: seed must be two int64 numbers")
        channel = dim if bias is not None or sums else -1
        self.x, self.shape = _shape_of(name, input, channel, 1, _BIAS_BLOCK)
        self.bias = self.x if bias is None else bias.contiguous()
        self.seed = self.x if seed is None else seed.contiguous()
        keep = 1 / (1 - p) if self.drops else 1.0
        self.numbers = (*self.shape.numbers, int(p * 2**32), a, b, gain, clamp, keep)
        aligned = self.shape.matrix[1] % 4 == 0
        self.flags = (bias is not None, clamp >= 0, self.drops)
        self.tail = (aligned, *self.shape.constants)
        self.variant = (activation, *self.flags, sums, *self.tail)


def bias_act(
    input: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float,
) -> Tensor:  # fmt: skip
    call = _BiasCall(
        "bias_act", input, bias, seed, dim, False, activation, a, b, gain, clamp, p
    )  # fmt: skip
    y = torch.empty_like(call.x)
    if y.numel():
        constants = (call.forward, call.stored, *call.flags, *call.tail)
        tensors = (call.x, call.bias, call.seed, y)
        _launch_bias_act(call.variant, call.shape.programs, tensors, call.numbers, constants)
    return y


def bias_act_backward(
    grad: Tensor, saved: Tensor, bias: Tensor | None, seed: Tensor | None, dim: int,
    activation: int, a: float, b: float, gain: float, clamp: float, p: float, needs_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    name = "bias_act_backward"
    check_same(name, grad, saved, "grad", "saved")
    call = _BiasCall(name, saved, bias, seed, dim, needs_bias, activation, a, b, gain, clamp, p)
    grad_input = torch.empty_like(call.x)
    wide = torch.float64 if saved.dtype is torch.float64 else torch.float32
    if not call.x.numel():
        return grad_input, grad.new_zeros((1, call.shape.channels) if needs_bias else 0, dtype=wide)
    shares = call.shape.new_shares(call.x) if needs_bias else grad.new_empty(0, dtype=wide)
    constants = (
        call.forward, call.backward, call.by_output, call.stored, *call.flags, needs_bias,
        *call.tail,
    )  # fmt: skip
    tensors = (dense_like(grad, call.x), call.x, call.bias, call.seed, grad_input, shares)
    _launch_bias_act_backward(call.variant, call.shape.programs, tensors, call.numbers, constants)
    return grad_input, call.shape.sums(shares) if needs_bias else shares
