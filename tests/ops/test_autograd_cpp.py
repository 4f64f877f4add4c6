"""The nodes in C++ against those in Python: the same bits, the same errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import INPLACE, POINTWISE
from helpers.autograd_routes import NEEDS_CPP, is_cpp, python_route

pytestmark = NEEDS_CPP
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def call(name: str, x: Tensor, **options: Any) -> Tensor:
    row = ACTIVATIONS[name]
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    result: Tensor = getattr(F, name)(x, *row.example, **options)
    return result


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3),
    "sliced": lambda t: t[:, :, ::2],
    "expanded": lambda t: t[:1].expand(3, -1, -1, -1),
    "empty": lambda t: t[:0],
    "scalar": lambda t: t[0, 0, 0, 0],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POINTWISE)
def test_same_bits_as_the_python_route(name: str, dtype: torch.dtype) -> None:
    base = torch.randn(2, 3, 4, 5, dtype=dtype)
    for layout in LAYOUTS.values():
        inputs = [layout(base).detach().requires_grad_() for _ in range(2)]
        grad = layout(torch.randn(2, 3, 4, 5, dtype=dtype))
        ours = call(name, inputs[0])
        with python_route():
            python = call(name, inputs[1])
        assert is_cpp(ours)
        assert not is_cpp(python)
        assert ours.stride() == python.stride()
        torch.testing.assert_close(ours, python, rtol=0, atol=0)
        for y in (ours, python):
            y.backward(grad)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0, atol=0, equal_nan=True)
        assert inputs[0].grad.stride() == inputs[1].grad.stride()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", INPLACE)
def test_same_bits_in_place(name: str) -> None:
    base = torch.randn(3, 4, 5)
    results = []
    for route in ("cpp", "python"):
        x = base.clone().requires_grad_()
        z = x * 1
        version = z._version
        if route == "cpp":
            y = call(name, z, inplace=True)
            # From the output torch's formula runs, in Python.
            assert is_cpp(y) == (ACTIVATIONS[name].backward_in_place is None)
        else:
            with python_route():
                y = call(name, z, inplace=True)
        assert y is z
        first = torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), x)[0]
        results.append((y.detach(), first.detach(), second, z._version - version, y.grad_fn.name()))
    assert results[0][3:] == results[1][3:]
    for ours, python in zip(results[0][:3], results[1][:3], strict=True):
        torch.testing.assert_close(ours, python, rtol=0, atol=0, equal_nan=True)


def test_nodes_show_what_those_of_python_show() -> None:
    x = leaf(3)
    ours = F.silu(x)
    with python_route():
        python = F.silu(x)
    for y in (ours, python):
        assert y.grad_fn.name() == "SiluBackward"
        assert type(y.grad_fn).__name__ == "SiluBackward"
        assert repr(y).endswith("grad_fn=<SiluBackward>)")
        assert y.grad_fn.next_functions[0][0].variable is x
        assert len(y.grad_fn.saved_tensors) == 1
        assert y.grad_fn.saved_tensors[0] is x
    assert type(ours.grad_fn) is not type(F.mish(x).grad_fn)
    y = F.relu(x)
    assert y.grad_fn.saved_tensors[0].grad_fn is y.grad_fn


def test_hooks_and_accumulation() -> None:
    def run() -> list[Any]:
        torch.manual_seed(0)
        x = leaf(5)
        seen: list[Any] = []
        z = x * 2
        y = F.silu(z)
        z.retain_grad()
        y.register_hook(lambda g: g * 3)
        y.grad_fn.register_prehook(lambda grads: seen.append(grads[0].clone()))
        y.grad_fn.register_hook(lambda inputs, outputs: seen.append((inputs[0], outputs[0])))
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        return [x.grad, z.grad, seen]

    ours = run()
    with python_route():
        python = run()
    torch.testing.assert_close(ours, python, rtol=0, atol=0)


def test_a_second_backward_and_a_changed_tensor_are_errors() -> None:
    for function in (F.silu, F.relu):  # saves the input; the output
        x = leaf(4)
        y = function(x * 1)
        y.sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            _ = y.grad_fn.saved_tensors
        z = x * 1
        y = function(z)
        (z if function is F.silu else y).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_an_undefined_gradient_is_zero() -> None:
    x = leaf(3)
    NoGradient.apply(F.silu(x)).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3))  # type: ignore[arg-type]


class Labelled(Tensor):
    """A subclass that adds no dispatch key."""


def test_unusual_calls_are_left_to_python() -> None:
    x = leaf(2, 3)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not is_cpp(F.silu(x))
    with fusedtrain.recompute():
        assert not is_cpp(F.silu(x))
    kept: list[Tensor] = []

    def block(t: Tensor) -> Tensor:
        kept.append(F.silu(t))
        return kept[-1]

    checkpoint(block, x, use_reentrant=False)
    assert not is_cpp(kept[0])
    labelled = x.detach().as_subclass(Labelled).requires_grad_()
    assert type(F.silu(labelled)) is type(torch.nn.functional.silu(labelled))
    parameter = nn.Parameter(torch.randn(3))
    assert is_cpp(F.silu(parameter))
    half = F.leaky_relu(x, -0.5)  # no kernel is exact: torch's own node
    assert half.grad_fn.name() == "LeakyReluBackward0"
    with pytest.raises(TypeError):
        F.leaky_relu(x, "no number")  # type: ignore[arg-type]


class Names(TorchDispatchMode):
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_ops() -> None:
    def seen() -> list[str]:
        x = leaf(3)
        y = F.silu(x)
        with Names() as before:
            y.sum().backward()
        with Names() as around:
            F.silu(x).sum().backward()
        return [name for name in before.names + around.names if "silu" in name]

    ours = seen()
    with python_route():
        assert ours == seen()
    assert ours[0] == "fusedtrain.silu_backward.default"


def test_a_gradient_of_a_subclass_takes_the_formula() -> None:
    x = leaf(3)
    grad = torch.ones(3).as_subclass(Labelled)
    y = F.silu(x)
    with python_route():
        python = F.silu(x)
    ours = torch.autograd.grad(y, x, grad)[0]
    assert type(ours) is type(torch.autograd.grad(python, x, grad)[0])


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.randn(3)
        assert F.silu(x).is_inference()
        assert F.relu(x, inplace=True) is x
    assert not F.silu(x).is_inference()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        F.relu(x, inplace=True)
    with torch.inference_mode(), torch.enable_grad():
        assert F.silu(leaf(3)).grad_fn is None


def test_in_place_errors_are_those_of_torch() -> None:
    x = leaf(4)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        F.relu(x, inplace=True)
    with torch.no_grad():
        assert F.relu(x, inplace=True) is x
    assert x._version == 1
    base = x * 1
    view = base[:2]
    F.relu(view, inplace=True)
    assert base.grad_fn.name().endswith("CopySlices")


def test_anomaly_mode_names_the_node() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with (
        pytest.raises(RuntimeError, match="'SiluBackward' returned nan"),
        pytest.warns(UserWarning, match="Error detected in SiluBackward"),
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        F.silu(x).backward(torch.tensor([1.0, float("nan")]))


def test_a_graph_is_freed_at_once() -> None:
    gc.disable()
    try:
        for function in (F.silu, F.relu):
            x = leaf(4)
            alive = weakref.ref(x)
            y = function(x * 1)
            assert y.grad_fn.name() in ("SiluBackward", "ReluBackward")
            del x
            assert alive() is not None
            del y
            assert alive() is None
    finally:
        gc.enable()


def test_a_long_chain_is_freed_without_recursion() -> None:
    for function in (F.silu, F.relu):
        x = y = leaf(1)
        for _ in range(50_000):
            y = function(y)
        del y
        y = x
        for _ in range(20_000):
            y = function(y)
        y.backward()


def test_backward_in_threads() -> None:
    x = leaf(64, 64)
    y = x
    for function in (F.silu, F.relu, F.mish):
        y = function(y)
    expected = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(50):
                gradient = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
                mine = leaf(8)
                F.silu(mine).sum().backward(create_graph=True)
                if not torch.equal(gradient, expected) or len(y.grad_fn.saved_tensors) != 1:
                    wrong.append(gradient)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    assert not wrong, wrong


def test_profiles_have_the_names_of_the_python_route() -> None:
    def names() -> set[str]:
        x = leaf(4)
        with torch.profiler.profile() as profile:
            F.silu(x).sum().backward()
        return {e.key for e in profile.key_averages() if "ilu" in e.key}

    ours = names()
    with python_route():
        python = names()
    assert ours == python
    assert {"Silu", "fusedtrain::silu", "SiluBackward", "fusedtrain::silu_backward"} <= ours
