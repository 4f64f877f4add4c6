"""Nodes of autograd in C++ against those in Python, of activations, chains, batch norm, depthwise
convolutions: the same bits, the same nodes, the same errors. helpers/functions.py has the calls."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.ops import depthwise
from fusedtrain.reference import ACTIVATIONS
from helpers.activations import DTYPES, INPLACE, POINTWISE
from helpers.autograd_routes import NEEDS_CPP, by_both, is_cpp
from helpers.functions import CONVOLUTIONS, IMAGE, NODES, NORMS, tensors

pytestmark = NEEDS_CPP
# Gradients here have four dimensions.
DEPTHWISE = {name: case for name, case in CONVOLUTIONS.items() if "2d" in name}
NODES = {**NODES, **DEPTHWISE}
ALL = {**NODES, **NORMS}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda t: torch.cat([t, t], -1)[..., ::2],
    "view": lambda t: torch.stack([t, t])[1],
    "empty": lambda t: t[..., :0],
    "expanded": lambda t: t[:1].expand(2, -1, -1, -1),
}


@pytest.fixture(autouse=True)
def _our_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's kernels are faster in all passes, the node is torch's."""
    monkeypatch.setattr(depthwise, "_EVERYWHERE", True)


def made(
    name: str, dtype: torch.dtype = torch.float32, layout: str = "contiguous", needed: Any = None
) -> list[Tensor]:
    leaves = []
    for i, leaf in enumerate(tensors(ALL[name], dtype)):
        leaf = leaf.detach()
        if leaf.shape == IMAGE or (layout == "channels_last" and leaf.dim() == 4):
            leaf = LAYOUTS[layout](leaf)
        leaves.append(leaf.requires_grad_(needed is None or i in needed))
    return leaves


def same_by_both(run: Callable[[], Any]) -> Any:
    """Tensors of both routes, which have the same bits; those of C++."""
    ours, python = by_both(run)
    torch.testing.assert_close(ours, python, rtol=0, atol=0, equal_nan=True)
    return ours


def graph_of(output: Tensor) -> list[Any]:
    """Names of the nodes, and the shapes that they save, up to the leaves."""
    graph: list[Any] = []
    todo = [output.grad_fn]
    while todo:
        node = todo.pop(0)
        if node is None or "AccumulateGrad" in node.name():
            continue
        saved = getattr(node, "saved_tensors", ())
        graph.append((node.name(), [None if t is None else (t.shape, t.stride()) for t in saved]))
        todo += [following for following, _ in node.next_functions]
    return graph


def outcome(
    name: str, leaves: list[Tensor], lay_out: Callable[[Tensor], Tensor] = lambda t: t
) -> tuple[bool, Any, list[Tensor | None]]:
    """Whether the node is in C++, the graph, and what was drawn, output and gradients."""
    torch.manual_seed(11)
    y = ALL[name][0](*leaves)
    drawn = torch.randn(2)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    if y.shape == leaves[0].shape:
        wide = torch.linspace(-1, 1, leaves[0].new_empty(IMAGE).numel()).view(IMAGE).to(y.dtype)
        grad = lay_out(wide)
    needed = [t for t in leaves if t.requires_grad]
    graph, cpp = graph_of(y), is_cpp(y)
    return cpp, graph, [drawn, y.detach(), *torch.autograd.grad(y, needed, grad)]


