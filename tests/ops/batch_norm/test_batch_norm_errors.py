"""Empty and wrong input of batch norm: torch's answer, or an error before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

import fusedtrain.functional as F
import fusedtrain.nn as fnn
from helpers.batch_norm_modules import (
    MODULES,
    assert_same_outcome,
)

F16, F32, F64 = torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 3), (4, 3, 0), (4, 0, 5)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_empty_input(shape: tuple[int, ...], training: bool) -> None:
    def outcome(ours: bool) -> Any:
        c = shape[1]
        x = torch.randn(shape, requires_grad=True)
        w, b = torch.ones(c, requires_grad=True), torch.zeros(c, requires_grad=True)
        rm, rv = torch.zeros(c), torch.ones(c)
        try:
            if ours:
                y = F.batch_norm_act(x, rm, rv, w, b, training)
            else:
                y = torch_functional.batch_norm(x, rm, rv, w, b, training).relu()
        except Exception as error:  # the type is what is compared
            return type(error)
        y.sum().backward()
        return y.detach(), x.grad, w.grad, b.grad, rm, rv

    assert_same_outcome(outcome(True), outcome(False))


X = torch.randn(3, 4, 5)
WRONG_CALLS: dict[str, dict[str, Any]] = {
    "one value a channel": {"input": X[:1, :, :1]},
    "one value a channel, 2-d": {"input": X[:1, :, 0]},
    "one dimension": {"input": X[0, 0]},
    "no dimension": {"input": X[0, 0, 0]},
    "integers": {"input": X.long()},
    "booleans": {"input": X > 0},
    "complex": {"input": X.to(torch.complex64)},
    "sparse": {"input": X.to_sparse()},
    "float8": {"input": X.to(torch.float8_e5m2)},
    "channels": {"input": torch.randn(3, 5, 4)},
    "float64": {"input": X.double()},
    "weight too long": {"weight": torch.ones(5)},
    "bias of one": {"bias": torch.ones(1)},
    "weight 2-d": {"weight": torch.ones(4, 1)},
    "weight float64": {"weight": torch.ones(4, dtype=F64)},
    "weight float16": {"weight": torch.ones(4, dtype=F16)},
    # In training torch raises after running statistics have moved.
    "weight meta": {
        "weight": torch.ones(4, device="meta"), "running_mean": None, "running_var": None,
    },
    "mean too short": {"running_mean": torch.zeros(3)},
    "mean alone": {"running_var": None},
    "variance alone": {"running_mean": None},
    "mean meta": {"running_mean": torch.zeros(4, device="meta")},
    "16 bits and float64": {
        "input": X.half(), "weight": torch.ones(4).half(), "running_mean": torch.zeros(4).double(),
        "running_var": torch.ones(4).double(),
    },
    "statistics with gradients": {"running_mean": torch.zeros(4, requires_grad=True) * 1},
    "eps 0": {"eps": 0.0},
    "eps negative": {"eps": -1e-5},
    "eps not a number": {"eps": float("nan")},
}  # fmt: skip


def call_of(changes: dict[str, Any]) -> dict[str, Any]:
    call = {
        "input": X, "running_mean": torch.zeros(4), "running_var": torch.ones(4),
        "weight": torch.ones(4), "bias": torch.zeros(4),
    }  # fmt: skip
    return call | changes


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", WRONG_CALLS)
def test_the_exception_of_torch(kind: str, training: bool) -> None:
    """Or torch's result, where it has one."""

    def outcome(function: Callable[..., Tensor]) -> Any:
        call = call_of(WRONG_CALLS[kind])
        tensors = [t for t in call.values() if isinstance(t, Tensor)]
        tensors = [t for t in tensors if not t.is_meta and not t.is_sparse]
        kept = [t.detach().clone() for t in tensors]
        try:
            return function(**call, training=training)
        except Exception as error:  # the type is what is compared
            assert all(map(torch.equal, [t.detach() for t in tensors], kept))
            return type(error)

    ours = outcome(F.batch_norm_act)
    theirs = outcome(lambda **call: torch_functional.batch_norm(**call).relu())
    if isinstance(theirs, type) or theirs.is_meta:
        assert ours == theirs if isinstance(theirs, type) else ours.is_meta
    else:
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "exception", "words"),
    [
        ({"activation": "softmax"}, ValueError, "activation: 'softmax' is none of identity, relu"),
        ({"activation": "prelu"}, ValueError, "activation"),
        ({"activation": "relu", "alpha": 1.0}, TypeError, "relu has no parameter 'alpha'"),
        ({"activation": "identity", "alpha": 1.0}, TypeError, "identity has no parameter"),
        ({"activation": "gelu", "approximate": "erf"}, RuntimeError, "approximate"),
        ({"activation": "hardtanh", "min_val": 2.0}, ValueError, "min_val"),
        ({"activation": "softshrink", "lambd": -1.0}, RuntimeError, "lambda"),
        ({"activation": "squareplus", "b": -1.0}, ValueError, "b must be"),
        ({"activation": "celu", "alpha": 0.0}, RuntimeError, "alpha"),
        ({"activation": "elu", "alpha": "a"}, TypeError, "must be"),
        ({"residual": torch.ones(3, 4, 6)}, RuntimeError, "residual"),
        ({"residual": torch.ones(3, 4, 5, device="meta")}, RuntimeError, "residual"),
        ({"residual": [1.0]}, TypeError, "residual"),
        ({"branch_scale": torch.ones(4)}, ValueError, "branch_scale"),
        ({"branch_scale": torch.ones(3, 1, 1)}, ValueError, "branch_scale"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("grad", [True, False])
def test_mistakes_of_ours(
    options: dict[str, Any], exception: type[Exception], words: str, grad: bool
) -> None:
    call = call_of({"input": X.clone().requires_grad_(grad)})
    with pytest.raises(exception, match=words):
        F.batch_norm_act(**call, training=True, **options)
    assert torch.equal(call["running_mean"], torch.zeros(4))
    assert torch.equal(call["running_var"], torch.ones(4))
    assert torch.equal(call["input"], X)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4, 5), (1,), (), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, F64, torch.int64], ids=str)
