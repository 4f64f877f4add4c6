"""Calls that the short way of batch norm must leave to the general one: results, errors and running
statistics are those of torch's functions. C++ and Python agree about which calls are usual."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain import _backends
from fusedtrain._torch_private import TorchDispatchMode
from fusedtrain.functional import batch_norm_act
from fusedtrain.nn import BatchNormAct2d
from fusedtrain.ops import batch_norm
from helpers.autograd_routes import NEEDS_CPP
from helpers.batch_norm import FORMULAS

C = 3
Arguments = dict[str, Any]


def _usual() -> Arguments:
    return {
        "input": torch.randn(4, C, 2, 2, requires_grad=True),
        "running_mean": torch.zeros(C), "running_var": torch.ones(C),
        "weight": torch.rand(C).requires_grad_(), "bias": torch.rand(C).requires_grad_(),
        "training": True, "momentum": 0.1, "eps": 1e-5, "residual": None,
    }  # fmt: skip


def _stock(residual: Tensor | None, **arguments: Any) -> Tensor:
    z = F.batch_norm(**arguments)
    return (z if residual is None else z + residual).relu()


def _inference(shape: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        return torch.randn(shape)


def _every_other() -> Tensor:
    return torch.ones(2 * C)[::2]


CASES: dict[str, Callable[[], Arguments]] = {
    "usual": dict,
    "residual": lambda: {"residual": torch.randn(4, C, 2, 2, requires_grad=True)},
    "residual, one a channel": lambda: {"residual": torch.randn(C, 1, 1)},
    "residual, wider": lambda: {"residual": torch.randn(2, 4, C, 2, 2)},
    "residual of float64": lambda: {"residual": torch.randn(4, C, 2, 2).double()},
    "residual that fits nowhere": lambda: {"residual": torch.randn(4, C, 2, 3)},
    "residual, sparse": lambda: {"residual": torch.randn(4, C, 2, 2).to_sparse()},
    "residual alone has a gradient": lambda: {
        "input": torch.randn(4, C, 2, 2), "weight": None, "bias": None,
        "residual": torch.randn(4, C, 2, 2, requires_grad=True),
    },
    "bias alone has a gradient": lambda: {"input": torch.randn(4, C, 2, 2), "weight": None},
    "weight of float64": lambda: {"weight": torch.rand(C).double()},
    "running mean of float64": lambda: {"running_mean": torch.zeros(C).double()},
    "weight of another size": lambda: {"weight": torch.rand(C + 1)},
    "weight of one element": lambda: {"weight": torch.rand(1)},
    "weight [C, 1]": lambda: {"weight": torch.rand(C, 1)},
    "bias of another size": lambda: {"bias": torch.rand(1)},
    "running variance of another size": lambda: {"running_var": torch.ones(1)},
    "running mean that requires a gradient": lambda: {
        "running_mean": torch.zeros(C, requires_grad=True)
    },
    "running mean with gaps": lambda: {"running_mean": _every_other()},
    "weight with gaps": lambda: {"weight": _every_other().requires_grad_()},
    "only a running mean": lambda: {"running_var": None},
    "only a running mean, fixed": lambda: {"running_var": None, "training": False},
    "no running statistics": lambda: {"running_mean": None, "running_var": None},
    "no statistics at all": lambda: {"running_mean": None, "running_var": None, "training": False},
    "fixed": lambda: {"training": False},
    "fixed, eps of 0": lambda: {"training": False, "eps": 0.0},
    "eps of 0": lambda: {"eps": 0.0},
    "negative eps": lambda: {"eps": -1e-5},
    "momentum, a whole number": lambda: {"momentum": 1},
    "float64": lambda: {
        "input": torch.randn(4, C, 2, 2).double(),
        "weight": torch.rand(C).double().requires_grad_(), "bias": torch.rand(C).double(),
        "running_mean": torch.zeros(C).double(), "running_var": torch.ones(C).double(),
    },
    "whole numbers": lambda: {"input": torch.ones(4, C, 2, 2, dtype=torch.int64)},
    "complex": lambda: {"input": torch.randn(4, C, 2, 2, dtype=torch.complex64)},
    "one value a channel": lambda: {"input": torch.randn(1, C, 1, 1)},
    "one value a channel, fixed": lambda: {"input": torch.randn(1, C, 1, 1), "training": False},
    "no elements": lambda: {"input": torch.randn(0, C, 2, 2)},
    "one dimension": lambda: {"input": torch.randn(C)},
    "inference tensor": lambda: {"input": _inference((4, C, 2, 2))},
    "negated": lambda: {"input": torch.randn(4, C, 2, 2, dtype=torch.complex64).conj().imag},
}  # fmt: skip


def _arguments(name: str) -> Arguments:
    torch.manual_seed(0)
    return {**_usual(), **CASES[name]()}


def _outcome(function: Callable[..., Tensor], arguments: Arguments) -> list[Any]:
    leaves = [t for t in arguments.values() if isinstance(t, Tensor) and t.requires_grad]
    try:
        output = function(**arguments)
        gradients: Any = ()
        if output.requires_grad:
            (output * torch.linspace(-1, 2, output.numel()).view_as(output)).sum().backward()
            gradients = [leaf.grad for leaf in leaves]
    except (RuntimeError, ValueError, TypeError) as error:
        return [type(error)]
    statistics = [arguments["running_mean"], arguments["running_var"]]
    return [output.detach(), output.requires_grad, gradients, statistics]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str, grad: bool) -> None:
    ours = _arguments(name)
    before = _arguments(name)
    with torch.set_grad_enabled(grad):
        expected = _outcome(_stock, _arguments(name))
        actual = _outcome(partial(batch_norm_act, activation="relu"), ours)
    if len(expected) > 1:
        torch.testing.assert_close(actual, expected, equal_nan=True)
        return
    assert actual == expected
    if name != "weight [C, 1]":  # torch refuses this one in backward
        for kind in ("running_mean", "running_var"):
            assert ours[kind] is before[kind] is None or torch.equal(ours[kind], before[kind])


def test_gradients_in_inference_mode() -> None:
    arguments = _usual()
    with torch.inference_mode(), torch.enable_grad():
        output = batch_norm_act(**arguments)
        torch.testing.assert_close(output, _stock(**arguments))


@pytest.mark.parametrize("which", ["weight", "running_var"])
def test_vectors_of_16_bits(which: str) -> None:
    arguments = {k: v for k, v in _usual().items() if k != "residual"}
    arguments["input"] = torch.randn(4, C, 2, 2).bfloat16()
    expected = batch_norm_act(**arguments)
    arguments[which] = arguments[which].detach().bfloat16()
    torch.testing.assert_close(batch_norm_act(**arguments), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_with_gaps_under_a_checkpoint(dtype: torch.dtype) -> None:
    """The recomputation, which updates no statistics, must save as many tensors as the forward."""
    norm, expected = BatchNormAct2d(C).to(dtype), BatchNormAct2d(C).to(dtype)
    for name in ("running_mean", "running_var"):
        setattr(norm, name, torch.stack([getattr(norm, name)] * 2, 1)[:, 0])
    x = torch.randn(4, C, 2, 2, dtype=dtype, requires_grad=True)
    checkpoint(norm, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(expected(x).sum(), x)[0])
    torch.testing.assert_close(norm.state_dict(), expected.state_dict())


class Subclass(Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


# Cases of arguments that torch.nn.functional.batch_norm does not have, or refuses in its own way.
MORE: dict[str, Callable[[], Arguments]] = {
    "softplus": lambda: {"activation": FORMULAS["softplus"]},
    "identity": lambda: {"activation": FORMULAS["identity"]},
    "branch scale": lambda: {"branch_scale": torch.ones(4)},
    "branch scale of 16 bits": lambda: {"branch_scale": torch.ones(4).half()},
    "branch scale of float64": lambda: {"branch_scale": torch.ones(4).double()},
    "branch scale of another size": lambda: {"branch_scale": torch.ones(3)},
    "branch scale [4, 1]": lambda: {"branch_scale": torch.ones(4, 1)},
    "branch scale with gaps": lambda: {"branch_scale": torch.ones(8)[::2]},
    "branch scale with a gradient": lambda: {"branch_scale": torch.ones(4, requires_grad=True)},
    "branch scale, a parameter": lambda: {
        "branch_scale": torch.nn.Parameter(torch.ones(4), requires_grad=False)
    },
    "branch scale, sparse": lambda: {"branch_scale": torch.ones(4).to_sparse()},
    "input of a subclass": lambda: {"input": torch.randn(4, C, 2, 2).as_subclass(Subclass)},
    "input, a parameter": lambda: {"input": torch.nn.Parameter(torch.randn(4, C, 2, 2))},
    "input, sparse": lambda: {"input": torch.randn(4, C, 2, 2).to_sparse()},
    "input on another device": lambda: {"input": torch.randn(4, C, 2, 2, device="meta")},
    "input of 16 bits": lambda: {"input": torch.randn(4, C, 2, 2).bfloat16()},
    "input and vectors of 16 bits": lambda: {
        k: t.detach().half() for k, t in _usual().items() if isinstance(t, Tensor)
    },
    "input, channels last": lambda: {
        "input": torch.randn(4, C, 2, 2).to(memory_format=torch.channels_last)
    },
    "input with gaps": lambda: {"input": torch.randn(4, C, 2, 4)[..., ::2]},
    "weight of a subclass": lambda: {"weight": torch.rand(C).as_subclass(Subclass)},
    "weight on another device": lambda: {"weight": torch.rand(C, device="meta")},
    "weight, sparse": lambda: {"weight": torch.rand(C).to_sparse()},
    "running mean, a parameter": lambda: {
        "running_mean": torch.nn.Parameter(torch.zeros(C), requires_grad=False)
    },
    "running variance on another device": lambda: {"running_var": torch.ones(C, device="meta")},
    "residual of a subclass": lambda: {
        "residual": torch.randn(4, C, 2, 2).as_subclass(Subclass)
    },
    "residual, a parameter": lambda: {"residual": torch.nn.Parameter(torch.randn(4, C, 2, 2))},
    "residual on another device": lambda: {"residual": torch.randn(4, C, 2, 2, device="meta")},
}  # fmt: skip

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "forward AD": forward_ad.dual_level,
    "a mode that sees functions": Functions,
    "a mode that sees operators": Operators,
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t
    ),
    "recompute": fusedtrain.recompute,
}
# Calls that are usual for one of the two. C++ leaves to Python whatever is rare, and must leave to
# it hooks on saved tensors. Python leaves to torch every call in forward AD's level; C++, those
# with a tensor that has a tangent.
PYTHON_ALONE = {"momentum, a whole number", "negated"}
CPP_ALONE = {"forward AD"}
PYTHON_ALONE_WITHIN = {"a mode that sees functions", "a mode that sees operators"}
PYTHON_ALONE_RECORDS = {"hooks on saved tensors", "recompute"}


def _answers(name: str, surroundings: str) -> tuple[bool, bool, bool]:
    """Whether C++ and Python take the call as it is, and whether autograd is to record it."""
    answers = []
    cpp, relu = _backends.autograd(), FORMULAS["relu"]
    assert cpp is not None
    for route in ("cpp", "python"):
        torch.manual_seed(0)
        changes = {**CASES, **MORE}[name]()
        a = {**_usual(), "branch_scale": None, "activation": relu, **changes}
        activation, residual = a.pop("activation"), a.pop("residual")
        scale, input = a.pop("branch_scale"), a.pop("input")
        order = ("weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        rest = [a[k] for k in order]
        tensors = [t for t in (input, residual, *rest) if isinstance(t, Tensor)]
        with SURROUNDINGS[surroundings]():
            records = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if route == "cpp":
                result = cpp.batch_norm_act(input, residual, scale, *rest, *activation)
                answers.append(result is not NotImplemented)
                continue
            other = mock.patch.object(batch_norm, "_unusual", return_value=None)
            with mock.patch.object(batch_norm, "_cpp", None), other as unusual:
                batch_norm.usual(input, residual, scale, *rest, activation)
            answers.append(not unusual.called)
    return answers[0], answers[1], records


@NEEDS_CPP
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_cpp_and_python_agree(surroundings: str) -> None:
    taken = 0
    for name in (*CASES, *MORE):
        cpp, python, records = _answers(name, surroundings)
        taken += python
        hooked = records and surroundings in PYTHON_ALONE_RECORDS
        if hooked or name in PYTHON_ALONE or surroundings in PYTHON_ALONE_WITHIN:
            assert not cpp, name
        elif surroundings in CPP_ALONE:
            assert not python, name
        else:
            assert cpp == python, name
    assert taken > 15 or surroundings in CPP_ALONE
