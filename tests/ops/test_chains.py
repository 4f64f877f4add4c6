"""Functions and modules of the pointwise chains: eager torch's numbers and errors, gradients of any
order, what is kept for backward, random numbers, everything around them.

test_chain_kernels.py has the kernels, test_bias_dropout.py the chains of these names.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS
from helpers.chains import same
from helpers.recompute import assert_same_bits, kept_by, recomputed, run_both

# --- gated linear units ---


def test_glu_raises_as_torchs() -> None:
    for bad, dim in ((torch.randn(5, 3), 1), (torch.tensor(1.0), -1)):
        with pytest.raises(RuntimeError) as ours:
            F.glu(bad, dim)
        with pytest.raises(RuntimeError) as torchs:
            T.glu(bad, dim)
        assert str(ours.value).split(",")[0] == str(torchs.value).split(",")[0]


def test_nothing_that_the_caller_owns_is_overwritten() -> None:
    """Liger's kernels write gradients over what they saved (Liger-Kernel#254): a second backward,
    and a producer that keeps its own output, then read gradients for activations."""
    x = torch.randn(6, 16, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        gate, value = torch.sigmoid(x), torch.exp(x)  # both keep their outputs
        return F.swiglu(gate, value) + F.swiglu(torch.cat([gate, value], 1))

    def eager(x: Tensor) -> Tensor:
        return 2 * T.silu(torch.sigmoid(x)) * torch.exp(x)

    (want,) = torch.autograd.grad(eager(x).sum(), x)
    y = model(x).sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        same(gradient, want, torch.float32)
    packed = torch.randn(4, 8, requires_grad=True)
    before = packed.detach().clone()
    F.swiglu(packed).sum().backward()
    assert torch.equal(packed, before)


def test_glu_keeps_its_arguments_alone() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    gate, value = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    linear = nn.Linear(64, 64)
    assert kept_by(lambda: linear(T.silu(gate) * value), x.nbytes) == 4
    assert kept_by(lambda: linear(F.swiglu(gate, value)), x.nbytes) == 3
    assert kept_by(lambda: recomputed(lambda: linear(F.swiglu(gate, value))), x.nbytes) == 2
    packed = torch.randn(8, 128, requires_grad=True)
    half = nn.Linear(64, 8)
    assert kept_by(lambda: recomputed(lambda: half(F.swiglu(packed))), packed.nbytes) == 1
    model = nn.Sequential(nn.Linear(64, 128), fusedtrain.nn.SwiGLU(), half)
    assert_same_bits(run_both(model, x))


# --- gates over space ---


def test_gates_of_other_shapes_are_eager_torchs() -> None:
    x = torch.randn(3, 4, 5)
    for shape in ((1, 4, 1), (3, 1, 5), (5,), (), (3, 4, 1)):
        s = torch.randn(shape)
        same(F.gated(x, s), x * s.sigmoid(), torch.float32)
        same(F.gated(s, x), s * x.sigmoid(), torch.float32)
    with pytest.raises(RuntimeError, match="must match"):
        F.gated(x, torch.randn(2, 4, 5))
    with pytest.raises(ValueError, match="'nothing' is none of"):
        F.gated(x, x, "nothing")
    with pytest.raises(TypeError, match="has no parameter 'slope'"):
        F.gated(x, x, "sigmoid", slope=1.0)


# --- residual branches ---


def test_residual_add_keeps_no_more_than_eager() -> None:
    x, r = (torch.randn(8, 64, 16, requires_grad=True) for _ in range(2))
    gamma, keep = torch.ones(16), torch.ones(8)
    assert kept_by(lambda: F.residual_add(r, x, gamma.requires_grad_(), keep), x.nbytes) == 1
    assert kept_by(lambda: F.residual_add(r, x, None, keep), x.nbytes) == 0
    eager = lambda: r + x * gamma * keep.view(-1, 1, 1)  # noqa: E731
    assert kept_by(eager, x.nbytes) == 1


def test_mistakes_of_residual_add() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"scale: expected one value for each of 4 channels"):
        F.residual_add(x, x, torch.ones(3))
    with pytest.raises(ValueError, match=r"branch_scale: expected one value for each of 3 samples"):
        F.residual_add(x, x, None, torch.ones(4))
    with pytest.raises(RuntimeError, match="must match"):
        F.residual_add(torch.randn(2, 4), x, torch.ones(4))
    with pytest.raises(IndexError, match="dim: 7 is not a dimension of an input of 2"):
        F.residual_add(x, x, torch.ones(4), dim=7)
    with pytest.raises(IndexError, match="dim: -1 is not a dimension of an input of 0"):
        F.residual_add(x[0, 0], x[0, 0], torch.ones(1))


# --- all of them ---


def test_complex_numbers() -> None:
    x, s = (torch.randn(3, 4, n, dtype=torch.complex64) for n in (5, 1))
    with pytest.raises(NotImplementedError, match="ComplexFloat"):  # as torch's
        F.glu(x, 1)
    assert F.gated(x, s).is_complex()
    assert F.residual_add(x, x, s[0, :, 0], torch.ones(3), 1).is_complex()


def test_mixed_dtypes_promote_as_in_eager_torch() -> None:
    x, s = torch.randn(2, 4, 3).bfloat16(), torch.randn(2, 4, 1)
    assert F.gated(x, s).dtype is torch.float32
    assert F.residual_add(x, x, torch.ones(3)).dtype is torch.float32
    assert F.bias_act_dropout(x, torch.ones(3), "relu").dtype is torch.float32
    assert F.swiglu(x, x.float()).dtype is torch.float32


def test_every_activation_has_its_own_slope_in_every_chain() -> None:
    """fewbit's CPU fallback computed tanhshrink for every activation."""
    x = torch.linspace(-4, 4, 200, requires_grad=True)
    for name, row in ACTIVATIONS.items():
        if row.tensors:
            continue
        (want,) = torch.autograd.grad(row.eager(x).sum(), x)
        kinds = dict(zip(row.parameters, row.example, strict=True))
        label = "gelu" if name == "gelu_tanh" else name
        kinds |= {"approximate": "tanh"} if name == "gelu_tanh" else {}
        for call in (
            lambda label=label, kinds=kinds: F.gated(torch.ones_like(x), x, label, **kinds),
            lambda label=label, kinds=kinds: F.bias_act_dropout(x, None, label, **kinds),
        ):
            (gradient,) = torch.autograd.grad(call().sum(), x)
            torch.testing.assert_close(gradient, want, rtol=1e-4, atol=2e-5, msg=name)
