"""Helpers of the batch norm tests: calls with ugly tensors, and the truth of them.

The truth is eager torch's autograd in float64. Where a derivative jumps, two right answers differ
by all of it: the gradient that a case is given is 0 there, and the output is not compared where the
function itself jumps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from fusedtrain.reference import FAMILIES
from fusedtrain.reference.pointwise import POINTWISE, Pointwise
from helpers.backends import BACKENDS, Kernels, placed, same_bits

FORMULAS: dict[str, Pointwise] = {"identity": Pointwise()} | {
    row.name: Pointwise(i, *row.example) for i, row in enumerate(POINTWISE)
}
# torch's own float64 kernels of these have 1/6 rounded to float32.
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda s: s,
    "hardsigmoid": lambda s: (s / 6 + 0.5).clamp(0, 1),
    "hardswish": lambda s: s * (s / 6 + 0.5).clamp(0, 1),
}
for _row in POINTWISE:
    EXACT.setdefault(_row.name, _row.eager)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and parameters."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def last(*shape: int) -> Tensor:
    """Channels last, of any rank."""
    order = [0, *range(2, len(shape)), 1]
    back = [0, len(shape) - 1, *range(1, len(shape) - 1)]
    return torch.randn([shape[d] for d in order]).permute(back)


# Every ugly kind: odd numbers of channels, samples and elements a plane; strides of all sorts.
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "2-d": lambda: torch.randn(7, 5),
    "2-d, one channel": lambda: torch.randn(7, 1),
    "2-d, 1100 channels": lambda: torch.randn(7, 1100),
    "2-d transposed": lambda: torch.randn(257, 7).t(),
    "one sample": lambda: torch.randn(1, 3, 49),
    "3-d, planes of 2": lambda: torch.randn(7, 5, 2),
    "3-d, planes of 7": lambda: torch.randn(2, 64, 7),
    "3-d, planes of 1025": lambda: torch.randn(2, 3, 1025),
    "3-d, 1025 last": lambda: last(2, 3, 1025),
    "3-d, planes of 70000": lambda: torch.randn(1, 3, 70000),
    "3-d, 70000 last": lambda: last(1, 2, 70000),
    "contiguous": lambda: torch.randn(2, 5, 4, 3),
    "channels_last": lambda: last(2, 5, 4, 3),
    "planes of 49": lambda: torch.randn(7, 64, 7, 7),
    # The CPU takes small planes as columns of a sample, in several tasks where there are many
    # samples; of few samples only the smallest planes.
    "2400 columns": lambda: torch.randn(33, 600, 2, 2),
    "two samples of planes of 49": lambda: torch.randn(2, 64, 7, 7),
    "one sample of planes of 30": lambda: torch.randn(1, 40, 5, 6),
    "one sample of planes of 4": lambda: torch.randn(1, 300, 2, 2),
    "64 last": lambda: last(7, 64, 7, 7),
    "257 channels": lambda: torch.randn(2, 257, 3, 3),
    "257 last": lambda: last(2, 257, 3, 3),
    "1100 last": lambda: last(3, 1100, 2, 1),
    # The CPU's runs of rows: 4 and a half of 112, one of 512, pieces of 513.
    "112 last": lambda: last(3, 112, 7, 1),
    "512 last": lambda: last(3, 512, 3, 1),
    "513 last": lambda: last(3, 513, 7, 1),
    "5-d": lambda: torch.randn(2, 3, 2, 4, 5),
    "channels_last_3d": lambda: last(2, 3, 2, 4, 5),
    "permuted": lambda: torch.randn(3, 4, 5, 6).permute(2, 0, 3, 1),
    "channels outermost": lambda: torch.randn(5, 4, 6).permute(1, 0, 2),
    "samples innermost": lambda: torch.randn(6, 5, 4).permute(2, 1, 0),
    "channels between": lambda: torch.randn(2, 4, 3, 5).transpose(1, 2),
    # The stride of a sample is its size, and yet channels are outermost.
    "samples within channels": lambda: torch.randn(216).as_strided((2, 3, 4), (12, 100, 1)),
    "sliced samples": lambda: torch.randn(8, 3, 5)[::2],
    "sliced": lambda: torch.randn(5, 9, 14)[1:4, 2:7, 1:12:2],
    "expanded over samples": lambda: torch.randn(1, 5, 6).expand(3, 5, 6),
    "expanded over channels": lambda: torch.randn(4, 1, 6).expand(4, 3, 6),
    "offset": lambda: torch.randn(1 + 2 * 3 * 17)[1:].view(2, 3, 17),
    "offset, whole vectors": lambda: torch.randn(3 + 2 * 3 * 64)[3:].view(2, 3, 64),
    "planes of 1": lambda: torch.randn(4, 6, 1, 1),
    "one sample, size-1 dims": lambda: torch.randn(1, 6, 1, 4),
    "one channel": lambda: torch.randn(3, 1, 4, 5),
    "one channel, transposed": lambda: torch.randn(5, 1, 4).permute(2, 1, 0),
}


@dataclass
class Truth:
    output: Tensor
    mean: Tensor
    invstd: Tensor
    running: list[Tensor]
    gradients: list[Tensor | None]  # of input, residual, weight, bias
    before: Tensor  # what the activation is applied to
    slope: Tensor  # its derivative
    jumps: Tensor  # where the output may be either of two


class Case:
    """A call: values of both signs in the range where activations bend, weights of both signs and
    zero, running statistics that are no one's."""

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype = torch.float32,
        activation: str = "relu",
        *,
        weight: bool = True,
        bias: bool = True,
        residual: bool = False,
        branch: bool = False,
        training: bool = True,
        momentum: float = 0.3,
        eps: float = 1e-3,
        ops: Kernels | None = None,
    ) -> None:
        wide, channels = wide_dtype(dtype), x.size(1)
        device = "cpu" if ops is None else ops.device
        self.digits = Kernels.digits if ops is None else ops.digits
        self.gradient_digits = Kernels.gradient_digits if ops is None else ops.gradient_digits
        self.name, self.formula = activation, FORMULAS[activation]
        self.dtype, self.training, self.momentum, self.eps = dtype, training, momentum, eps
        # Means apart: of a layout with strides of 0, or gaps, as it lies.
        x = _cast(x, dtype)
        if _dense(x):
            x += (torch.arange(channels) % 5 - 1.0).view(-1, *[1] * (x.dim() - 2))
        self.x = placed(x, device)

        def vector(values: Tensor) -> Tensor:
            return values.to(wide).to(device)

        self.weight = self.bias = self.residual = self.branch = None
        if weight:
            self.weight = vector(torch.randn(channels) * 1.5)
            self.weight[min(1, channels - 1)] = 0 if channels > 1 else -1.5
        if bias:
            self.bias = vector(torch.randn(channels))
        if residual:
            self.residual = self.like(torch.randn(x.shape) * 2)
        if branch:
            self.branch = vector(torch.arange(x.size(0)) % 3 * 0.75)
        self.running_mean = vector(torch.randn(channels))
        self.running_var = vector(torch.rand(channels) + 0.5)
        # Parts that the statistics' own gradients cancel, so that leaving one out shows.
        wide_x = self.x.double().cpu()
        mean, var = _statistics(wide_x)
        normalised = (wide_x - self.per_channel(mean)) * self.per_channel((var + eps).rsqrt())
        grad = torch.randn(x.shape) + 0.7 + 0.4 * normalised
        self.grad = self.like(grad)
        self.grad = self.like(torch.where(self._near_a_kink(), 0.0, grad))

    def like(self, values: Tensor) -> Tensor:
        """The values as a dense tensor in the layout of the input."""
        return torch.empty_like(self.x).copy_(values)

    # --- calls ---

    def forward(self) -> tuple[Any, ...]:
        """Arguments of batch_norm_act; running statistics are copies."""
        return (
            self.x, self.residual, self.branch, self.weight, self.bias, self.running_mean.clone(),
            self.running_var.clone(), self.training, self.momentum, self.eps, *self.formula,
        )  # fmt: skip

    def saved(self, output: Tensor) -> Tensor | None:
        if self.formula.op < 0 or self.residual is None:
            return None
        return output if self.formula.saves_output else self.residual

    def shared(self, mean: Tensor, invstd: Tensor) -> tuple[Any, ...]:
        return self.branch, self.weight, self.bias, mean, invstd

    def backward(
        self, output: Tensor, mean: Tensor, invstd: Tensor, *needs: bool, grad: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Arguments of batch_norm_act_backward."""
        return (
            self.grad if grad is None else grad, self.x, self.saved(output),
            *self.shared(mean, invstd), self.training, *self.formula, *(needs or (True,) * 3),
        )  # fmt: skip

    # --- the truth ---

    def _wide(self) -> dict[str, Tensor | None]:
        named = ("x", "residual", "branch", "weight", "bias", "running_mean", "running_var")
        values = {name: getattr(self, name) for name in named}
        return {
            k: None if t is None else t.detach().double().cpu().clone() for k, t in values.items()
        }

    def _sum(self, t: dict[str, Any]) -> Tensor:
        z = torch_functional.batch_norm(
            t["x"], t["running_mean"], t["running_var"], t["weight"], t["bias"], self.training,
            self.momentum, self.eps,
        )  # fmt: skip
        if t["branch"] is not None:
            z = z * t["branch"].view(-1, *[1] * (z.dim() - 1))
        return z if t["residual"] is None else z + t["residual"]

    def _uncertainty(self, s: Tensor) -> Tensor:
        """Largest error of the argument of the activation."""
        eps = torch.finfo(wide_dtype(self.dtype)).eps
        size = s.abs() + 1
        if self.residual is not None:
            size = size + 2 * self.residual.double().cpu().abs()
        rounding = torch.finfo(self.dtype).eps if self.dtype.itemsize == 2 else 0.0
        ratio = 1 + (self.x.double().abs().mean() / (self.x.double().std() + 1e-30)).item()
        return 16 * eps * ratio * size + rounding * s.abs()

    def _slope(self, s: Tensor) -> Tensor:
        s = s.detach().requires_grad_()
        return torch.autograd.grad(EXACT[self.name](s).sum(), s)[0]

    def _near_a_kink(self) -> Tensor:
        s = self._sum(self._wide())
        d = self._uncertainty(s)
        low, high = s - d, s + d
        # No second derivative is above 2.
        jump = (self._slope(high) - self._slope(low)).abs() > 5 * d + 1e-6
        return jump | self._jumps(s, d)

    def _jumps(self, s: Tensor, d: Tensor) -> Tensor:
        f = EXACT[self.name]
        return (f(s + d) - f(s - d)).abs() > 8 * d * (1 + s.abs()) + 1e-6

    def truth(self, grad: Tensor | None = None) -> Truth:
        t = self._wide()
        names = ("x", "residual", "weight", "bias")
        for name in names:
            if t[name] is not None:
                t[name].requires_grad_()
        s = self._sum(t)
        y = EXACT[self.name](s)
        leaves = [t[name] for name in names if t[name] is not None]
        wide_grad = (self.grad if grad is None else grad).double().cpu()
        grads = iter(torch.autograd.grad(y, leaves, wide_grad))
        gradients = [None if t[name] is None else next(grads) for name in names]
        s = s.detach()
        x = self.x.double().cpu()
        running = [self.running_mean.double().cpu(), self.running_var.double().cpu()]
        mean, var = running
        if self.training:
            mean, var = _statistics(x)
            count = x.numel() / x.size(1)
            moved = [mean, var * (count / (count - 1))]
            running = [old + self.momentum * (new - old) for old, new in zip(running, moved)]
        return Truth(
            y.detach(), mean, (var + self.eps).rsqrt(), running, gradients, s, self._slope(s),
            self._jumps(s, self._uncertainty(s)),
        )  # fmt: skip

    # --- the comparison ---

    def per_channel(self, t: Tensor) -> Tensor:
        return t.view(-1, *[1] * (self.x.dim() - 2))

    def check_forward(self, outputs: tuple[Tensor, Tensor, Tensor], truth: Truth) -> None:
        """The output is right to its last digits. Errors of the argument count times the slope."""
        output, mean, invstd = (t.cpu().double() for t in outputs)
        eps, eps_wide = torch.finfo(self.dtype).eps, torch.finfo(wide_dtype(self.dtype)).eps
        size = 1 + truth.before.abs()
        if self.residual is not None:
            size = size + self.residual.double().cpu().abs()
        ratio = self.per_channel(truth.mean.abs() * truth.invstd)
        scale = 1.0 if self.weight is None else self.per_channel(self.weight.double().cpu().abs())
        argument = eps_wide * (8 * size + 4 * scale * ratio) * truth.slope.abs().clamp_min(1)
        units = 1.0 if self.dtype.itemsize == 2 else 8.0
        rounding = units * eps * truth.output.abs().clamp_min(1)
        if self.dtype is torch.float64:
            rounding = rounding * 8  # eager torch is as far off
        wrong = ((output - truth.output).abs() > rounding + argument) & ~truth.jumps
        wrong |= output.isnan() & ~truth.output.isnan()
        assert not wrong.any(), _worst("output", output, truth.output, wrong)
        self.check_statistics(mean, invstd, truth)

    def check_statistics(self, mean: Tensor, invstd: Tensor, truth: Truth) -> None:
        eps = torch.finfo(wide_dtype(self.dtype)).eps
        deviation = 1 / truth.invstd
        close("mean", mean, truth.mean, eps * (truth.mean.abs() + 4 * deviation))
        # The variance is a difference of sums.
        lost = 2**-50 * (truth.mean * truth.invstd) ** 2 if eps > 1e-10 else 64 * eps
        close("invstd", invstd, truth.invstd, truth.invstd * (self.digits * eps + lost))

    def check_running(self, running_mean: Tensor, running_var: Tensor, truth: Truth) -> None:
        eps = torch.finfo(wide_dtype(self.dtype)).eps
        for name, result, before, want in (
            ("running_mean", running_mean, self.running_mean, truth.running[0]),
            ("running_var", running_var, self.running_var, truth.running[1]),
        ):
            before = before.double().cpu()
            digits = (self.digits if eps > 1e-10 else 16) * eps
            size = want.abs() + before.abs() + truth.mean.abs() + self.momentum / truth.invstd
            close(name, result, want, digits * size)

    def check_backward(self, results: tuple[Tensor, ...], truth: Truth, slack: float = 1.0) -> None:
        """Gradients are right to the last digits of the terms of their sums."""
        eps, eps_wide = torch.finfo(self.dtype).eps, torch.finfo(wide_dtype(self.dtype)).eps
        narrow = self.dtype.itemsize == 2
        grad_input, grad_residual, grad_weight, grad_bias = (t.cpu().double() for t in results)
        want_x, want_r, want_w, want_b = truth.gradients
        g = self.grad.double().cpu()
        factor = 1.0
        if self.branch is not None:
            factor = self.branch.double().cpu().view(-1, *[1] * (g.dim() - 1))
        # The derivative comes from a rounded output.
        rounded = eps if narrow and self.saved(self.x) is self.x else 0.0
        size = g.abs() * (truth.slope.abs() + 0.5)
        digits = {2: 2.0, 4: self.gradient_digits, 8: 128.0}[self.dtype.itemsize] * eps * slack
        dims = [d for d in range(g.dim()) if d != 1]
        if self.residual is not None and grad_residual.numel():
            # Below the normal numbers rounding does not become finer.
            coarse = torch.finfo(self.dtype).smallest_normal * eps / 2
            close("grad_residual", grad_residual, want_r, (digits + 2 * rounded) * size + coarse)
        x = self.x.double().cpu()
        d = size * factor
        normalised = (x - self.per_channel(truth.mean)) * self.per_channel(truth.invstd)
        ratio = self.per_channel(truth.mean.abs() * truth.invstd)
        of_sums = (4 * eps_wide * (1 + ratio.flatten()) + 2 * rounded) * slack
        if grad_weight.numel():
            if want_w is not None:
                terms = (d * (normalised.abs() + 1)).sum(dims)
                close("grad_weight", grad_weight, want_w, of_sums * terms)
            if want_b is not None:
                close("grad_bias", grad_bias, want_b, of_sums * d.sum(dims))
        if grad_input.numel():
            scale = (
                truth.invstd if self.weight is None else truth.invstd * self.weight.double().cpu()
            )
            most = d.abs().amax(dims) * scale.abs()
            limit = (digits + 8 * eps_wide * ratio + 2 * rounded) * self.per_channel(most)
            close("grad_input", grad_input, want_x, limit + eps * want_x.abs())


def forward(ops: Kernels, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    return ops("batch_norm_act", *case.forward())


def check(ops: Kernels, case: Case, grad: Tensor | None = None) -> None:
    """Forward and backward with all outputs. Only the running statistics are written to."""
    inputs = [t for t in (case.x, case.residual, case.grad) if t is not None]
    kept = [t.clone() for t in inputs]
    truth = case.truth()
    arguments = case.forward()
    outputs = ops("batch_norm_act", *arguments)
    case.check_forward(outputs, truth)
    # `fusedtrain.recompute` relies on this.
    again = ops("batch_norm_act_apply", *arguments[:5], *outputs[1:], *arguments[-3:])
    assert same_bits(again, outputs[0])
    case.check_running(*arguments[5:7], truth)
    gradients = ops("batch_norm_act_backward", *case.backward(*outputs, grad=grad))
    case.check_backward(gradients, truth)
    assert all(map(torch.equal, inputs, kept))
    for t in (outputs[0], *gradients[:2]):
        assert t.dtype is case.dtype
        if ops.kernel and t.numel():
            assert t.stride() == torch.empty_like(case.x).stride()
    for t in (*outputs[1:], *gradients[2:]):
        assert t.dtype is wide_dtype(case.dtype)


def kernels_of(backend: str) -> Kernels:
    """Kernels of a backend, where it has batch norm."""
    kernels = BACKENDS[backend]()
    if not all(map(kernels.has, FAMILIES["batch_norm"])):
        pytest.skip(f"not a case: {backend} has no batch norm")
    return kernels


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel; torch's `var` of float64 is off by 1e-13."""
    rows = x.transpose(0, 1).flatten(1)
    mean = rows.mean(1)
    mean = mean + (rows - mean[:, None]).mean(1)
    return mean, (rows - mean[:, None]).square().mean(1)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype, with the same strides and offset."""
    whole = t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0).to(
        dtype, copy=True
    )
    return whole.as_strided(t.size(), t.stride(), t.storage_offset())


def _dense(t: Tensor) -> bool:
    return t.numel() + t.storage_offset() == t.untyped_storage().nbytes() // t.itemsize


def close(name: str, result: Tensor, want: Tensor, limit: Tensor) -> None:
    result, want = result.cpu().double(), want.cpu().double()
    assert result.shape == want.shape, (name, result.shape, want.shape)
    wrong = ~((result - want).abs() <= limit)
    assert not wrong.any(), _worst(name, result, want, wrong, limit)


def _worst(
    name: str, result: Tensor, want: Tensor, wrong: Tensor, limit: Tensor | None = None
) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    more = "" if limit is None else f" allowed {limit.expand_as(want)[at].item():.3g}"
    return (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong; at {at} {result[at].item()!r}, not "
        f"{want[at].item()!r}: off by {(result[at] - want[at]).abs().item():.3g}{more}"
    )
