"""Functions of the pointwise chains beside eager torch in float64, values and gradients: every
small shape (empty, 0-dim, one element), and every dtype and layout of larger ones."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedtrain import functional as F
from helpers.activations import DTYPES
from helpers.chains import TOLERANCE, gradients

TORCH = torch.nn.functional
F64 = torch.float64
SMALL = [
    (), (0,), (1,), (0, 4), (4, 0), (1, 1), (2, 0, 4), (0, 2, 4), (2, 4, 0), (0, 4, 2, 2),
    (2, 0, 2, 2), (2, 4, 0, 2), (1, 1, 1, 1), (2, 2, 1, 1),
]  # fmt: skip
LARGE = [(4, 12), (4, 6, 10), (3, 8, 6, 4)]
SHAPES = [(s, F64) for s in SMALL] + [(s, dtype) for s in LARGE for dtype in DTYPES]
DIMS = [(shape, dim, dtype) for shape, dtype in SHAPES for dim in range(len(shape))]
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda t: t, "relu": torch.relu, "silu": TORCH.silu, "elu": TORCH.elu,
    "sigmoid": torch.sigmoid, "gelu": TORCH.gelu, "tanh": torch.tanh, "relu6": TORCH.relu6,
    "leaky_relu": TORCH.leaky_relu, "hardtanh": TORCH.hardtanh,
    "hardsigmoid": lambda t: (t / 6 + 0.5).clamp(0, 1),  # torch's float64 has 1/6 in float32
}  # fmt: skip
# Activations of the small shapes; the larger ones meet all.
FEW = ("identity", "linear", "relu", "silu", "swish", "elu", "sigmoid", "swiglu")
JUMPS = ("relu6", "hardtanh")  # a rounded number may be on the other side


def with_each(names: Iterable[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test whose last argument is a name: a case has all the names of its shape."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        *others, last = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            for name in names:
                if arguments["shape"] in LARGE or name in FEW:
                    try:
                        test(**arguments, **{last.name: name})
                    except AssertionError as error:
                        raise AssertionError(f"{name}: {error}") from error

        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate


def check(
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    dtype: torch.dtype = F64,
    slack: tuple[float, float] = (2, 8),
    jumps: bool = False,
) -> None:
    """`slack` times the tolerance of the dtype, relative and absolute."""
    generator = torch.Generator().manual_seed(7)
    leaves = [torch.randn(s, generator=generator, dtype=F64).to(dtype) for s in shapes]
    for form in (torch.contiguous_format, torch.channels_last)[: 1 + (len(shapes[0]) == 4)]:
        inputs = [t.to(memory_format=form) if t.dim() == 4 else t for t in leaves]
        wide = [t.double() for t in inputs]
        y = theirs(*wide)
        grad = torch.full_like(y, 2.0)
        if dtype is not F64 or y.numel() > 100:
            grad = torch.randn(y.shape, generator=generator).to(dtype).double()
        want = gradients(theirs, *wide, grad=grad)
        results = gradients(ours, *inputs, grad=grad.to(dtype))
        for a, b in list(zip(results, want, strict=True))[: 1 if jumps else None]:
            assert a.dtype == dtype
            limits = [factor * TOLERANCE[dtype] for factor in slack]
            torch.testing.assert_close(a.double(), b, rtol=limits[0], atol=limits[1])
        if inputs[0].numel() > 100:
            assert results[0].stride() == want[0].stride()
            if y.numel() < inputs[0].numel():  # of a packed tensor
                assert results[1].stride() == inputs[0].stride()


def place(dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The dimension, counted from the front or from the back."""
    return dim - len(shape) if dtype in (torch.float32, torch.bfloat16) else dim


def along(vector: Tensor, x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = vector.numel()
    return vector.reshape(shape)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(("shape", "dim", "dtype"), DIMS, ids=str)
def test_residual_add(shape: tuple[int, ...], dim: int, dtype: torch.dtype, drops: bool) -> None:
    """Layer scale, drop path and addition."""
    rows = torch.arange(shape[0], dtype=F64) * 0.75 if drops else None
    factors = None if rows is None else rows.to(dtype)

    def theirs(residual: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        y = x * along(scale, x, dim)
        return residual + (y if rows is None else y * along(rows, x, 0))

    at = place(dim, shape, dtype)
    check(
        lambda r, x, s: F.residual_add(r, x, s, factors, at), theirs, shape, shape, (shape[dim],),
        dtype=dtype,
    )  # fmt: skip
    if rows is not None:
        check(
            lambda r, x: F.residual_add(r, x, None, factors),
            lambda r, x: r + x * along(rows, x, 0), shape, shape, dtype=dtype,
        )  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_residual_add_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(F.residual_add, torch.add, shape, shape, dtype=dtype)


@pytest.mark.parametrize(("shape", "dim", "dtype"), DIMS, ids=str)
@with_each(ACTS)
def test_bias_and_activation(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, act: str
) -> None:
    def theirs(x: Tensor, bias: Tensor) -> Tensor:
        return ACTS[act](x + along(bias, x, dim))

    options: dict[str, Any] = {"dtype": dtype, "slack": (2, 12)}
    options["jumps"] = act in JUMPS and dtype.itemsize == 2
    vector = (shape[dim],)
    at = place(dim, shape, dtype)
    check(lambda x, b: F.bias_act_dropout(x, b, act, dim=at), theirs, shape, vector, **options)
    if shape in SMALL:
        check(
            lambda x, b: F.bias_act_dropout(x, b, act, 1.0, dim=dim),
            lambda x, b: theirs(x, b) * 0, shape, vector, **options,
        )  # fmt: skip


def stylegan(act: str, dim: int, alpha: Any = None, gain: Any = None, clamp: Any = None) -> Any:
    """The reference path of StyleGAN's paper (arXiv:2106.12423, appendix)."""
    function, standard = STYLEGAN[act]
    gain = standard if gain is None else gain

    def run(x: Tensor, b: Tensor | None = None) -> Tensor:
        x = x if b is None else x + along(b, x, dim)
        y = (function(x) if alpha is None or act != "lrelu" else TORCH.leaky_relu(x, alpha)) * gain
        return y if clamp is None else y.clamp(-clamp, clamp)

    return run


STYLEGAN: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "linear": (lambda x: x, 1), "relu": (torch.relu, 2**0.5), "tanh": (torch.tanh, 1),
    "lrelu": (lambda x: TORCH.leaky_relu(x, 0.2), 2**0.5), "sigmoid": (torch.sigmoid, 1),
    "elu": (TORCH.elu, 1), "selu": (TORCH.selu, 1), "softplus": (TORCH.softplus, 1),
    "swish": (lambda x: torch.sigmoid(x) * x, 2**0.5),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "dim", "dtype"), DIMS, ids=str)
