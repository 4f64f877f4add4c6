"""The launches of batch norm's ops: checks of arguments, layouts, cuts, variants."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.dtypes import wide_of
from ..reference.pointwise import IDENTITY, POINTWISE
from . import _batch_norm_kernels as kernels
from ._layout import (
    BACKWARD_BLOCK,
    FORWARD_BLOCK,
    Tiles,
    cdiv,
    check_same,
    dense_like,
    index_of,
    is_dense,
    power_of_two,
    steps_of,
    tiles_of,
)
from .formulas import formula_of
from .launch import Launcher, check_dtype

NAME = "batch_norm_act"
_FINISH_BLOCK = 1024

_launch_stats = Launcher(kernels.stats_kernel)
_launch_merge = Launcher(kernels.merge_kernel)
_launch_invert = Launcher(kernels.invert_kernel)
_launch_normalise = Launcher(kernels.normalise_kernel)
_launch_restore = Launcher(kernels.restore_kernel)
_launch_reduce = Launcher(kernels.reduce_kernel)
_launch_finish = Launcher(kernels.finish_kernel)
_launch_apply = Launcher(kernels.apply_kernel)


class _View(NamedTuple):
    """A dense tensor in memory order; row r is of sample r / rows_a_sample."""

    rows: int
    channels: int
    inner: int
    rows_a_sample: int


class _Cut(NamedTuple):
    """The tiles of a tensor, and the shares of a program's tiles."""

    programs: int
    numbers: tuple[int, ...]  # rows, units, channels, inner, rows_a_sample
    tile: tuple[Any, ...]  # the last constants of every kernel of tiles
    steps: int
    shares: int  # of a channel
    stretches: tuple[int, int, int]  # pieces, span, length: see merge_kernel
    merging: tuple[int, int, int]  # programs, and the sides of their blocks


