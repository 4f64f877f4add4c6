"""Gate before a timing: results are compared with float64; a wrong contestant is not timed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class NotTheJob(AssertionError):
    """The contestant's numbers are wrong: it is not timed."""


class Tolerance(NamedTuple):
    """Allowed error: ``atol + rtol * |expected|`` of an element, ``norm`` of the whole's norm."""

    rtol: float = 0.0
    atol: float | Tensor = 0.0
    norm: float = math.inf


ANY = math.inf  # an rtol, where the norm decides alone
# Half types: one ulp forward. Backward may start from an output that was rounded to the same type,
# which costs one more rounding of a value of magnitude 1: hence the absolute term.
FORWARD = {
    torch.float64: Tolerance(1e-10, 1e-10),
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.float16: Tolerance(2**-10, 1e-5),
    torch.bfloat16: Tolerance(2**-7, 1e-5),
}
GRADIENT = {
    # torch's own hardsigmoid multiplies by 1/6 rounded to float32 here: 3e-8 off.
    torch.float64: Tolerance(1e-7, 1e-10),
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.float16: Tolerance(2**-9, 2**-10),
    torch.bfloat16: Tolerance(2**-6, 2**-7),
}
# Tolerances of operators in a row, each of which rounds.
CHAIN = {
    torch.float64: Tolerance(ANY, norm=1e-7),
    torch.float32: Tolerance(ANY, norm=1e-5),
    torch.float16: Tolerance(ANY, norm=4e-3),
    torch.bfloat16: Tolerance(ANY, norm=2e-2),
}


def agrees(what: str, actual: Tensor | None, expected: Tensor, tolerance: Tolerance) -> None:
    """Raise NotTheJob unless ``actual`` is ``expected``, in float64, to within the tolerance."""
    if actual is None:
        raise NotTheJob(f"no {what}")
    if actual.shape != expected.shape:
        raise NotTheJob(f"wrong {what}: shape {tuple(actual.shape)}")
    exact = expected.detach().double()
    off = actual.detach().to(exact.device).double() - exact
    if tolerance.norm < math.inf:
        norm = float(off.norm() / exact.norm())
        if not norm <= tolerance.norm:  # written so that NaN is wrong, here and below
            raise NotTheJob(
                f"wrong {what}: off by {norm:.1e} of its norm ({tolerance.norm:.1e} allowed)"
            )
    if tolerance.rtol < ANY:
        allowed = tolerance.atol + tolerance.rtol * exact.abs()
        if not bool((off.abs() <= allowed).all()):
            worst = float((off.abs() / allowed).nan_to_num(math.inf).max())
            raise NotTheJob(f"wrong {what}: off by {worst:.2g} times what is allowed")


def same_kind(actual: Tensor, like: Tensor) -> None:
    """Raise NotTheJob unless dtype, shape and layout are those of ``like``; strides of dimensions
    of size 1 say nothing."""
    kind, wanted = ((t.dtype, tuple(t.shape), _strides(t)) for t in (actual, like))
    if kind != wanted:
        raise NotTheJob(f"returned {kind[0]} {kind[1]} with strides {actual.stride()}")


def _strides(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]


def first_call(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    gradient: Tensor,
    *,
    constants: int = 0,
) -> list[Tensor]:
    """The output and the gradients of all tensors but the last ``constants``.

    Raises NotTheJob where the output is of another kind than ``gradient``, or has no graph.
    """
    trained = len(tensors) - constants
    leaves = [t.detach().requires_grad_(i < trained) for i, t in enumerate(tensors)]
    output = function(*leaves)
    same_kind(output, gradient)
    if not output.requires_grad:
        raise NotTheJob("the output does not require a gradient")
    # torch.compile makes a backward that can be repeated where the first call asks for it.
    gradients = torch.autograd.grad(output, leaves[:trained], gradient, retain_graph=True)
    return [output.detach(), *gradients]


# --- whole networks ---

# A right network can be so many times as far from float64 as another right one: ReLUs and batch
# statistics make more of each rounding.
TIMES_EAGER = 4.0
Results = Mapping[str, Sequence[Tensor]]  # what it is -> an output, all gradients, all buffers


class NetworkGate:
    """Compares networks with a stock one in float64, each kind of result by its norm.

    Args:
        run: the results of a network on a batch, whose tensors are in float64 for the truth.
        stock: the network that all are copies of.
        batches: a network is wrong that is wrong in all of them. A batch in which one ReLU is on
            the other side of 0 says nothing (1 in 5 of a ResNet-18, eager's as ours, and then 4e-3
            of the gradient).
        floor: error of a norm that is allowed to all.
    """

    def __init__(
        self,
        run: Callable[..., Results],
        stock: nn.Module,
        batches: Sequence[Sequence[Tensor]],
        floor: float,
    ) -> None:
        self._run, self._batches = run, batches
        self.errors: dict[str, dict[str, float]] = {}  # of those that passed

        @cache
        def truth(number: int) -> tuple[Results, dict[str, float]]:
            wide = [t.double() if t.is_floating_point() else t for t in batches[number]]
            exact = run(copy.deepcopy(stock).double(), *wide)
            eager = _errors(run(copy.deepcopy(stock), *batches[number]), exact)
            return exact, {name: max(floor, TIMES_EAGER * e) for name, e in eager.items()}

        self._truth = truth

    def check(self, who: str, model: Any) -> None:
        """Raise NotTheJob if the errors are too large in every batch, each a step from the same
        state; the errors are those of the last one."""
        before = copy.deepcopy(model.state_dict())
        for number, batch in enumerate(self._batches):
            exact, limits = self._truth(number)
            errors = _errors(self._run(model, *batch), exact)
            wrong = [name for name, e in errors.items() if not e <= limits[name]]  # NaN is wrong
            if not wrong:
                self.errors[who] = errors
                return
            model.load_state_dict(before)
        off, limit = errors[wrong[0]], limits[wrong[0]]
        raise NotTheJob(f"wrong {wrong[0]}: off by {off:.1e} of its norm ({limit:.1e} allowed)")


def _errors(actual: Results, exact: Results) -> dict[str, float]:
    """Relative to the norm of each kind of result; NaN where shapes differ."""
    errors = {}
    for name in (name for name in exact if exact[name]):  # ConvNeXt has no buffers
        a, b = (torch.cat([t.double().flatten() for t in of[name]]) for of in (actual, exact))
        errors[name] = float((a - b).norm() / b.norm()) if a.shape == b.shape else math.nan
    return errors