def check_same(ours: Any, python: Any) -> None:
    assert ours[0]
    assert not python[0]
    assert ours[1] == python[1]
    for a, b in zip(ours[2], python[2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NODES)
def test_same_bits(name: str, dtype: torch.dtype) -> None:
    count = len(NODES[name][1])
    for layout, lay_out in LAYOUTS.items():
        if layout == "empty" and name in DEPTHWISE:  # which have no elements in a dimension
            continue
        if layout != "expanded" or count == 1:
            check_same(*by_both(lambda o=layout, f=lay_out: outcome(name, made(name, dtype, o), f)))
    for size in range(1, count) if dtype is torch.float32 else ():
        for needed in itertools.combinations(range(count), size):
            leaves = (name, dtype, "contiguous", needed)
            check_same(*by_both(lambda a=leaves: outcome(name, made(*a))))


@pytest.mark.parametrize("name", POINTWISE)
def test_same_bits_of_a_number(name: str) -> None:
    def run() -> list[Tensor]:
        x = torch.tensor(0.7, requires_grad=True)
        y = NODES[name][0](x)
        return [y.detach(), *torch.autograd.grad(y, x)]

    same_by_both(run)


# Batch norm: its arguments, which of them need gradients, which are left out.
NEEDED = [("input",), ("weight",), ("bias", "residual"), ("input", "residual", "weight", "bias")]
WITHOUT = [
    ("residual", "branch_scale"), ("branch_scale",), ("residual", "weight"), (),
    ("residual", "branch_scale", "bias", "weight"),
]  # fmt: skip


def norm_arguments(dtype: torch.dtype, *needed: str) -> dict[str, Tensor]:
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    torch.manual_seed(0)
    arguments = {
        "input": torch.randn(3, 4, 5, 6).to(dtype),
        "residual": torch.randn(3, 4, 5, 6).to(dtype),
        "weight": torch.randn(4, dtype=wide),
        "bias": torch.randn(4, dtype=wide),
        "running_mean": torch.randn(4, dtype=wide),
        "running_var": torch.rand(4, dtype=wide) + 0.5,
        "branch_scale": torch.tensor([0.0, 2.0, 2.0], dtype=wide),
    }
    return {k: t.requires_grad_(k in needed) for k, t in arguments.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["identity", "relu", "silu", "leaky_relu"])
def test_same_bits_of_batch_norm(dtype: torch.dtype, training: bool, activation: str) -> None:
    for needed, without in itertools.product(NEEDED, WITHOUT):
        if set(needed) <= set(without):
            continue

        def run(needed: Any = needed, without: Any = without) -> Any:
            arguments: dict[str, Any] = norm_arguments(dtype, *needed)
            given = {k: None if k in without else t for k, t in arguments.items()}
            y = F.batch_norm_act(**given, training=training, activation=activation)
            leaves = [t for k, t in arguments.items() if k in needed and k not in without]
            statistics = [arguments[k] for k in ("running_mean", "running_var")]
            graph = graph_of(y)
            gradients = torch.autograd.grad(y.square().sum(), leaves)
            return is_cpp(y), graph, [y.detach(), *gradients, *statistics]

        check_same(*by_both(run))


@pytest.mark.parametrize("name", INPLACE)
def test_same_bits_in_place(name: str) -> None:
    row, function = ACTIVATIONS[name], getattr(F, name)

    def run() -> Any:
        x = torch.linspace(-4, 4, 60).view(3, 4, 5).requires_grad_()
        z = x * 1
        version = z._version
        y = function(z, *row.arguments, inplace=True)
        assert y is z
        first = torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.square().sum(), x)[0]
        tensors = [y.detach(), first.detach(), second]
        return is_cpp(y), (z._version - version, y.grad_fn.name()), tensors

    ours, python = by_both(run)
    # From the output torch's formula runs, in Python.
    assert ours[0] == (row.backward_in_place is None)
    check_same((True, *ours[1:]), python)


