"""Nodes of autograd in C++: what surrounds them, networks of several kinds, threads.

test_cpp_nodes.py has the table of calls.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import fusedtrain.functional as F
from helpers.autograd_routes import NEEDS_CPP, by_both

pytestmark = NEEDS_CPP


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def test_unusual_activations_are_left_to_python() -> None:
    x = leaf(2, 3)
    half = F.leaky_relu(x, -0.5)  # no kernel is exact: torch's own node
    assert half.grad_fn.name() == "LeakyReluBackward0"
    with pytest.raises(TypeError):
        F.leaky_relu(x, "no number")  # type: ignore[arg-type]


def network(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    y = F.batch_norm_act(x, None, None, bias, None, True, activation="silu")
    y = F.depthwise_conv2d(y, gate[:1].transpose(0, 1), bias)
    y = F.bias_act_dropout(F.gated(F.relu(F.silu(y)), gate), bias, "gelu", dim=1)
    y = F.residual_add(F.glu(y, 1), F.swiglu(y, dim=1), bias[:2], dim=1)
    return y.square().sum()


def network_leaves() -> list[Tensor]:
    shapes = ((2, 4, 3, 5), (2, 4, 1, 1), (4,))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_compilers() -> None:
    """Compiled autograd names the nodes; torch.compile sees no break."""
    leaves = network_leaves()
    expected = list(torch.autograd.grad(network(*leaves), leaves))
    names: list[str] = []

    def compiler(graph: torch.fx.GraphModule) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return torch.compile(graph, backend="aot_eager")

    with compiled_autograd._enable(compiler):
        network(*leaves).backward()
    for name in (
        "Silu", "Relu", "BatchNormAct", "ScaleAdd", "GatedHalves", "BiasAct", "DepthwiseConv",
    ):  # fmt: skip
        assert any(f"{name}Backward" in target for target in names), names
    torch.testing.assert_close([t.grad for t in leaves], expected, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    ours = list(torch.autograd.grad(compiled(*leaves), leaves))
    torch.testing.assert_close(ours, expected)


def test_profiles_have_the_names_of_the_python_route() -> None:
    words = (
        "ilu", "Relu", "Gated", "Scale", "BiasAct", "BatchNormAct", "Depthwise", "fusedtrain",
    )  # fmt: skip

    def names() -> set[str]:
        leaves = network_leaves()
        with torch.profiler.profile() as profile:
            network(*leaves).backward()
        return {e.key for e in profile.key_averages() if any(word in e.key for word in words)}

    ours, python = by_both(names)
    assert ours == python
    assert {"Silu", "SiluBackward", "fusedtrain::silu", "fusedtrain::silu_backward"} <= ours
    assert {
        "DepthwiseConv",
        "GatedHalves",
        "ScaleAdd",
        "BiasAct",
        "fusedtrain::gated_backward",
    } <= ours


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

    ours, python = by_both(seen)
    assert ours == python
    assert ours[0] == "fusedtrain.silu_backward.default"


def test_nodes_show_their_edges() -> None:
    x = leaf(3)
    for y in by_both(lambda: F.silu(x)):
        assert y.grad_fn.next_functions[0][0].variable is x
        assert len(y.grad_fn.saved_tensors) == 1
        assert y.grad_fn.saved_tensors[0] is x
    assert type(F.silu(x).grad_fn) is not type(F.mish(x).grad_fn)
    y = F.relu(x)
    assert y.grad_fn.saved_tensors[0].grad_fn is y.grad_fn


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
    with torch.inference_mode():
        x = torch.randn(3)
        assert F.relu(x, inplace=True) is x
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        F.relu(x, inplace=True)


def test_anomaly_mode_names_the_node() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with (
        pytest.raises(RuntimeError, match="'SiluBackward' returned nan"),
        pytest.warns(UserWarning, match="Error detected in SiluBackward"),
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        F.silu(x).backward(torch.tensor([1.0, float("nan")]))


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


def test_a_seed_is_drawn_as_torch_draws() -> None:
    x = torch.randn(8, 16)
    for p in (0.1, 0.5):
        torch.manual_seed(1)
        F.dropout(x, p)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        torch.empty(2, dtype=torch.int64).random_()
        assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(7)
    y = F.dropout(x.requires_grad_(), 0.5)
    torch.manual_seed(7)
    seed = torch.empty(2, dtype=torch.int64).random_()
    assert y.grad_fn is not None
    assert torch.equal(y.grad_fn.saved_tensors[2], seed)  # type: ignore[attr-defined]
