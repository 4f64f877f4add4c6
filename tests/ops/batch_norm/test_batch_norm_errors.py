"""Empty, wrong and unusual input of batch norm, of which the short way must leave much to the
general one: torch's results, running statistics and exceptions, and ours before anything is
written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain.functional as F
import fusedtrain.nn as fnn
from helpers.batch_norm_calls import CALLS, Arguments, C, image, usual
from helpers.batch_norm_modules import MODULES

F16, F32, F64 = torch.float16, torch.float32, torch.float64


def stock(residual: Tensor | None, **arguments: Any) -> Tensor:
    z = torch_functional.batch_norm(**arguments)
    return (z if residual is None else z + residual).relu()


def arguments_of(name: str, training: bool) -> Arguments:
    torch.manual_seed(0)
    return {**usual(), **CALLS[name](), "training": training}


def outcome(function: Callable[..., Tensor], arguments: Arguments) -> list[Any]:
    leaves = [t for t in arguments.values() if isinstance(t, Tensor) and t.requires_grad]
    leaves = [t for t in leaves if t.is_leaf]
    try:
        output = function(**arguments)
        gradients: Any = ()
        if output.is_meta:
            return [output.shape]
        if output.requires_grad:
            (output * torch.linspace(-1, 2, output.numel()).view_as(output)).sum().backward()
            gradients = [leaf.grad for leaf in leaves]
    except Exception as error:  # the type is what is compared
        return [type(error)]
    statistics = [arguments["running_mean"], arguments["running_var"]]
    return [output.detach(), output.requires_grad, gradients, statistics]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "fixed"])
@pytest.mark.parametrize("name", CALLS)
def test_as_torch(name: str, training: bool, grad: bool) -> None:
    """Results, or the exception; which leaves every tensor as it was."""
    ours, before = arguments_of(name, training), arguments_of(name, training)
    with torch.set_grad_enabled(grad):
        expected = outcome(stock, arguments_of(name, training))
        actual = outcome(partial(F.batch_norm_act, activation="relu"), ours)
    if name == "eps of 0" and not training and expected == [ValueError]:
        pytest.skip("needs torch 2.13: older ones refuse it in evaluation, too")
    if len(expected) > 1:
        torch.testing.assert_close(actual, expected, equal_nan=True)
        return
    assert actual == expected
    if name == "weight [C, 1]":  # torch refuses this one in backward
        return
    for kind, tensor in before.items():
        if isinstance(tensor, Tensor) and not tensor.is_meta and not tensor.is_sparse:
            assert torch.equal(ours[kind], tensor), kind


def test_gradients_in_inference_mode() -> None:
    arguments = {**usual(), "training": True}
    with torch.inference_mode(), torch.enable_grad():
        output = F.batch_norm_act(**arguments)
        torch.testing.assert_close(output, stock(**arguments))


@pytest.mark.parametrize("which", ["weight", "running_var"])
def test_vectors_of_16_bits(which: str) -> None:
    arguments = {k: v for k, v in usual().items() if k != "residual"}
    arguments["training"] = True
    arguments["input"] = image().bfloat16()
    expected = F.batch_norm_act(**arguments)
    arguments[which] = arguments[which].detach().bfloat16()
    torch.testing.assert_close(F.batch_norm_act(**arguments), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_with_gaps_under_a_checkpoint(dtype: torch.dtype) -> None:
    """The recomputation, which updates no statistics, must save as many tensors as the forward."""
    norm, expected = fnn.BatchNormAct2d(C).to(dtype), fnn.BatchNormAct2d(C).to(dtype)
    for name in ("running_mean", "running_var"):
        setattr(norm, name, torch.stack([getattr(norm, name)] * 2, 1)[:, 0])
    x = torch.randn(4, C, 2, 2, dtype=dtype, requires_grad=True)
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(expected(x).sum(), x)[0])
    torch.testing.assert_close(norm.state_dict(), expected.state_dict())


# Mistakes in what torch lacks

X = torch.randn(3, 4, 5)


def call_of(changes: dict[str, Any]) -> dict[str, Any]:
    call = {
        "input": X, "running_mean": torch.zeros(4), "running_var": torch.ones(4),
        "weight": torch.ones(4), "bias": torch.zeros(4),
    }  # fmt: skip
    return call | changes


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
    statistics = (torch.zeros(4), torch.ones(4))
    call = [X, None, None, torch.ones(4), None, *statistics, True, 0.1, 1e-5, 0, 0.0, 0.0]
    for i, value in change.items():
        call[i] = value
    with pytest.raises(RuntimeError, match=words):
        OPS.batch_norm_act(*call)
