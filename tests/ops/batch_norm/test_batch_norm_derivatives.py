"""Derivatives of functional.batch_norm_act, and what backward keeps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtrain.functional as F
import fusedtrain.nn as fnn
from helpers.batch_norm import FORMULAS
from helpers.batch_norm_modules import Stock, randomized
from helpers.observed import saved_by

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def vectors(*which: str) -> dict[str, Tensor]:
    made = {
        "weight": torch.tensor([1.2, -0.7, 0.0, 2.0], dtype=F64, requires_grad=True),
        "bias": torch.tensor([0.3, -0.2, 0.1, 0.0], dtype=F64, requires_grad=True),
        "running_mean": torch.tensor([0.5, -0.5, 0.0, 0.1], dtype=F64),
        "running_var": torch.tensor([1.5, 0.5, 1.0, 0.7], dtype=F64),
    }
    return {name: made[name] for name in which}


AFFINE, RUNNING = ("weight", "bias"), ("running_mean", "running_var")
DERIVATIVES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "training": (AFFINE, {"training": True}),
    "training, moving": (AFFINE + RUNNING, {"training": True}),
    "eval": (AFFINE + RUNNING, {}),
    "frozen": (RUNNING, {}),
    "not affine": ((), {"training": True}),
    "weight": (("weight",), {"training": True}),
    "bias": (("bias", *RUNNING), {}),
}


@pytest.mark.parametrize("kind", DERIVATIVES)
@pytest.mark.parametrize("added", ["", "residual", "branch", "residual, branch"])
def test_first_and_second_derivatives(kind: str, added: str) -> None:
    # Smooth ones: nothing saved, the output, the input.
    names, options = DERIVATIVES[kind]
    at = (list(DERIVATIVES).index(kind) + len(added)) % 3
    fast = at != 0
    tensors = vectors(*names)
    x = torch.randn(3, 4, 2, dtype=F64, requires_grad=True)
    leaves = {"input": x, **{n: t for n, t in tensors.items() if t.requires_grad}}
    if "residual" in added:
        leaves["residual"] = torch.randn(3, 4, 2, dtype=F64, requires_grad=True)
    branch = torch.tensor([0.0, 1.5, 1.5], dtype=F64) if "branch" in added else None
    statistics = {n: t for n, t in tensors.items() if not t.requires_grad}
    for activation in ("identity", "tanh", "silu"):

        def function(*values: Tensor, name: str = activation) -> Tensor:
            named = dict(zip(leaves, values, strict=True))
            moving = {n: t.clone() for n, t in statistics.items()}
            call = {"running_mean": None, "running_var": None, **moving, **named}
            return F.batch_norm_act(**call, activation=name, branch_scale=branch, **options)

        values = tuple(leaves.values())
        assert torch.autograd.gradcheck(function, values, fast_mode=fast)
        assert torch.autograd.gradgradcheck(function, values, fast_mode=True)


def test_second_derivatives_of_16_bits_are_rounded_once() -> None:
    """The shares by way of the statistics and past them cancel."""
    torch.manual_seed(0)
    x, scale, second = (torch.randn(4, 3) * 0.01).to(BF16), torch.arange(12).view(4, 3), []
    for t in (x, x.float()):
        leaf = t.requires_grad_()
        y = F.batch_norm_act(leaf, None, None, training=True, activation="silu")
        (g,) = torch.autograd.grad(y, leaf, scale.to(y.dtype), create_graph=True)
        second += torch.autograd.grad((g * scale).sum(), leaf)
    torch.testing.assert_close(second[0], second[1].to(BF16), rtol=0.01, atol=0)


def test_third_derivatives() -> None:
    """Against the formula in plain operators: torch's own derivatives are off by 0.1 to 13."""
    for name in ("identity", "tanh", "silu", "relu"):
        results = []
        for ours in (True, False):
            torch.manual_seed(1)
            x = torch.randn(5, 3, dtype=F64, requires_grad=True)
            w = torch.randn(3, dtype=F64, requires_grad=True)
            if ours:
                y = F.batch_norm_act(x, None, None, w, None, True, activation=name)
            else:
                z = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt() * w
                y = FORMULAS[name].forward(z)
            values = []
            for _ in range(3):
                y, g = torch.autograd.grad((y**2).sum(), (x, w), create_graph=True)
                values += [y, g]
            results.append(values)
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=4)), ids=str)
def test_gradients_of_some_only(needs: tuple[bool, ...]) -> None:
    shapes = [(3, 4, 5), (3, 4, 5), (4,), (4,)]
    base = [torch.randn(s) for s in shapes]
    for training, name in ((True, "silu"), (False, "relu"), (False, "silu"), (False, "identity")):
        results = []
        for ours in (True, False):
            x, r, w, b = (t.clone().requires_grad_(n) for t, n in zip(base, needs, strict=True))
            rm, rv = torch.zeros(4), torch.ones(4)
            if ours:
                y = F.batch_norm_act(x, rm, rv, w, b, training, activation=name, residual=r)
            else:
                z = torch_functional.batch_norm(x, rm, rv, w, b, training) + r
                y = FORMULAS[name].forward(z)
            assert y.requires_grad is any(needs)
            if any(needs):
                y.backward(torch.ones(3, 1, 1).expand(3, 4, 5))
            results.append([y.detach(), *(t.grad for t in (x, r, w, b))])
        for one, other, needed in zip(*results, (True, *needs), strict=True):
            assert (one is None) is (other is None) is (not needed)
            if needed:
                torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_one_module_twice_before_backward_and_backward_twice() -> None:
    """Each call keeps its own statistics (apex's groupbn overwrites them)."""
    for name in (nn.ReLU, nn.SiLU, nn.ELU):
        ours = randomized(fnn.BatchNormAct2d(4, act_layer=name))
        theirs = Stock(ours)
        results = []
        for module in (ours, theirs):
            torch.manual_seed(2)
            x, other = (torch.randn(3, 4, 5, 2, requires_grad=True) for _ in range(2))
            y = module(x) + 3 * module(other * 4 + 1)
            z = module(y)
            for _ in range(2):
                z.square().sum().backward(retain_graph=True)
            norm = getattr(module, "norm", module)
            results.append([x.grad, other.grad, norm.weight.grad, *norm.buffers()])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["identity", "relu", "silu"])
