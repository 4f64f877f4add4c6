"""Small gradients in 16 bits: their error relative to themselves, beside eager torch's.

test_activation_kernels.py bounds errors relative to max(|gradient|, 1), which does not see these.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusedtrain import functional as F
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import POINTWISE
from helpers.backends import Kernels
from helpers.observed import saved_by

# Torch too computes these derivatives from an output that saturates: 1 - y is rounded off.
SATURATING = ("sigmoid", "tanh", "softsign")
HALVES = [torch.float16, torch.bfloat16]


def finite(dtype: torch.dtype) -> Tensor:
    """Every finite number."""
    x = torch.arange(-32768, 32768).to(torch.int16).view(dtype)
    return x[x.isfinite()].clone()


def eager_gradient(name: str, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = ACTIVATIONS[name].eager(x)
    return torch.autograd.grad(y, x, torch.ones_like(y))[0]


def relative(gradient: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Errors in eps of the dtype; 0 where the truth is not a normal number of the dtype."""
    limits = torch.finfo(dtype)
    seen = (truth.abs() >= limits.smallest_normal) & (truth.abs() <= limits.max)
    errors = (gradient.double() - truth).abs() / truth.abs() / limits.eps
    return torch.where(seen, errors.nan_to_num(nan=float("inf")), 0.0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", [n for n in POINTWISE if n not in SATURATING])
def test_relative_error(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    row, x = ACTIVATIONS[name], finite(dtype)
    # Slopes that vanish inside of the range are off by as much as the arguments of a difference.
    truth = eager_gradient(name, x.double())
    if row.saves == "input" and name not in ("elu", "celu", "selu", "relu_squared"):
        truth = torch.where(truth.abs() > 1e-3, truth, 0.0)
    x = x.to(ops.device)
    saved = ops(name, x, *row.example) if row.saves == "output" else x
    gradient = ops(f"{name}_backward", torch.ones_like(x), saved, *row.example).cpu()
    errors = relative(gradient, truth, dtype)
    at = x[errors.argmax().item()].item()
    assert errors.max() <= 1.0, f"{errors.max():.1f} eps at {at}"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", SATURATING)
def test_no_further_off_than_torch(ops: Kernels, name: str, dtype: torch.dtype) -> None:
    if not ops.kernel:
        pytest.skip("not a case: plain torch rounds 16-bit numbers at every step")
    row, x = ACTIVATIONS[name], finite(dtype)
    truth = eager_gradient(name, x.double())
    y = ops(name, x.to(ops.device))
    gradient = ops(f"{name}_backward", torch.ones_like(y), y).cpu()
    ours, theirs = relative(gradient, truth, dtype), relative(eager_gradient(name, x), truth, dtype)
    for octave in range(14):  # of the gradient's size
        seen = (truth.abs() <= 2.0**-octave) & (truth.abs() > 2.0 ** (-octave - 1))
        if seen.any():
            assert ours[seen].max() <= 1.1 * theirs[seen].max() + 1, (row.name, octave)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("name", ["elu", "celu", "selu"])
def test_in_place_keeps_no_copy_of_the_input(name: str, dtype: torch.dtype) -> None:
    """Like torch: one saved tensor, and the same gradients but for the last bit."""
    runs = []
    for function in (getattr(F, name), getattr(torch.nn.functional, name)):
        leaf = torch.linspace(-6, 3, 1001).to(dtype).requires_grad_()
        x = leaf * 1
        y, saved = saved_by(lambda f=function, x=x: f(x, inplace=True))
        assert [t.data_ptr() for t in saved] == [y.data_ptr()]
        (g,) = torch.autograd.grad(y, leaf, torch.ones_like(y), create_graph=True)
        (second,) = torch.autograd.grad(g, leaf, torch.ones_like(g))
        runs.append((g.detach(), second))
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2 * eps, atol=2 * eps)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["elu", "celu", "selu", "relu_squared"])
def test_chains_and_norms_keep_small_gradients(name: str, dtype: torch.dtype) -> None:
    """Where another op contains the activation."""
    x = finite(dtype)
    x = x[x.abs() < 60].view(1, 1, -1)
    truth = eager_gradient(name, x.double())
    ones, zeros = torch.ones(1), torch.zeros(1)

    def gradient(leaf: Tensor, y: Tensor) -> Tensor:
        return torch.autograd.grad(y, leaf, torch.ones_like(y))[0]

    leaf = x.clone().requires_grad_()
    zero = torch.zeros_like(x)
    for y in (
        F.bias_act_dropout(leaf, None, name),
        F.gated(torch.ones_like(x), leaf, name),
        F.batch_norm_act(zero, zeros, ones, eps=0.0, activation=name, residual=leaf),
        F.batch_norm_act(leaf, zeros, ones, eps=0.0, activation=name),
        F.batch_norm_act(leaf, zeros, ones, ones, zeros, eps=0.0, activation=name),
    ):
        errors = relative(gradient(leaf, y), truth, dtype)
        assert errors.max() <= 1.0, f"{y.grad_fn}: {errors.max():.1f} eps"


def assert_finite_where(kernel: Tensor, plain: Tensor, x: Tensor, what: str) -> None:
    overflows = x[kernel.isfinite() & ~plain.isfinite()]
    assert not len(overflows), f"{what} overflows at {overflows[0].item()}, the kernel does not"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_plain_torch_is_finite_where_the_kernel_is(name: str, dtype: torch.dtype) -> None:
    """torch.compile, torch.func and TorchScript see the reference: no square may overflow in it."""
    row, x = ACTIVATIONS[name], finite(dtype)
    if name in ("gelu", "hardswish"):  # torch's own operators multiply by 2 or 6 on the way
        x = x[x.abs() < torch.finfo(dtype).max / 8]
    arguments = row.arguments
    if name == "star_relu":
        arguments = (torch.tensor([1e-3]), torch.tensor([0.5]))
    arguments = tuple(a.to(x) if isinstance(a, Tensor) else a for a in arguments)
    ops = torch.ops.fusedtrain
    kernel = getattr(ops, name)(x, *arguments)
    plain, slope = torch.func.jvp(lambda t: row.forward(t, *arguments), (x,), (torch.ones_like(x),))
    assert_finite_where(kernel, plain, x, f"the reference's forward of {name}")
    if name == "squareplus":
        torch.testing.assert_close(plain, kernel, rtol=torch.finfo(dtype).eps, atol=0)
    saved = kernel if row.saves == "output" else x
    gradient = getattr(ops, f"{name}_backward")(torch.ones_like(x), saved, *arguments)
    formula = row.backward(torch.ones_like(x), saved, *arguments)
    if row.tensors:
        gradient, formula = gradient[0], formula[0]
    assert_finite_where(gradient, formula, x, f"the reference's backward of {name}")
    if name not in ("gelu_tanh", "star_relu"):  # torch's derivative has a cube, ours a square
        assert_finite_where(gradient, slope, x, f"the derivative of {name}'s reference")
