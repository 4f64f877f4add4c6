"""Attention with our dropout: numbers, masks, gradients, bytes kept, which calls are torch's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.ops import attention
from helpers.recompute import counted

BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 5, 7, 8
SCORES = (BATCH, HEADS, QUERIES, KEYS)
MASKS = ("none", "causal", "bool", "float", "column", "unseen")


def inputs(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value, as a projection cut into heads has them."""
    torch.manual_seed(seed)
    shapes = ((BATCH, n, HEADS, WIDTH) for n in (QUERIES, KEYS, KEYS))
    return tuple(torch.randn(s).to(dtype).transpose(1, 2).requires_grad_() for s in shapes)


def options(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(1)
    if kind == "causal":
        return {"is_causal": True}
    if kind == "bool":
        return {"attn_mask": torch.rand(SCORES) > 0.4}
    if kind == "unseen":  # a query that sees no key
        return {"attn_mask": torch.arange(QUERIES)[:, None].expand(QUERIES, KEYS) != 2}
    if kind == "float":
        return {"attn_mask": torch.randn(SCORES[1:]).to(dtype).requires_grad_()}
    if kind == "column":
        return {"attn_mask": torch.randn(BATCH, 1, 1, KEYS).to(dtype).requires_grad_()}
    return {}


def run(function: Any, tensors: Any, named: dict[str, Any], grad: Tensor) -> list[Tensor]:
    y = function(*tensors, **named)
    mask = named.get("attn_mask")
    wanted = [*tensors] + ([mask] if mask is not None and mask.requires_grad else [])
    return [y, *torch.autograd.grad(y, wanted, grad)]


def ours(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, **named: Any) -> Tensor:
    """Ours, whichever is faster."""
    causal = named.get("is_causal", False)
    scale = named.get("scale", 1 / math.sqrt(q.shape[-1]))
    return attention._apply(q, k, v, named.get("attn_mask"), (scale, causal, p))


def in_float64(tensors: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    def wide(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        return t.detach().double().requires_grad_(t.requires_grad)

    return tuple(map(wide, tensors)), {name: wide(t) for name, t in named.items()}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16, torch.float64])
def test_is_as_near_to_float64_as_torchs(dtype: torch.dtype, kind: str) -> None:
    tensors, named = inputs(dtype), options(kind, dtype)
    grad = torch.randn(BATCH, HEADS, QUERIES, WIDTH).to(dtype)
    truth = run(T.scaled_dot_product_attention, *in_float64(tensors, named), grad.double())
    stock = run(T.scaled_dot_product_attention, tensors, named, grad)
    eps = torch.finfo(dtype).eps
    for got, want, exact in zip(run(ours, tensors, named, grad), stock, truth):
        assert got.dtype is want.dtype
        off, most = ((t.double() - exact).norm() / exact.norm() for t in (got, want))
        assert off <= max(1.5 * most, 4 * eps)


@pytest.mark.parametrize("kind", MASKS)
def test_dropout_is_that_of_the_weights(kind: str) -> None:
    """With a value of ones on the diagonal the output is the dropped softmax. The same numbers drop
    the same weights, and gradients are those of the product with that mask."""
    (q, k, _), named, p = inputs(torch.float64), options(kind, torch.float64), 0.3
    identity = torch.eye(KEYS, dtype=torch.float64).expand(BATCH, HEADS, KEYS, KEYS)
    torch.manual_seed(5)
    dropped = F.scaled_dot_product_attention(q, k, identity, dropout_p=p, **named).detach()
    weights = T.scaled_dot_product_attention(q, k, identity, **named).detach()
    kept = dropped != 0
    torch.testing.assert_close(dropped, weights * kept / (1 - p))
    assert 0.5 < kept[weights > 0].double().mean() < 0.9
    v = inputs(torch.float64, seed=2)[2]

    def masked(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        full = T.scaled_dot_product_attention(q, k, identity, **named)
        return (full * kept / (1 - p)) @ v

    def fused(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        torch.manual_seed(5)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **named)

    grad = torch.randn(BATCH, HEADS, QUERIES, WIDTH, dtype=torch.float64)
    wanted = run(masked, (q, k, v), named, grad)
    for keeps in (True, False):
        with nullcontext() if keeps else fusedtrain.recompute():
            results = run(fused, (q, k, v), named, grad)
        for got, want in zip(results, wanted):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["none", "causal", "float", "bool"])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_first_and_second_derivatives(kind: str, p: float) -> None:
    tensors, named = inputs(torch.float64), options(kind, torch.float64)
    mask = named.pop("attn_mask", None)
    trained = mask is not None and mask.requires_grad

    def function(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        with_mask = {"attn_mask": tensors[3] if trained else mask} if mask is not None else {}
        return ours(*tensors[:3], p=p, **named, **with_mask)

    wanted = (*tensors, mask) if trained else tensors
    assert torch.autograd.gradcheck(function, wanted, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, wanted, fast_mode=True)


@pytest.mark.parametrize("kind", ["one tensor", "a key made of the query", "a mask of the query"])
def test_gradients_with_a_graph_of_inputs_that_depend_on_each_other(kind: str) -> None:
    x = inputs(torch.float64)[1].detach().requires_grad_()
    results = []
    for with_graph in (False, True):
        tensors: Any = [x, x, x]
        mask = None
        if kind == "a key made of the query":
            tensors[1] = x.sin()
        elif kind == "a mask of the query":
            mask = x.sum(-1, keepdim=True) * torch.ones(KEYS, dtype=torch.float64)
        torch.manual_seed(1)
        y = F.scaled_dot_product_attention(*tensors, mask, 0.3)
        grad = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y)
        results += torch.autograd.grad(y, x, grad, create_graph=with_graph)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_row_of_a_float_mask_that_sees_nothing(with_graph: bool) -> None:
    tensors = inputs()
    mask = torch.zeros(QUERIES, KEYS)
    mask[1] = -math.inf
    y = F.scaled_dot_product_attention(*tensors, mask, 0.2)
    assert (y[:, :, 1] == 0).all()
    gradients = torch.autograd.grad(y.square().sum(), tensors, create_graph=with_graph)
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, :, 1] == 0).all()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": lambda t: t.contiguous(),
    "of heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "one for all heads": lambda t: t[:, :1].contiguous().expand_as(t),
    "columns": lambda t: t.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
}


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("other", [None, "columns", "narrow"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trained", [True, False])
def test_layouts_are_torchs(layout: str, other: str | None, trained: bool) -> None:
    q, k, v = (LAYOUTS[layout](torch.randn(2, 3, 5, 8).bfloat16()) for _ in range(3))
    v = v[..., :4] if other == "narrow" else LAYOUTS[other or layout](v)
    mask = torch.zeros(5, 5).bfloat16().requires_grad_(trained)
    tensors = [t.detach().requires_grad_() for t in (q, k, v)]
    want = T.scaled_dot_product_attention(*tensors, mask)
    got = F.scaled_dot_product_attention(*tensors, mask)
    assert got.stride() == want.stride()


def test_masks_of_a_class_of_their_own() -> None:
    q, k, v = inputs()
    mask = causal_lower_right(QUERIES, KEYS)
    y = F.scaled_dot_product_attention(q, k, v, mask)
    assert type(y) is Tensor
    torch.testing.assert_close(y, T.scaled_dot_product_attention(q, k, v, mask))


def test_gradients_of_some_inputs_alone() -> None:
    grad = torch.randn(BATCH, HEADS, QUERIES, WIDTH)
    for wanted in range(3):
        tensors = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs())]
        (got,) = torch.autograd.grad(ours(*tensors), tensors[wanted], grad)
        stock = T.scaled_dot_product_attention(*tensors)
        (want,) = torch.autograd.grad(stock, tensors[wanted], grad)
        torch.testing.assert_close(got, want)


