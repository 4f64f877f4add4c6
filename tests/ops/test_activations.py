"""Activations: numbers against float64, layouts, special values, in-place use, saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import (
    DTYPES,
    INPLACE,
    NAMES,
    POINTWISE,
    check_every_layout,
    public,
)
from helpers.observed import saved_by, saved_bytes

ON_THE_GPU_TOO = True  # the tests make tensors on the default device: see conftest.py


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_in_every_layout(name: str, dtype: torch.dtype) -> None:
    check_every_layout(name, dtype)


@pytest.mark.parametrize("value", [0.1, 0.3, 1.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bounds_that_the_dtype_cannot_hold(dtype: torch.dtype, value: float) -> None:
    """A clipped output equals the bound as stored: it must count as clipped in backward."""
    x = torch.linspace(-3, 3, 4001).to(dtype).requires_grad_()
    for function, torch_function in (
        (
            lambda t: F.hardtanh(t, -value, value),
            lambda t: nn.functional.hardtanh(t, -value, value),
        ),
        (lambda t: F.hardshrink(t, value), lambda t: nn.functional.hardshrink(t, value)),
    ):
        y, z = function(x), torch_function(x.cpu()).to(x.device)
        assert torch.equal(y, z)
        ours, theirs = (torch.autograd.grad(o, x, torch.ones_like(o))[0] for o in (y, z))
        assert torch.equal(ours, theirs)
    # On the CPU torch rounds the bound in backward and not in forward; ours agree with each other.
    y = F.threshold(x, value, 9.0)
    assert torch.equal(y, nn.functional.threshold(x.cpu(), value, 9.0).to(x.device))
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(g == 1, y == x)
    y = F.softshrink(x, value)
    assert torch.equal(y, nn.functional.softshrink(x.cpu(), value).to(x.device))
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(g == 1, x.float().abs() > value)


@pytest.mark.parametrize("name", POINTWISE)
def test_result_does_not_depend_on_position(name: str) -> None:
    """Vector body, tail, thread boundaries and offsets give the same bits."""
    row = ACTIVATIONS[name]
    x = torch.randn(100_003)
    whole = public(row)(x)
    for start, stop in ((1, 64), (3, 20), (65_530, 65_570), (7, 100_003), (99_999, 100_003)):
        assert torch.equal(public(row)(x[start:stop]), whole[start:stop])
        assert torch.equal(public(row)(x[start:stop].clone()), whole[start:stop])


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_on_a_view_reaches_the_base(name: str) -> None:
    row = ACTIVATIONS[name]
    results = []
    for function in (getattr(F, name), None):
        leaf = torch.linspace(-4, 4, 24).reshape(4, 6).requires_grad_()
        base = leaf * 1
        view = base[1:3]
        if function is not None:
            function(view, *row.arguments, inplace=True)
        else:
            view.copy_(row.eager(view.clone()))
        base.square().sum().backward()
        results.append((base.detach(), leaf.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_inplace_invalidates_what_others_saved() -> None:
    x = torch.randn(8, requires_grad=True)
    a = x * 1
    b = a.exp() + a.square()  # square saves its input
    F.mish(a, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        b.sum().backward()
    with torch.no_grad():
        a = torch.randn(8)
    b = (x * a).sum()
    with torch.no_grad():
        F.mish(a, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        b.backward()


@pytest.mark.parametrize("name", NAMES)
def test_saves_one_tensor(name: str) -> None:
    row = ACTIVATIONS[name]
    x = torch.randn(64, 64, requires_grad=True)
    y, saved = saved_by(lambda: public(row)(x))
    big = [t for t in saved if t.numel() > 1]
    assert len(big) == 1
    kept = y if row.saves == "output" else x
    assert big[0].data_ptr() == kept.data_ptr()


@pytest.mark.parametrize(
    "layer",
    [nn.LeakyReLU(), nn.ELU(), nn.CELU(), nn.SELU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardsigmoid(),
     nn.Softplus(), nn.LogSigmoid(), nn.Softsign(), nn.Hardshrink(), nn.Softshrink()],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_conv_bn_act_conv_keeps_three_tensors_instead_of_four(layer: nn.Module) -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), layer,
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
    )  # fmt: skip
    x = torch.randn(4, 8, 32, 32, requires_grad=True)
    unit = x.untyped_storage().nbytes()

    def large() -> int:
        return sum(n for n in saved_bytes(lambda: model(x)).values() if 2 * n >= unit)

    eager = large()
    fusedtrain.convert(model)
    fused = large()
    fusedtrain.revert(model)
    assert eager / unit > 3.9  # LogSigmoid and Softsign keep a fifth
    assert fused / unit < 3.1


@pytest.mark.cpu_only
def test_prelu_backward_needs_little_memory() -> None:
    """One slot a (row, channel), not one for each channel of each."""
    import resource

    x = torch.randn(2, 8192, 2, requires_grad=True)
    weight = torch.rand(8192, requires_grad=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    F.prelu(x, weight).sum().backward()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # was 2 GB


@pytest.mark.parametrize(
    ("function", "native"),
    [
        (lambda x: F.celu(x, 1e-8), lambda x: nn.functional.celu(x, 1e-8)),
        (lambda x: F.softplus(x, 1e-5), lambda x: nn.functional.softplus(x, 1e-5)),
        (lambda x: F.elu(x, 1e5), lambda x: nn.functional.elu(x, 1e5)),
        (lambda x: F.celu(x, 1e-3), lambda x: nn.functional.celu(x, 1e-3)),
        (lambda x: F.elu(x, 1e3), lambda x: nn.functional.elu(x, 1e3)),
        (lambda x: F.softplus(x, 1e-3), lambda x: nn.functional.softplus(x, 1e-3)),
        (lambda x: F.softplus(x, 1e3), lambda x: nn.functional.softplus(x, 1e3)),
    ],
)  # fmt: skip
def test_extreme_parameters_in_float16(function, native) -> None:  # type: ignore[no-untyped-def]
    x = torch.tensor([-2.0, -1.0, -1e-3, 0.0, 1e-3, 1.0], dtype=torch.float16, requires_grad=True)
    ours, theirs = (torch.autograd.grad(f(x), x, torch.ones_like(x))[0] for f in (function, native))
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: F.leaky_relu(x, -0.5), lambda x: nn.functional.leaky_relu(x, -0.5)),
        (lambda x: F.elu(x, -1.0), lambda x: nn.functional.elu(x, -1.0)),
        (lambda x: F.celu(x, -2.0), lambda x: nn.functional.celu(x, -2.0)),
        (lambda x: F.softplus(x, 1.0, 0.5), lambda x: nn.functional.softplus(x, 1.0, 0.5)),
        (lambda x: F.softplus(x, -2.0), lambda x: nn.functional.softplus(x, -2.0)),
        (lambda x: F.hardshrink(x, -0.5), lambda x: nn.functional.hardshrink(x, -0.5)),
        (lambda x: F.hardtanh(x, 0.5, 0.5), lambda x: nn.functional.hardtanh(x, 0.5, 0.5)),
        (lambda x: F.leaky_relu(x, 0.0), lambda x: nn.functional.leaky_relu(x, 0.0)),
        (lambda x: F.elu(x, 0.0), lambda x: nn.functional.elu(x, 0.0)),
        (lambda x: F.softshrink(x, 0.0), lambda x: nn.functional.softshrink(x, 0.0)),
    ],
)  # fmt: skip
def test_parameters_for_which_the_output_does_not_tell_the_input(ours, theirs) -> None:  # type: ignore[no-untyped-def]
    x = torch.cat([torch.randn(1000) * 3, torch.zeros(3)]).requires_grad_()
    y, z = ours(x), theirs(x)
    torch.testing.assert_close(y, z)
    grads = [torch.autograd.grad(o, x, torch.linspace(-1, 1, 1003))[0] for o in (y, z)]
    torch.testing.assert_close(*grads)


def available_gib() -> float:
    import os

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "backward", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forward", "backward"]
)
def test_more_than_2_to_31_elements(backward: bool) -> None:
    if available_gib() < 15:
        pytest.skip("needs 15 GiB of free memory for 2^31 + 7 float16 numbers")
    n = 2**31 + 7
    x = torch.zeros(n, dtype=torch.float16)
    at = torch.tensor([0, 2**20, 2**31 - 1, 2**31, n - 1])
    x[at] = torch.tensor([-1.0, 7.0, -2.0, 3.0, -3.0], dtype=torch.float16)
    if not backward:
        F.leaky_relu(x, 0.5, inplace=True)
        assert x[at].tolist() == [-0.5, 7.0, -1.0, 3.0, -1.5]
        assert x[1].item() == 0
        return
    gradients = torch.ops.fusedtrain.leaky_relu_backward(x, x, 0.5)
    assert gradients[at].tolist() == [-0.5, 7.0, -1.0, 3.0, -1.5]
    assert gradients[1].item() == 0