@functools.lru_cache(maxsize=1024)
def _cut(view: _View, block: int, summed: bool) -> _Cut:
    rows, channels, inner, _ = view
    t: Tiles = tiles_of(rows, channels, inner, block)
    down, across = cdiv(t.rows, t.height), cdiv(t.columns, t.width)
    side, span, length = (
        (across, t.width, t.columns) if t.planes else (down, t.height, t.rows)
    )  # fmt: skip
    steps = steps_of(side, down * across) if summed else 1
    pieces = cdiv(side, steps)
    shares = (rows if t.planes else inner) * pieces
    width = 16 if shares <= 16 else 128 if shares <= 512 else _FINISH_BLOCK
    height = _FINISH_BLOCK // width
    return _Cut(
        down * across // side * pieces,
        (t.rows, t.columns // t.unit, channels, inner, view.rows_a_sample),
        (t.planes, inner == 1, t.unit, index_of(t), t.height, t.width),
        steps,
        shares,
        (pieces, span * steps, length),
        (cdiv(channels, height), height, width),
    )


def walkable(t: Tensor, by_sample: bool) -> Tensor:
    """A dense tensor; with `by_sample` its samples follow each other in memory."""
    if t.dim() < 2:
        raise RuntimeError(f"fusedtrain::{NAME}: input must have 2 dimensions")
    if not is_dense(t):
        t = torch.empty_like(t).copy_(t.detach())
    samples, numel = t.size(0), t.numel()
    if by_sample and samples > 1 and numel and t.stride(0) != numel // samples:
        return t.detach().contiguous()
    return t


def _view_of(t: Tensor, by_sample: bool) -> _View:
    samples, channels, numel = t.size(0), t.size(1), t.numel()
    if numel == 0:
        return _View(0, channels, 1, 1)
    if channels > 1:
        inner = t.stride(1)
    else:  # one channel: only samples matter
        inner = numel // samples if by_sample else numel
    rows = numel // (channels * inner)
    return _View(rows, channels, inner, rows // samples if by_sample else 1)


class Call:
    """A call on tensors with the layout of the dense tensor `x`."""

    def __init__(
        self, model: Tensor, branch_scale: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, activation: int, a: float, b: float,
    ) -> None:  # fmt: skip
        check_dtype(NAME, model, "input")
        if not IDENTITY <= activation < len(POINTWISE):
            raise RuntimeError(f"fusedtrain::{NAME}: no such activation")
        by_sample = branch_scale is not None
        self.x = x = walkable(model, by_sample)
        self._model = model
        self.view = _view_of(x, by_sample)
        self.channels = x.size(1)
        self.empty = x.numel() == 0
        self.count = 0 if self.empty else x.numel() // self.channels
        self.wide = wide_of(x)
        self.op, self.parameters = activation, (a, b)
        self.affine = (
            self.vector(branch_scale, x.size(0), "branch_scale"),
            self.vector(weight, self.channels, "weight"),
            self.vector(bias, self.channels, "bias"),
        )
        self.flags = tuple(t is not None for t in self.affine)

    def laid_out(self, t: Tensor | None) -> Tensor:
        """A result in the layout of the model, if `x` is a copy with another layout; without
        elements where it was not requested."""
        if t is None:
            return self.x.new_empty(0)
        wanted = torch.empty_like(self._model)
        return t if t.stride() == wanted.stride() else wanted.copy_(t)

    def vector(self, t: Tensor | None, size: int, what: str) -> Tensor | None:
        if t is None:
            return None
        if t.dim() != 1 or t.numel() != size:
            raise RuntimeError(f"fusedtrain::{NAME}: {what} must have {size} elements")
        if t.dtype is not self.wide:
            raise RuntimeError(
                f"fusedtrain::{NAME}: {what} must be float32 (float64 for a float64 input)"
            )
        if t.device != self.x.device:
            raise RuntimeError(f"fusedtrain::{NAME}: {what} must be on the device of the input")
        return t.contiguous()

    def companion(self, t: Tensor | None, what: str) -> Tensor | None:
        """Another tensor of the input's shape, in its layout."""
        if t is None:
            return None
        check_same(NAME, t, self.x, what, "input")
        return dense_like(t, self.x)

    def use(self, mean: Tensor, invstd: Tensor) -> None:
        self.mean = self.required(mean, "mean")
        self.invstd = self.required(invstd, "invstd")

    def required(self, t: Tensor, what: str) -> Tensor:
        checked = self.vector(t, self.channels, what)
        assert checked is not None
        return checked

    def new_vectors(self) -> tuple[Tensor, Tensor]:
        mean = self.x.new_empty(self.channels, dtype=self.wide)
        return mean, torch.empty_like(mean)

    def vectors(self) -> tuple[Tensor, ...]:
        """The vectors for kernels; `mean` replaces absent ones."""
        return (*(self.mean if t is None else t for t in self.affine), self.mean, self.invstd)

    # --- forward

    def look(
        self, running_mean: Tensor | None, running_var: Tensor | None, training: bool,
        momentum: float, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Computes mean and invstd, and updates the running statistics."""
        running = None
        if running_mean is not None and running_var is not None:
            if training and not (running_mean.is_contiguous() and running_var.is_contiguous()):
                raise RuntimeError(f"fusedtrain::{NAME}: running statistics must be contiguous")
            mean = self.required(running_mean, "running_mean")
            running = (mean, self.required(running_var, "running_var"))
        elif not training or running_mean is not running_var:
            raise RuntimeError(f"fusedtrain::{NAME}: running_mean and running_var")
        mean, invstd = self.mean, self.invstd = self.new_vectors()
        if self.empty:
            return mean.zero_(), invstd.zero_()
        if training:
            if running is not None and self.count < 2:
                raise RuntimeError(f"fusedtrain::{NAME}: one value a channel has no variance")
            self.statistics(mean, invstd, running, momentum, eps, invert=True)
        else:
            assert running is not None
            self.invert(running, eps)
        return mean, invstd

    def statistics(
        self, mean: Tensor, variance: Tensor, running: tuple[Tensor, Tensor] | None,
        momentum: float, eps: float, *, invert: bool,
    ) -> None:  # fmt: skip
        """Writes `mean` and `variance`; with `invert` invstd in place of the variance."""
        x = self.x
        cut = _cut(self.view, BACKWARD_BLOCK[x.itemsize], True)
        shares = x.new_empty(2 * self.channels * cut.shares, dtype=torch.float64)
        constants = (cut.steps, *cut.tile)
        _launch_stats(constants, cut.programs, (x, shares), cut.numbers[:3], constants)
        programs, *sides = cut.merging
        constants = (invert, running is not None, *sides)
        tensors = (mean, variance, *(running or (mean, mean)), shares)
        numbers = (self.channels, cut.shares, *cut.stretches, self.count, momentum, eps)
        _launch_merge(constants, programs, tensors, numbers, constants)

    def invert(self, running: tuple[Tensor, Tensor], eps: float) -> None:
        """Writes `self.mean` and `self.invstd`."""
        tensors = (self.mean, self.invstd, *running)
        block = min(_FINISH_BLOCK, power_of_two(self.channels))
        programs = cdiv(self.channels, block)
        _launch_invert(block, programs, tensors, (self.channels, eps), (block,))

    def normalise(self, residual: Tensor | None, y: Tensor) -> Tensor:
        """Writes y, which may be x."""
        x = self.x
        if self.empty:
            return y
        cut = _cut(self.view, FORWARD_BLOCK[x.itemsize], False)
        formula = formula_of(self.op, x.dtype)
        rest = (residual is not None, *self.flags, *cut.tile)
        _launch_normalise(
            (self.op, *rest),
            cut.programs,
            (x, x if residual is None else residual, y, *self.vectors()),
            (*cut.numbers, *self.parameters),
            (formula.forward, formula.stored, *rest),
        )
        return y

    def restore(self, slope: float) -> Tensor:
        """Recomputes the input that this output has overwritten."""
        x = torch.empty_like(self.x)
        if self.empty:
            return x
        cut = _cut(self.view, FORWARD_BLOCK[x.itemsize], False)
        rest = (*self.flags[1:], *cut.tile)
        rows, units, channels, inner, _ = cut.numbers
        _launch_restore(
            rest,
            cut.programs,
            (self.x, x, *self.vectors()[1:]),
            (rows, units, channels, inner, 1.0 / slope, torch.finfo(x.dtype).max),
            rest,
        )
        return x


class BackwardCall(Call):
    """A backward call; without an input the layout is the saved tensor's."""

    def __init__(
        self, grad: Tensor, input: Tensor | None, saved: Tensor | None, *arguments: Any
    ) -> None:
        branch_scale, weight, bias, mean, invstd, activation, a, b = arguments
        model = next(t for t in (input, saved, grad) if t is not None)
        super().__init__(model, branch_scale, weight, bias, activation, a, b)
        self.use(mean, invstd)
        identity = activation == IDENTITY
        by_output = not identity and POINTWISE[activation].saves == "output"
        if input is None and not identity and not (by_output and saved is not None):
            raise RuntimeError(f"fusedtrain::{NAME}_backward: this activation needs the input")
        companion = None if identity else self.companion(saved, "saved")
        grad_like = self.companion(grad, "grad")
        assert grad_like is not None
        self.grad = grad_like
        self.saved = self.x if companion is None else companion
        self.kind = (
            kernels.SAVED_NOTHING if companion is None
            else kernels.SAVED_OUTPUT if by_output
            else kernels.SAVED_RESIDUAL
        ).value  # fmt: skip

    def _constants(self) -> tuple[Any, ...]:
        formula = formula_of(self.op, self.x.dtype)
        again = formula.forward if formula.saves_output else None
        return again, formula.backward, formula.stored, self.kind, *self.flags

    def reduce(
        self, grad_residual: Tensor | None, affine: tuple[Tensor, Tensor] | None, count: int
    ) -> Tensor:
        """The sums, divided by `count`; writes `affine`, the gradients of weight and bias."""
        x = self.x
        sums = x.new_empty((2, self.channels), dtype=torch.float64)
        if self.empty:
            for t in (sums, *(affine or ())):
                t.zero_()
            return sums
        cut = _cut(self.view, BACKWARD_BLOCK[x.itemsize], True)
        shares = x.new_empty(2 * self.channels * cut.shares, dtype=self.wide)
        rest = (grad_residual is not None, cut.steps, *cut.tile)
        written = x if grad_residual is None else grad_residual
        _launch_reduce(
            (self.op, self.kind, *self.flags, *rest),
            cut.programs,
            (self.grad, x, self.saved, written, *self.vectors(), shares),
            (*cut.numbers, *self.parameters),
            (*self._constants(), *rest),
        )
        programs, *sides = cut.merging
        constants = (affine is not None, *sides)
        _launch_finish(
            # The variant needs the dtype: `sums` is always float64.
            (self.wide, *constants),
            programs,
            (sums, *(affine or (shares, shares)), shares),
            (self.channels, cut.shares, count),
            constants,
        )
        return sums

    def apply(
        self, grad_input: Tensor | None, grad_residual: Tensor | None, averages: Tensor | None
    ) -> None:
        if self.empty:
            return
        x = self.x
        cut = _cut(self.view, BACKWARD_BLOCK[x.itemsize], False)
        wanted = (grad_residual is not None, grad_input is not None, averages is not None)
        rest = (*wanted, *cut.tile)
        outputs = (x if t is None else t for t in (grad_input, grad_residual))
        # The replacement of averages has the dtype of the other vectors, and is not read.
        last = self.mean if averages is None else averages
        _launch_apply(
            (self.op, self.kind, *self.flags, *rest),
            cut.programs,
            (self.grad, x, self.saved, *outputs, *self.vectors(), last),
            (*cut.numbers, *self.parameters),
            (*self._constants(), *rest),
        )