@with_each(STYLEGAN)
def test_bias_act_is_stylegans(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, act: str
) -> None:
    large: list[dict[str, float]] = [
        {}, {"gain": 0.5}, {"clamp": 0.7}, {"gain": 2.0, "clamp": 1.1, "alpha": 0.1},
    ]  # fmt: skip
    for options in large if shape in LARGE else [{"gain": 1.0, "clamp": 0.5}]:
        check(
            lambda x, b, o=options: F.bias_act(x, b, dim=dim, act=act, **o),
            stylegan(act, dim, **options), shape, (shape[dim],), dtype=dtype, slack=(2, 20),
            jumps="clamp" in options and dtype.itemsize == 2,
        )  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
@with_each(ACTS)
def test_without_a_bias(shape: tuple[int, ...], dtype: torch.dtype, act: str) -> None:
    jumps = act in JUMPS and dtype.itemsize == 2
    options: dict[str, Any] = {"dtype": dtype, "slack": (2, 12), "jumps": jumps}
    check(lambda x: F.bias_act_dropout(x, None, act), ACTS[act], shape, **options)
    name = {"identity": "linear", "silu": "swish"}.get(act, act)
    if name in STYLEGAN:
        check(lambda x: F.bias_act(x, act=name), stylegan(name, 0), shape, **options)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
@with_each(ACTS)
def test_gated(shape: tuple[int, ...], dtype: torch.dtype, act: str) -> None:
    """Eager torch rounds the gate to 16 bits before it multiplies; the op does, too."""
    options: dict[str, Any] = {"dtype": dtype, "slack": (4, 8)}
    options["jumps"] = act in JUMPS and dtype.itemsize == 2

    def theirs(x: Tensor, gate: Tensor) -> Tensor:
        return x * ACTS[act](gate)

    check(lambda x, g: F.gated(x, g, act), theirs, shape, shape, **options)
    if len(shape) > 1:
        spread = (*shape[:2], *[1] * (len(shape) - 2))
        check(lambda x, g: F.gated(x, g, act), theirs, shape, spread, **options)


GLUS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "swiglu": (F.swiglu, TORCH.silu),
    "geglu": (F.geglu, TORCH.gelu),
    "geglu, tanh": (
        lambda *a, **k: F.geglu(*a, **k, approximate="tanh"),
        lambda g: TORCH.gelu(g, approximate="tanh"),
    ),
    "reglu": (F.reglu, torch.relu),
    "bilinear": (F.bilinear_glu, lambda g: g),
}


@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
@with_each(GLUS)
def test_gate_and_value(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    ours, gate_of = GLUS[name]
    check(ours, lambda g, v: gate_of(g) * v, shape, shape, dtype=dtype, slack=(1, 1))


@pytest.mark.parametrize("gate_last", [False, True])
@pytest.mark.parametrize(("shape", "dim", "dtype"), DIMS, ids=str)
@with_each(GLUS)
def test_packed_gates(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, gate_last: bool, name: str
) -> None:
    function, gate_of = GLUS[name]

    def theirs(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim) if shape[dim] else (x, x)
        return first * gate_of(second) if gate_last else gate_of(first) * second

    def ours(x: Tensor, at: int = dim) -> Tensor:
        return function(x, dim=at, gate_last=gate_last)

    if shape[dim] % 2:
        with pytest.raises(RuntimeError, match="must be even"):
            ours(torch.randn(shape))
        return
    at = place(dim, shape, dtype)
    check(lambda x: ours(x, at), theirs, shape, dtype=dtype, slack=(1, 1))
    if name == "swiglu" and gate_last:
        options: dict[str, Any] = {"dtype": dtype, "slack": (1, 1)}
        check(lambda x: F.glu(x, dim), lambda x: TORCH.glu(x, dim), shape, **options)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_dropout(shape: tuple[int, ...], p: float) -> None:
    x = torch.ones(shape, requires_grad=True)
    y = F.dropout(x, p)
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.shape == x.shape
    assert torch.equal(y.detach(), g)
    kept = 1 / (1 - p) if p < 1 else 0.0
    assert ((g == 0) | (g == kept)).all()