@pytest.mark.parametrize("changed", ["output", "input", "residual", "weight", "statistics"])
def test_what_changes_after_forward(name: str, changed: str) -> None:
    """Backward uses the values of the forward, or raises torch's error."""
    for training, add in itertools.product((True, False), repeat=2):
        results = []
        for change in (False, True):
            torch.manual_seed(3)
            leaves = [torch.randn(3, 4, 5, requires_grad=True) for _ in range(2)]
            weight = torch.randn(4, requires_grad=True)
            x, r, w = (t * 1 for t in (*leaves, weight))
            rm, rv = torch.zeros(4), torch.ones(4)
            y = F.batch_norm_act(
                x, rm, rv, w, None, training, activation=name, residual=r if add else None
            )
            if change:
                named = {"output": y, "input": x, "residual": r, "weight": w, "statistics": rm}
                with torch.no_grad():
                    named[changed].add_(1.0)
            try:
                y.backward(torch.ones(3, 4, 5) * torch.arange(5.0))
                results.append([t.grad for t in (leaves[0], weight)])
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                results.append(None)
        assert results[0] is not None
        if results[1] is not None:
            for a, b in zip(*results, strict=True):
                assert torch.equal(a, b)
        elif changed == "statistics":
            pytest.fail("running statistics are not saved")
        if changed == "input" and training:
            assert results[1] is None


SAVED = {
    # training, activation, residual, affine gradients -> what of the input's size is saved
    (True, "identity", False, True): {"input"},
    (True, "relu", False, True): {"input"},
    (True, "silu", False, False): {"input"},
    (True, "identity", True, True): {"input"},
    (True, "relu", True, True): {"input", "output"},
    (True, "silu", True, True): {"input", "residual"},
    (False, "relu", False, True): {"input"},
    (False, "silu", True, True): {"input", "residual"},
    (False, "identity", False, False): set(),
    (False, "identity", True, False): set(),
    (False, "relu", False, False): {"output"},
    (False, "relu", True, False): {"output"},
    (False, "silu", False, False): {"input"},
    (False, "silu", True, False): {"input", "residual"},
}


@pytest.mark.parametrize("call", SAVED, ids=str)
def test_what_backward_keeps(call: tuple[bool, str, bool, bool]) -> None:
    training, name, add, affine = call
    x, r = (torch.randn(4, 8, 6, 6, requires_grad=True) for _ in range(2))
    w, b, rm, rv = torch.ones(8), torch.zeros(8), torch.zeros(8), torch.ones(8)
    w.requires_grad_(affine)
    b.requires_grad_(affine)
    output, saved = saved_by(
        lambda: F.batch_norm_act(
            x, rm, rv, w, b, training, activation=name, residual=r if add else None
        )
    )
    named = {t.data_ptr(): n for n, t in (("input", x), ("output", output), ("residual", r))}
    assert {named[t.data_ptr()] for t in saved if t.numel() == x.numel()} == SAVED[call]
    small = [t for t in saved if t.numel() != x.numel()]
    statistics = [t for t in small if t.data_ptr() not in (w.data_ptr(), b.data_ptr())]
    assert sorted(t.numel() for t in statistics) == [8, 8]  # mean and invstd, of this call


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("which", [(), ("weight",), ("bias",), AFFINE], ids=str)
def test_weight_without_bias_and_no_look_at_numbers(which: tuple[str, ...]) -> None:
    """inplace_abn ignores a bias alone, and its backward waits for the device."""
    for training, name in itertools.product((True, False), ("relu", "elu", "silu")):
        base = {n: t.detach().float() for n, t in vectors(*which).items()}
        x = torch.randn(6, 4, 5)
        results = []
        for ours in (True, False):
            leaves = {n: t.clone().requires_grad_() for n, t in base.items()}
            leaves["input"] = x.clone().requires_grad_()
            statistics = (torch.zeros(4), torch.ones(4))
            with _Ops() as ops:
                call = {"running_mean": statistics[0], "running_var": statistics[1], **leaves}
                if ours:
                    y = F.batch_norm_act(**call, training=training, activation=name)
                else:
                    z = torch_functional.batch_norm(**call, training=training)
                    y = FORMULAS[name].forward(z)
                y.backward(torch.ones_like(y) * torch.arange(5.0))
            if ours:
                looked = [op for op in ops.seen if "local_scalar" in op or "nonzero" in op]
                assert not looked, looked
                assert any("fusedtrain" in op for op in ops.seen)
            results.append([y.detach(), *(t.grad for t in leaves.values()), *statistics])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_elu_at_minus_one() -> None:
    """Where the output rounds to -1 (inplace_abn's gradients are NaN there)."""
    for dtype in (F32, F16, BF16):
        x = (torch.randn(64, 4) * 40).to(dtype).requires_grad_()
        weight = torch.full((4,), 30.0, requires_grad=True)
        y = F.batch_norm_act(x, None, None, weight, None, True, activation="elu")
        assert (y == -1).any()
        y.sum().backward()
        assert x.grad.isfinite().all()
        assert weight.grad.isfinite().all()