@pytest.mark.parametrize("name", ALL)
def test_second_derivatives(name: str) -> None:
    def second() -> list[Tensor]:
        leaves = made(name, torch.float64)
        y = ALL[name][0](*leaves)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return [*first, *torch.autograd.grad(total, leaves)]

    same_by_both(second)


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_other_layouts_and_dtypes(name: str) -> None:
    """An expanded gradient, one in another order of memory, one of a subclass, none at all; and a
    node that is asked twice."""

    def run(grad_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = made(name)
        y = ALL[name][0](*leaves)
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
        same_by_both(lambda f=grad_of: run(f))
    ours, python = by_both(lambda: run(lambda y: torch.ones_like(y).as_subclass(Labelled)))
    assert list(map(type, ours)) == list(map(type, python))
    leaves = made(name)
    NoGradient.apply(ALL[name][0](*leaves)).sum().backward()
    assert not any(t.grad is not None and t.grad.any() for t in leaves)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("name", ALL)
def test_hooks_and_accumulation(name: str) -> None:
    def run() -> list[Any]:
        leaves, seen = made(name), []
        inner = [t * 2 for t in leaves]
        y = ALL[name][0](*inner)
        inner[0].retain_grad()
        y.register_hook(lambda g: g * 3)
        node = y.grad_fn
        assert node is not None
        assert type(node).__name__ == node.name()
        assert repr(y).endswith(f"grad_fn=<{node.name()}>)")
        node.register_prehook(lambda grads: seen.append(grads[0].clone()))
        node.register_hook(lambda inputs, outputs: seen.append((inputs[0], outputs[0])))
        for _ in range(2):
            y.sum().backward(retain_graph=True)
        assert len(seen) == 4
        return [*(t.grad for t in leaves), inner[0].grad, *seen]

    same_by_both(run)


# The last node saves a seed, or factors.
SAVES_NO_ARGUMENT = (
    "dropout", "dropout_add", "bias_act_dropout, bounded", "residual_add, drops"
)  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # that of anomaly mode
@pytest.mark.parametrize("name", ALL)
def test_errors_and_anomalies(name: str) -> None:
    function, leaves = ALL[name][0], made(name)
    y = function(*(t * 1 for t in leaves))
    y.sum().backward()
    for again in (lambda: y.sum().backward(), lambda: y.grad_fn.saved_tensors):
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            again()
    inner = [t * 1 for t in leaves]
    y = function(*inner)
    saved = {s.data_ptr() for s in y.grad_fn.saved_tensors if s is not None}  # type: ignore[union-attr]
    kept = [t for t in (*inner, y) if t.data_ptr() in saved]
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


def result_or_error(function: Callable[..., Tensor], tensors: list[Tensor]) -> str:
    try:
        return str(function(*tensors))
    except Exception as error:  # what is compared
        return f"{type(error)}: {error}"


@pytest.mark.parametrize("name", ALL)
def test_unusual_calls_are_left_to_python(name: str) -> None:
    function, leaves = ALL[name][0], made(name)
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not is_cpp(function(*leaves))
    with fusedtrain.recompute():
        assert not is_cpp(function(*leaves))
    kept: list[Tensor] = []

    def block(*tensors: Tensor) -> Tensor:
        kept.append(function(*tensors))
        return kept[-1]

    checkpoint(block, *leaves, use_reentrant=False)
    assert not is_cpp(kept[0])
    ours, python = by_both(
        lambda: type(function(*(t.detach().as_subclass(Labelled) for t in leaves)))
    )
    assert ours is python
    assert is_cpp(function(*(nn.Parameter(t.detach()) for t in leaves)))
    for dtype in (torch.complex64, torch.int64):
        others = [t.detach().to(dtype) for t in leaves]
        ours, python = by_both(lambda o=others: result_or_error(function, o))
        assert ours == python


def test_unusual_norms_are_left_to_python() -> None:
    usual = norm_arguments(torch.float32, "input", "weight")
    assert is_cpp(F.batch_norm_act(**usual, training=True))
    unusual: dict[str, dict[str, Any]] = {
        "a residual that is broadcast": {"residual": torch.randn(1, 4, 1, 1)},
        "a residual of another dtype": {"residual": torch.randn(3, 4, 5, 6).double()},
        "a branch scale with a gradient": {"branch_scale": torch.ones(3, requires_grad=True)},
        "strided statistics": {"running_mean": torch.zeros(8)[::2]},
    }
    for what, changes in unusual.items():
        outputs = by_both(
            lambda c=changes: F.batch_norm_act(
                **{**norm_arguments(torch.float32, "input", "weight"), **c}, training=True
            )
        )
        if what == "strided statistics":
            assert outputs[0].grad_fn.name() == "BatchNormActBackward"  # they are copied for the op
        torch.testing.assert_close(*outputs, rtol=0, atol=0, msg=what)
    for changes in ({"weight": torch.ones(5)}, {"running_mean": None}, {"eps": -1.0}):
        with pytest.raises((RuntimeError, ValueError)):
            F.batch_norm_act(**{**usual, **changes}, training=False)


@pytest.mark.parametrize("name", NODES)
def test_autocast_gives_the_dtypes_of_the_python_route(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_same(*by_both(lambda: outcome(name, made(name))))


@pytest.mark.parametrize("name", ALL)
def test_views_of_a_leaf(name: str) -> None:
    """Gradients reach the base, and an edge inside of the graph can be asked for."""

    def run() -> list[Tensor]:
        bases = [torch.stack([t, t]).requires_grad_() for t in made(name, needed=())]
        views = [base[1] for base in bases]
        y = ALL[name][0](*views)
        edges = [torch.autograd.graph.get_gradient_edge(view) for view in views]
        inner = torch.autograd.grad(y.sum(), edges, retain_graph=True)
        return [*inner, *torch.autograd.grad(y.sum(), bases)]

    ours = same_by_both(run)
    half = len(ours) // 2
    for inner, outer in zip(ours[:half], ours[half:], strict=True):
        assert torch.equal(inner, outer[1])
        assert not outer[0].any()


def test_a_graph_is_freed_at_once() -> None:
    gc.disable()
    try:
        for name in ALL:
            leaves = made(name)
            alive = weakref.ref(leaves[0])
            y = ALL[name][0](*(t * 1 for t in leaves))
            del leaves
            assert alive() is not None
            del y
            assert alive() is None, name
    finally:
        gc.enable()