def test_keeps_the_softmax_or_the_inputs_alone() -> None:
    q, k, v = inputs()
    dropping = partial(F.scaled_dot_product_attention, q, k, v, dropout_p=0.5)

    def kept(function: Callable[[], Tensor], recomputes: bool = False) -> int:
        with counted() as sizes, fusedtrain.recompute() if recomputes else nullcontext():
            assert function().requires_grad
        return sum(sizes.values())

    inside, weights, seed = sum(t.numel() * 4 for t in (q, k, v)), math.prod(SCORES) * 4, 16
    assert kept(dropping) == inside + weights + seed
    assert kept(dropping, recomputes=True) == inside + seed
    assert kept(partial(ours, q, k, v)) == inside


def test_checkpoint_draws_the_same_mask() -> None:
    q, k, v = inputs()
    results = []
    for function in (lambda f, *args: f(*args), partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(0)
        y = function(F.scaled_dot_product_attention, q, k, v, None, 0.5)
        results.append(torch.autograd.grad(y.square().sum(), (q, k, v)))
    assert all(map(torch.equal, *results))


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that multiplies 16-bit matrices."""
    monkeypatch.setattr(attention, "mkldnn_takes", lambda _: True)


@pytest.mark.usefixtures("multiplied")
def test_which_calls_are_ours() -> None:
    def is_ours(*tensors: Tensor, **named: Any) -> bool:
        y = F.scaled_dot_product_attention(*tensors, **named)
        names, edges = set(), [y.grad_fn]
        for node in edges:
            names.add(node.name())
            edges += [n for n, _ in node.next_functions if n is not None]
        return "AttentionBackward" in names

    assert not is_ours(*inputs())
    assert is_ours(*inputs(), dropout_p=0.1)
    assert is_ours(*inputs(torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert is_ours(*inputs())
        y = F.scaled_dot_product_attention(*inputs())
        assert y.dtype is torch.bfloat16
    q, k, v = (torch.randn(1, 1, 300, 4).bfloat16().requires_grad_() for _ in range(3))
    assert not is_ours(q, k, v)
    assert is_ours(q, k, v, dropout_p=0.1)


@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("kind", ["flash", "three dimensions", "narrow values", "mask", "chosen"])
def test_a_peaked_softmax_is_as_near_to_float64_as_torchs(kind: str) -> None:
    """Torch's plain formula computes in float32, in which large numbers cancel."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 64, 32).bfloat16() for _ in range(4))
    q, v, named = q * 30, v + 5, dict[str, Any]()
    if kind == "three dimensions":
        q, k, v, grad = (t[0] for t in (q, k, v, grad))
    elif kind == "narrow values":
        v, grad = v[..., :16], grad[..., :16]
    elif kind == "mask":
        named = {"attn_mask": torch.randn(64, 64).bfloat16().requires_grad_()}
    tensors = [t.requires_grad_() for t in (q, k, v)]
    truth = run(T.scaled_dot_product_attention, *in_float64(tensors, named), grad.double())
    with sdpa_kernel(SDPBackend.MATH) if kind == "chosen" else nullcontext():
        stock = run(T.scaled_dot_product_attention, tensors, named, grad)
        results = run(F.scaled_dot_product_attention, tensors, named, grad)
    for got, want, exact in zip(results, stock, truth):
        off, most = ((t.double() - exact).norm() for t in (got, want))
        assert off <= 1.5 * most


@pytest.mark.usefixtures("multiplied")
def test_layout_and_groups_of_heads() -> None:
    """Outputs lie in memory as torch's; keys and values serve several heads."""
    q, k, v = inputs(torch.bfloat16)
    want = T.scaled_dot_product_attention(q, k, v)
    assert F.scaled_dot_product_attention(q, k, v).stride() == want.stride()
    k, v = (t.detach()[:, :1].requires_grad_() for t in (k, v))
    grad = torch.randn_like(want)
    named = {"enable_gqa": True}
    pairs = [run(f, (q, k, v), named, grad)
             for f in (F.scaled_dot_product_attention, T.scaled_dot_product_attention)]  # fmt: skip
    for got, want in zip(*pairs):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


WRONG: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "width": ((2, 3, 5, 8), (2, 3, 7, 4), (2, 3, 7, 8), {}),
    "keys": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 6, 8), {}),
    "mask": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"attn_mask": torch.ones(4, 7).bool()}),
    "both": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8),
             {"attn_mask": torch.ones(5, 7).bool(), "is_causal": True}),
    "probability": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"dropout_p": 1.5}),
    "heads": ((2, 3, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_torchs(name: str) -> None:
    *shapes, named = WRONG[name]
    tensors = [torch.randn(shape) for shape in shapes]
    named = {"dropout_p": 0.2} | named
    with pytest.raises(Exception, match=r".") as want:
        T.scaled_dot_product_attention(*tensors, **named)
    with pytest.raises(want.type, match=f"^{re.escape(str(want.value))}$"):
        F.scaled_dot_product_attention(*tensors, **named)


@pytest.mark.usefixtures("multiplied")
def test_unusual_tensors() -> None:
    """Empty ones, other dtypes, batches that broadcast, and transforms are torch's."""
    for shapes in (
        ((0, 3, 5, 8),) * 3,
        ((2, 3, 0, 8),) * 3,
        ((1, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
    ):
        tensors = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
        want = T.scaled_dot_product_attention(*tensors)
        torch.testing.assert_close(F.scaled_dot_product_attention(*tensors), want, equal_nan=True)
    q, k, v = (t.detach() for t in inputs())
    want = torch.vmap(T.scaled_dot_product_attention)(q, k, v)
    got = torch.vmap(F.scaled_dot_product_attention)(q, k, v)
    torch.testing.assert_close(got, want)
    script = torch.jit.script(F.scaled_dot_product_attention)
    torch.testing.assert_close(script(q, k, v), T.scaled_dot_product_attention(q, k, v))


def test_autocast_inside_and_outside_of_backward() -> None:
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
        inside = torch.autograd.grad(y.float().sum(), (q, k, v), retain_graph=True)
    outside = torch.autograd.grad(y.float().sum(), (q, k, v))
    assert y.dtype is torch.bfloat16
    assert all(g.dtype is torch.float32 for g in inside)
    assert all(map(torch.equal, inside, outside))