def test_a_residual_of_another_shape_or_dtype_adds_as_in_torch(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    residual = (torch.randn(shape) * 3).to(dtype)
    for name in ("relu", "silu", "hardtanh"):
        results = []
        for ours in (True, False):
            x = X.clone().requires_grad_()
            r = residual.clone().requires_grad_(dtype.is_floating_point)
            if ours:
                y = F.batch_norm_act(x, None, None, training=True, activation=name, residual=r)
            else:
                z = torch_functional.batch_norm(x, None, None, training=True) + r
                y = getattr(torch_functional, name)(z)
            y.square().sum().backward()
            results.append([y.detach(), x.grad] + [r.grad] * dtype.is_floating_point)
        for a, b in zip(*results, strict=True):
            tolerance = 5e-3 if dtype is F16 else 1e-4
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", MODULES)
def test_wrong_shapes_of_modules(kind: str) -> None:
    cls, stock, _ = MODULES[kind]
    sizes = [
        (4,), (2, 4), (2, 4, 3), (2, 4, 3, 2), (2, 4, 1, 2, 2), (1, 4), (1, 4, 1, 1), (2, 5, 3, 2),
        (2, 5),
    ]  # fmt: skip
    for size in sizes:
        if kind == "add" and 2 <= len(size) != 4:
            continue  # takes sizes that no module of torch takes
        module, twin, x = cls(4), stock(4), torch.randn(size)
        inputs = (x, x) if kind == "add" else (x,)
        expected: type[Exception] | None = None
        try:
            twin(x)
        except Exception as error:  # the type is what is compared
            expected = type(error)
        with nullcontext() if expected is None else pytest.raises(expected):
            module(*inputs)
        assert module.num_batches_tracked == int(expected is None)
        assert torch.equal(module.running_mean, torch.zeros(4)) is (expected is not None)


def test_a_module_whose_call_fails_is_as_before() -> None:
    module = fnn.BatchNormAct2d(4)
    for inputs, error in (
        ((torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 2)), RuntimeError),
        ((torch.randn(2, 4, 3, 3).long(),), NotImplementedError),
        ((torch.randn(2, 4, 3, 3, device="meta"), torch.randn(2, 4, 3, 3)), RuntimeError),
    ):
        with pytest.raises(error):
            module(*inputs)
        assert module.num_batches_tracked == 0
        assert torch.equal(module.running_mean, torch.zeros(4))


@pytest.mark.parametrize("make", [fnn.BatchNormAct2d, lambda n, **o: fnn.ConvBnAct(n, n, **o)])
def test_wrong_activations_are_named_with_the_remedy(make: Any) -> None:
    """A module was called without an input; "tensor" made the activation a Tensor."""
    for name in ("relux", "tensor", "any", "savingactivation"):
        with pytest.raises(ValueError, match=f"no activation '{name}'; the names are celu, .*silu"):
            make(4, act_layer=name)
    with pytest.raises(TypeError, match=r"got the module SiLU\(\): pass the class SiLU"):
        make(4, act_layer=nn.SiLU())
    with pytest.raises(TypeError, match="expected a class of modules or a name, got 3"):
        make(4, act_layer=3)
    with pytest.raises(TypeError, match=r"expected a class of modules .* which says: relu\(\)"):
        make(4, act_layer=torch.relu)
    with pytest.raises(TypeError, match="which makes no module"):
        make(4, act_layer=lambda **_: 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'slope'"):
        make(4, act_layer=nn.LeakyReLU, act_kwargs={"slope": 0.1})


OPS = torch.ops.fusedtrain


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: torch.randn(4)}, "dimensions"),
        ({0: X.long()}, "float32"),
        ({1: torch.randn(3, 4, 6)}, "same shape"),
        ({1: X.half()}, "same dtype"),
        ({2: torch.ones(4)}, "branch_scale must have 3"),
        ({3: torch.ones(5)}, "weight must have 4"),
        ({3: torch.ones(4).half()}, "weight must be float32"),
        ({4: torch.ones(2, 2)}, "bias"),
        ({5: torch.zeros(8)[::2]}, "running_mean must be contiguous"),
        ({5: None}, "running_mean and running_var"),
        ({10: 99}, "no such activation"),
        ({10: -2}, "no such activation"),
    ],
)  # fmt: skip
def test_the_op_checks_what_it_is_given(change: dict[int, Any], words: str) -> None:
    call = [
        X,
        None,
        None,
        torch.ones(4),
        None,
        torch.zeros(4),
        torch.ones(4),
        True,
        0.1,
        1e-5,
        0,
        0.0,
        0.0,
    ]
    for i, value in change.items():
        call[i] = value
    with pytest.raises(RuntimeError, match=words):
        OPS.batch_norm_act(*call)
