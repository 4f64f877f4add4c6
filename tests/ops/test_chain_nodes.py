"""The nodes in C++ of gated products, scaled sums and bias + activation + dropout against those in
Python: the same bits, the same nodes, the same errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks

import fusedtrain
import fusedtrain.functional as F
from helpers.autograd_routes import NEEDS_CPP, is_cpp, python_route

pytestmark = NEEDS_CPP
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
IMAGE = (2, 4, 3, 5)
DROPS = torch.tensor([0.0, 2.0])

Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]
CASES: dict[str, Case] = {
    "glu": (partial(F.glu, dim=1), (IMAGE,)),
    "swiglu, gate last": (partial(F.swiglu, dim=-3, gate_last=True), (IMAGE,)),
    "geglu, tanh": (partial(F.geglu, dim=1, approximate="tanh"), (IMAGE,)),
    "reglu": (partial(F.reglu, dim=1), (IMAGE,)),
    "bilinear_glu": (partial(F.bilinear_glu, dim=1), (IMAGE,)),
    "swiglu of two": (F.swiglu, (IMAGE, IMAGE)),
    "gated": (partial(F.gated, activation="leaky_relu", negative_slope=0.2), (IMAGE, IMAGE)),
    "gated, spread": (F.gated, (IMAGE, (2, 4, 1, 1))),
    "gated, spread, silu": (partial(F.gated, activation="silu"), (IMAGE, (2, 4, 1, 1))),
    "gated, spread, identity": (partial(F.gated, activation=None), (IMAGE, (2, 4, 1, 1))),
    "residual_add": (lambda r, x, s: F.residual_add(r, x, s, dim=1), (IMAGE, IMAGE, (4,))),
    "residual_add, drops": (
        lambda r, x: F.residual_add(r, x, None, DROPS.to(r.dtype)), (IMAGE, IMAGE),
    ),
    "bias_act": (lambda x, b: F.bias_act(x, b, dim=1, act="lrelu", clamp=0.7), (IMAGE, (4,))),
    "bias_act, linear": (lambda x, b: F.bias_act(x, b, dim=1, gain=2.0), (IMAGE, (4,))),
    "bias_act_dropout": (
        lambda x, b: F.bias_act_dropout(x, b, "gelu", 0.3, dim=-3), (IMAGE, (4,)),
    ),
    "bias_act_dropout, relu": (
        lambda x, b: F.bias_act_dropout(x, b, "relu", 0.3, dim=1), (IMAGE, (4,)),
    ),
    "bias_act_dropout, bounded": (
        lambda x, b: F.bias_act_dropout(x, b, "relu6", 0.3, dim=1), (IMAGE, (4,)),
    ),
    "bias_act_dropout, no bias": (lambda x: F.bias_act_dropout(x, None, "silu", 0.3), (IMAGE,)),
    "bias_act_dropout, eval": (
        lambda x, b: F.bias_act_dropout(x, b, "silu", 0.3, False, dim=1), (IMAGE, (4,)),
    ),
    "dropout": (partial(F.dropout, p=0.25), (IMAGE,)),
}  # fmt: skip
# The last node saves a seed, or factors.
SAVES_NO_ARGUMENT = ("dropout", "bias_act_dropout, bounded", "residual_add, drops")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda t: torch.cat([t, t], -1)[..., ::2],
    "view": lambda t: torch.stack([t, t])[1],
    "empty": lambda t: t[..., :0],
}


def made(name: str, dtype: torch.dtype, layout: str, needed: Any = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    leaves = []
    for i, shape in enumerate(CASES[name][1]):
        leaf = torch.randn(shape, generator=generator).to(dtype)
        if leaf.shape == IMAGE or (layout == "channels_last" and leaf.dim() == 4):
            leaf = LAYOUTS[layout](leaf)
        leaves.append(leaf.detach().requires_grad_(needed is None or i in needed))
    return leaves


def graph_of(output: Tensor) -> list[Any]:
    """Names of the nodes, and the shapes that they save, up to the leaves."""
    found: list[Any] = []
    todo = [output.grad_fn]
    while todo:
        node = todo.pop(0)
        if node is None or "AccumulateGrad" in node.name():
            continue
        saved = getattr(node, "saved_tensors", ())
        found.append((node.name(), [None if t is None else (t.shape, t.stride()) for t in saved]))
        todo += [following for following, _ in node.next_functions]
    return found


def outcome(name: str, leaves: list[Tensor]) -> tuple[bool, Any, list[Tensor | None]]:
    """Whether the node is in C++, the graph, and output and gradients."""
    torch.manual_seed(11)
    y = CASES[name][0](*leaves)
    drawn = torch.randn(2)
    graph, cpp = graph_of(y), is_cpp(y)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    needed = [t for t in leaves if t.requires_grad]
    return cpp, graph, [drawn, y.detach(), *torch.autograd.grad(y, needed, grad)]


def both(name: str, *arguments: Any) -> tuple[Any, Any]:
    ours = outcome(name, made(name, *arguments))
    with python_route():
        python = outcome(name, made(name, *arguments))
    return ours, python


def check_same(ours: Any, python: Any) -> None:
    assert ours[0]
    assert not python[0]
    assert ours[1] == python[1]
    for a, b in zip(ours[2], python[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_the_python_route(name: str, dtype: torch.dtype) -> None:
    for layout in LAYOUTS:
        check_same(*both(name, dtype, layout))


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if len(case[1]) > 1])
def test_only_some_tensors_need_gradients(name: str) -> None:
    count = len(CASES[name][1])
    for size in range(1, count):
        for needed in itertools.combinations(range(count), size):
            check_same(*both(name, torch.float32, "contiguous", needed))


@pytest.mark.parametrize("name", CASES)
def test_without_gradients(name: str) -> None:
    def run() -> Tensor:
        torch.manual_seed(5)
        return CASES[name][0](*made(name, torch.float32, "channels_last"))

    with torch.no_grad():
        ours = run()
        with python_route():
            python = run()
    assert torch.equal(ours, python)
    assert not ours.requires_grad
    with torch.inference_mode():
        assert run().is_inference()
        assert torch.equal(run(), python)
    with torch.inference_mode():
        inference = made(name, torch.float32, "contiguous")
    torch.manual_seed(5)
    assert not CASES[name][0](*inference).is_inference()


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str) -> None:
    def function(*leaves: Tensor) -> Tensor:
        torch.manual_seed(5)
        return CASES[name][0](*leaves)

    def second() -> list[Tensor]:
        leaves = made(name, torch.float64, "contiguous")
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(total, leaves)]

    ours = second()
    with python_route():
        python = second()
    torch.testing.assert_close(ours, python, rtol=0, atol=0)
    leaves = made(name, torch.float64, "contiguous")
    assert is_cpp(function(*leaves))
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_other_layouts_and_dtypes(name: str) -> None:
    """An expanded gradient, one in another order of memory, and a node that is asked twice."""

    def run(grad_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(5)
        leaves = made(name, torch.float32, "contiguous")
        y = CASES[name][0](*leaves)
        grad = grad_of(y)
        first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        again = torch.autograd.grad(y, leaves[-1], grad, retain_graph=True)
        assert torch.equal(first[-1], again[0])
        return list(first)

    for grad_of in (
        lambda y: torch.ones(()).expand_as(y),
        lambda y: torch.arange(float(y.numel())).view(y.shape[::-1]).permute(3, 2, 1, 0),
        lambda y: torch.arange(float(y.numel())).view(y.shape).to(
            memory_format=torch.channels_last
        ),
    ):  # fmt: skip
        ours = run(grad_of)
        with python_route():
            python = run(grad_of)
        torch.testing.assert_close(ours, python, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # that of anomaly mode
@pytest.mark.parametrize("name", CASES)
def test_errors_hooks_and_anomalies(name: str) -> None:
    leaves = made(name, torch.float32, "contiguous")
    function = CASES[name][0]
    seen: list[str] = []
    y = function(*(t * 1 for t in leaves))
    node = y.grad_fn
    assert node is not None
    assert type(node).__name__ == node.name()
    node.register_prehook(lambda grads: seen.append("before"))
    node.register_hook(lambda inputs, outputs: seen.append("behind"))
    y.sum().backward()
    assert seen == ["before", "behind"]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    own = [t * 1 for t in leaves]
    y = function(*own)
    assert y.grad_fn is not None
    saved_tensors = y.grad_fn.saved_tensors  # type: ignore[attr-defined]
    saved = {s.data_ptr() for s in saved_tensors if s is not None}
    kept = [t for t in (*own, y) if t.data_ptr() in saved]
    assert kept or name in SAVES_NO_ARGUMENT
    for tensor in kept[:1]:
        with torch.no_grad():
            tensor.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    with torch.autograd.detect_anomaly(check_nan=True):
        y = function(*leaves)
        with pytest.raises(RuntimeError, match=r"Backward' returned nan"):
            y.backward(torch.full_like(y, float("nan")))


class Labelled(Tensor):
    """A subclass that adds no dispatch key."""


@pytest.mark.parametrize("name", CASES)
def test_unusual_calls_are_left_to_python(name: str) -> None:
    function, leaves = CASES[name][0], made(name, torch.float32, "contiguous")
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not is_cpp(function(*leaves))
    with fusedtrain.recompute():
        assert not is_cpp(function(*leaves))
    with python_route():
        expected = type(function(*(t.detach().as_subclass(Labelled) for t in leaves)))
    assert type(function(*(t.detach().as_subclass(Labelled) for t in leaves))) is expected
    parameters = [nn.Parameter(t.detach()) for t in leaves]
    assert is_cpp(function(*parameters))
    for dtype in (torch.complex64, torch.int64):
        others = [t.detach().to(dtype) for t in leaves]
        ours = result_or_error(function, others)
        with python_route():
            python = result_or_error(function, others)
        assert ours == python


def result_or_error(function: Callable[..., Tensor], tensors: list[Tensor]) -> str:
    torch.manual_seed(1)
    try:
        return str(function(*tensors))
    except Exception as error:  # what is compared
        return f"{type(error)}: {error}"


@pytest.mark.parametrize("name", CASES)
def test_transforms(name: str) -> None:
    def function(*leaves: Tensor) -> Tensor:
        torch.manual_seed(5)
        return CASES[name][0](*leaves)

    def transformed() -> list[Any]:
        detached = [t.detach() for t in made(name, torch.float64, "contiguous")]
        ones = tuple(torch.ones_like(t) for t in detached)
        numbers = tuple(range(len(detached)))
        batch = [torch.stack([t, t + 1]) for t in detached]
        return [
            torch.func.grad(lambda *t: function(*t).sum(), numbers)(*detached),
            torch.func.jvp(function, tuple(detached), ones),
            torch.func.vmap(function, randomness="same")(*batch),
        ]

    ours = transformed()
    with python_route():
        python = transformed()
    torch.testing.assert_close(ours, python, rtol=0, atol=0)


def test_autocast_gives_the_dtypes_of_the_python_route() -> None:
    for name in CASES:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            check_same(*both(name, torch.float32, "contiguous"))


def chain(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    y = F.bias_act_dropout(F.gated(x, gate), bias, "gelu", dim=1)
    return F.residual_add(F.glu(y, 1), F.swiglu(y, dim=1), bias[:2], dim=1).square().sum()


def chain_leaves() -> list[Tensor]:
    shapes = (IMAGE, (2, 4, 1, 1), (4,))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_compiled_autograd() -> None:
    leaves = chain_leaves()
    expected = torch.autograd.grad(chain(*leaves), leaves)
    names: list[str] = []

    def compiler(graph: torch.fx.GraphModule) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return torch.compile(graph, backend="aot_eager")

    with compiled_autograd._enable(compiler):
        chain(*leaves).backward()
    for name in ("ScaleAddBackward", "GatedBackward", "GatedHalvesBackward", "BiasActBackward"):
        assert any(name in target for target in names) or name == "GatedBackward", names
    torch.testing.assert_close([t.grad for t in leaves], list(expected), rtol=1e-12, atol=1e-12)


def test_compile_sees_no_break() -> None:
    torch._dynamo.reset()
    leaves = chain_leaves()
    expected = torch.autograd.grad(chain(*leaves), leaves)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), expected)


def test_profiles_have_the_names_of_the_python_route() -> None:
    def names() -> set[str]:
        leaves = chain_leaves()
        with torch.profiler.profile() as profile:
            chain(*leaves).backward()
        return {e.key for e in profile.key_averages() if "::" not in e.key or "fused" in e.key}

    ours = names()
    with python_route():
        python = names()
    words = ("Gated", "Scale", "BiasAct", "fusedtrain")
    assert {n for n in ours if any(w in n for w in words)} == {
        n for n in python if any(w in n for w in words)
    }
    assert {"GatedHalves", "ScaleAdd", "BiasAct", "fusedtrain::gated_backward"} <= ours


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


@pytest.mark.parametrize("name", CASES)
def test_views_of_a_leaf(name: str) -> None:
    """Gradients reach the base, and an edge inside of the graph can be asked for."""

    def run() -> list[Tensor]:
        torch.manual_seed(5)
        leaves = made(name, torch.float32, "contiguous", ())
        bases = [torch.stack([t, t]).requires_grad_() for t in leaves]
        views = [base[1] for base in bases]
        y = CASES[name][0](*views)
        edges = [torch.autograd.graph.get_gradient_edge(view) for view in views]
        inner = torch.autograd.grad(y.sum(), edges, retain_graph=True)
        return [*inner, *torch.autograd.grad(y.sum(), bases)]

    ours = run()
    with python_route():
        python = run()
    torch.testing.assert_close(ours, python, rtol=0, atol=0)
    half = len(ours) // 2
    for inner, outer in zip(ours[:half], ours[half:], strict=True):
        assert torch.equal(inner, outer[1])
        assert not outer[0].any()
