"""Functions and modules of the pointwise chains: eager torch's numbers and errors, gradients of any
order, what is kept for backward, random numbers, everything around them.

test_chain_kernels.py has the kernels, test_bias_dropout.py the chains of these names.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS
from fusedtrain.reference.philox import philox
from helpers.activations import DTYPES
from helpers.chains import TOLERANCE, gradients, same
from helpers.recompute import assert_same_bits, kept_by, recomputed, run_both

GLUS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "swiglu": (F.swiglu, T.silu),
    "geglu": (F.geglu, T.gelu),
    "geglu tanh": (
        lambda *a, **k: F.geglu(*a, **k, approximate="tanh"),
        lambda g: T.gelu(g, approximate="tanh"),
    ),
    "reglu": (F.reglu, torch.relu),
    "bilinear": (F.bilinear_glu, lambda g: g),
    "gated": (lambda g, v=None, **k: F.gated(v, g, "sigmoid"), torch.sigmoid),
}


# --- gated linear units ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GLUS)
def test_glu_of_two_tensors(name: str, dtype: torch.dtype) -> None:
    ours, gate_of = GLUS[name]
    g, v, grad = (torch.randn(4, 6, 10).to(dtype) for _ in range(3))
    results = gradients(ours, g, v, grad=grad)
    want = gradients(
        lambda g, v: gate_of(g) * v, g.double(), v.double(), grad=grad.double()
    )  # fmt: skip
    for a, b in zip(results, want, strict=True):
        assert a.dtype == dtype
        same(a, b, dtype)


@pytest.mark.parametrize("gate_last", [False, True])
@pytest.mark.parametrize("name", [n for n in GLUS if n != "gated"])
def test_glu_of_halves(name: str, gate_last: bool) -> None:
    ours, gate_of = GLUS[name]

    def eager(x: Tensor, dim: int) -> Tensor:
        a, b = x.chunk(2, dim)
        return gate_of(b) * a if gate_last else gate_of(a) * b

    for shape, dim in (((5, 12), -1), ((3, 8, 4, 5), 1), ((6, 5), 0)):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(shape)
            if len(shape) == 4:
                x = x.to(memory_format=layout)
            grad = torch.randn(eager(x, dim).shape)
            run = lambda x, dim=dim: ours(x, dim=dim, gate_last=gate_last)  # noqa: E731
            results = gradients(run, x, grad=grad)
            want = gradients(lambda x, dim=dim: eager(x, dim), x, grad=grad)
            same(results[0], want[0], torch.float32)
            same(results[1], want[1], torch.float32)
            assert results[1].stride() == x.stride()


def test_glu_is_torchs() -> None:
    for shape, dim in (((5, 12), -1), ((3, 8, 4, 5), 1)):
        x = torch.randn(shape)
        same(F.glu(x, dim), T.glu(x, dim), torch.float32)
    for bad, dim in ((torch.randn(5, 3), 1), (torch.tensor(1.0), -1)):
        with pytest.raises(RuntimeError) as ours:
            F.glu(bad, dim)
        with pytest.raises(RuntimeError) as torchs:
            T.glu(bad, dim)
        assert str(ours.value).split(",")[0] == str(torchs.value).split(",")[0]


def test_nothing_that_the_caller_owns_is_overwritten() -> None:
    """Liger's kernels write gradients over what they saved (Liger-Kernel#254): a second backward,
    and a producer that keeps its own output, then read gradients for activations."""
    x = torch.randn(6, 16, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        gate, value = torch.sigmoid(x), torch.exp(x)  # both keep their outputs
        return F.swiglu(gate, value) + F.swiglu(torch.cat([gate, value], 1))

    def eager(x: Tensor) -> Tensor:
        return 2 * T.silu(torch.sigmoid(x)) * torch.exp(x)

    (want,) = torch.autograd.grad(eager(x).sum(), x)
    y = model(x).sum()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        same(gradient, want, torch.float32)
    packed = torch.randn(4, 8, requires_grad=True)
    before = packed.detach().clone()
    F.swiglu(packed).sum().backward()
    assert torch.equal(packed, before)


def test_glu_keeps_its_arguments_alone() -> None:
    x = torch.randn(8, 64, requires_grad=True)
    gate, value = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    linear = nn.Linear(64, 64)
    assert kept_by(lambda: linear(T.silu(gate) * value), x.nbytes) == 4
    assert kept_by(lambda: linear(F.swiglu(gate, value)), x.nbytes) == 3
    assert kept_by(lambda: recomputed(lambda: linear(F.swiglu(gate, value))), x.nbytes) == 2
    packed = torch.randn(8, 128, requires_grad=True)
    half = nn.Linear(64, 8)
    assert kept_by(lambda: recomputed(lambda: half(F.swiglu(packed))), packed.nbytes) == 1
    model = nn.Sequential(nn.Linear(64, 128), fusedtrain.nn.SwiGLU(), half)
    assert_same_bits(run_both(model, x))


@pytest.mark.parametrize("name", ["GLU", "SwiGLU", "GEGLU", "ReGLU", "BilinearGLU"])
def test_glu_modules(name: str) -> None:
    module = getattr(fusedtrain.nn, name)(1)
    x = torch.randn(3, 6, 5)
    y = module(x)
    assert y.shape == (3, 3, 5)
    same(torch.jit.script(module)(x), y, torch.float32)
    same(torch.compile(module, backend="aot_eager", fullgraph=True)(x), y, torch.float32)
    assert repr(copy.deepcopy(module)) == repr(module)


# --- gates over space ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sigmoid", "hardsigmoid", "identity", "tanh", "gelu"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gate_over_space(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = torch.randn(3, 10, 6, 5).to(dtype).to(memory_format=layout)
    s, grad = torch.randn(3, 10, 1, 1).to(dtype), torch.randn(3, 10, 6, 5).to(dtype)
    act = (lambda t: t) if name == "identity" else ACTIVATIONS[name].eager
    if name == "hardsigmoid":  # torch's own float64 has factors rounded to float32
        act = lambda t: (t / 6 + 0.5).clamp(0, 1)  # noqa: E731
    results = gradients(lambda x, s: F.gated(x, s, name), x, s, grad=grad)
    eager = gradients(lambda x, s: x * act(s), x, s, grad=grad)
    want = gradients(lambda x, s: x * act(s), x.double(), s.double(), grad=grad.double())
    # Eager rounds the gate to 16 bits before it multiplies; the op does, too.
    if dtype in (torch.float32, torch.float64) or name == "identity":
        same(results[0], eager[0], dtype)
    for a, b in zip(results, want, strict=True):
        torch.testing.assert_close(
            a.double(), b, rtol=4 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype]
        )
    assert results[0].stride() == eager[0].stride()


def test_gates_of_other_shapes_are_eager_torchs() -> None:
    x = torch.randn(3, 4, 5)
    for shape in ((1, 4, 1), (3, 1, 5), (5,), (), (3, 4, 1)):
        s = torch.randn(shape)
        same(F.gated(x, s), x * s.sigmoid(), torch.float32)
        same(F.gated(s, x), s * x.sigmoid(), torch.float32)
    with pytest.raises(RuntimeError, match="must match"):
        F.gated(x, torch.randn(2, 4, 5))
    with pytest.raises(ValueError, match="'nothing' is none of"):
        F.gated(x, x, "nothing")
    with pytest.raises(TypeError, match="has no parameter 'slope'"):
        F.gated(x, x, "sigmoid", slope=1.0)


# --- residual branches ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_scale_drop_path_and_addition(dtype: torch.dtype) -> None:
    for shape, dim in (((3, 7, 12), -1), ((3, 12, 4, 5), 1), ((4, 12), 1)):
        residual, x, grad = (torch.randn(shape).to(dtype) for _ in range(3))
        gamma = torch.randn(shape[dim]).to(dtype)
        keep = torch.tensor([0.0, 2.0, 1.5, 0.0][: shape[0]])
        for branch in (None, keep):

            def eager(
                r: Tensor, x: Tensor, g: Tensor, branch: Any = branch, dim: int = dim
            ) -> Tensor:
                y = x * g.view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
                if branch is not None:
                    y = y * branch.to(y.dtype).view([-1] + [1] * (x.dim() - 1))
                return r + y

            results = gradients(
                lambda r, x, g, b=branch, d=dim: F.residual_add(r, x, g, b, d), residual, x, gamma,
                grad=grad,
            )  # fmt: skip
            want = gradients(eager, *(t.double() for t in (residual, x, gamma)), grad=grad.double())
            for a, b in zip(results, want, strict=True):
                torch.testing.assert_close(
                    a.double(), b, rtol=2 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype]
                )
        alone = F.residual_add(residual, x, branch_scale=keep)
        same(alone, residual + x * keep.to(dtype).view([-1] + [1] * (x.dim() - 1)), dtype)
    same(F.residual_add(residual, x), residual + x, dtype)


def test_residual_add_keeps_no_more_than_eager() -> None:
    x, r = (torch.randn(8, 64, 16, requires_grad=True) for _ in range(2))
    gamma, keep = torch.ones(16), torch.ones(8)
    assert kept_by(lambda: F.residual_add(r, x, gamma.requires_grad_(), keep), x.nbytes) == 1
    assert kept_by(lambda: F.residual_add(r, x, None, keep), x.nbytes) == 0
    eager = lambda: r + x * gamma * keep.view(-1, 1, 1)  # noqa: E731
    assert kept_by(eager, x.nbytes) == 1


def test_mistakes_of_residual_add() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"scale: expected one value for each of 4 channels"):
        F.residual_add(x, x, torch.ones(3))
    with pytest.raises(ValueError, match=r"branch_scale: expected one value for each of 3 samples"):
        F.residual_add(x, x, None, torch.ones(4))
    with pytest.raises(RuntimeError, match="must match"):
        F.residual_add(torch.randn(2, 4), x, torch.ones(4))
    with pytest.raises(IndexError, match="dim: 7 is not a dimension of an input of 2"):
        F.residual_add(x, x, torch.ones(4), dim=7)
    with pytest.raises(IndexError, match="dim: -1 is not a dimension of an input of 0"):
        F.residual_add(x[0, 0], x[0, 0], torch.ones(1))


# --- all of them ---

CALLS: dict[str, Callable[..., Tensor]] = {
    "glu": lambda x, s: F.glu(x, 1),
    "swiglu halves": lambda x, s: F.swiglu(x, dim=1),
    "swiglu": lambda x, s: F.swiglu(x, x.flip(0)),
    "gate": lambda x, s: F.gated(x, s.view(*s.shape, 1)),
    "residual": lambda x, s: F.residual_add(x.flip(0), x, s[0], x.new_full((len(x),), 1.5), 1),
    "bias act": lambda x, s: F.bias_act_dropout(x, s[0], "gelu", dim=1),
    "stylegan": lambda x, s: F.bias_act(x, s[0], dim=1, act="lrelu", clamp=1.0),
}


def arguments(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(3, 4, 5, dtype=dtype, requires_grad=True),
        torch.randn(3, 4, dtype=dtype, requires_grad=True),
    )


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_first_and_second_order(name: str) -> None:
    assert torch.autograd.gradcheck(CALLS[name], arguments())
    assert torch.autograd.gradgradcheck(CALLS[name], arguments())


def test_gradient_of_dropout() -> None:
    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.bias_act_dropout(x, None, "silu", p=0.5)

    x, _ = arguments()
    assert torch.autograd.gradcheck(run, (x,))
    assert torch.autograd.gradgradcheck(run, (x,))


@pytest.mark.parametrize("name", CALLS)
def test_compile_export_and_transforms(name: str) -> None:
    x, s = (t.detach() for t in arguments(torch.float32))
    call = CALLS[name]
    want = call(x, s)
    same(torch.compile(call, backend="aot_eager", fullgraph=True)(x, s), want, torch.float32)

    class Model(nn.Module):
        def forward(self, x: Tensor, s: Tensor) -> Tensor:
            return call(x, s)

    same(torch.export.export(Model(), (x, s)).module()(x, s), want, torch.float32)
    grads = torch.func.grad(lambda x: call(x, s).sum())(x)
    xs = x.clone().requires_grad_()
    call(xs, s).sum().backward()
    same(grads, xs.grad, torch.float32)
    tangents = torch.func.jvp(lambda x: call(x, s), (x,), (torch.ones_like(x),))[1]
    assert tangents.shape == want.shape


@pytest.mark.parametrize("name", CALLS)
def test_other_dtypes_subclasses_and_inference(name: str) -> None:
    call = CALLS[name]
    x, s = (t.detach() for t in arguments(torch.float32))
    want = call(x, s)
    with torch.inference_mode():
        same(call(x, s), want, torch.float32)
    with torch.no_grad():
        same(call(x, s), want, torch.float32)
    parameter = nn.Parameter(x)
    assert call(parameter, s).requires_grad

    class Sub(torch.Tensor):
        pass

    same(call(x.as_subclass(Sub), s).as_subclass(Tensor), want, torch.float32)  # type: ignore[arg-type]
    if name == "glu":
        with pytest.raises(NotImplementedError, match="ComplexFloat"):  # as torch's
            call(x.to(torch.complex64), s)
    elif name not in ("bias act", "stylegan", "swiglu halves", "swiglu"):
        assert call(x.to(torch.complex64), s.to(torch.complex64)).is_complex()
    meta = call(x.to("meta"), s.to("meta"))
    assert meta.shape == want.shape
    empty = call(x[:0], s[:0]) if name in ("glu", "swiglu halves", "swiglu", "gate") else want
    assert empty.shape[1:] == want.shape[1:]


def test_mixed_dtypes_promote_as_in_eager_torch() -> None:
    x, s = torch.randn(2, 4, 3).bfloat16(), torch.randn(2, 4, 1)
    assert F.gated(x, s).dtype is torch.float32
    assert F.residual_add(x, x, torch.ones(3)).dtype is torch.float32
    assert F.bias_act_dropout(x, torch.ones(3), "relu").dtype is torch.float32
    assert F.swiglu(x, x.float()).dtype is torch.float32


def test_autocast() -> None:
    block = nn.Sequential(nn.Linear(16, 32), fusedtrain.nn.SwiGLU(), nn.Linear(16, 16))
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()


OPS = torch.ops.fusedtrain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    x, s = (t.detach().to(dtype) for t in arguments(torch.float32))
    seed = torch.tensor([1, 2])
    out = [torch.empty_like(x), torch.empty_like(x)]
    tests = ("test_schema", "test_faketensor")
    for op, inputs in (
        (OPS.gated, (x, x, 6, 0.0, 0.0)),
        (OPS.gated_backward, (x, x, x, *out, 6, 0.0, 0.0)),
        (OPS.gated_spread, (s.view(*s.shape, 1), x, 6, 0.0, 0.0)),
        (OPS.gated_spread_backward, (x, s.view(*s.shape, 1), x, 6, 0.0, 0.0, True)),
        (OPS.gated_spread_backward, (x, s.view(*s.shape, 1), None, 6, 0.0, 0.0, True)),
        (OPS.gated_spread_backward, (x, s.view(*s.shape, 1), x, 6, 0.0, 0.0, False)),
        (OPS.scale_add, (x, s, x, 1)),
        (OPS.scale_add_backward, (x, x, s, 1, True)),
        (OPS.scale_add_backward, (x, None, s, 1, True)),
        (OPS.bias_act, (x, s[0], seed, 1, 6, 0.0, 0.0, 1.0, -1.0, 0.5)),
        (OPS.bias_act_backward, (x, x, s[0], seed, 1, 6, 0.0, 0.0, 1.0, -1.0, 0.5, True)),
        (OPS.bias_act_backward, (x, x, None, None, 1, 6, 0.0, 0.0, 1.0, 2.0, 0.0, False)),
    ):
        torch.library.opcheck(op.default, inputs, test_utils=tests)


def test_every_activation_has_its_own_slope_in_every_chain() -> None:
    """fewbit's CPU fallback computed tanhshrink for every activation."""
    x = torch.linspace(-4, 4, 200, requires_grad=True)
    for name, row in ACTIVATIONS.items():
        if row.tensors:
            continue
        (want,) = torch.autograd.grad(row.eager(x).sum(), x)
        kinds = dict(zip(row.parameters, row.example, strict=True))
        label = "gelu" if name == "gelu_tanh" else name
        kinds |= {"approximate": "tanh"} if name == "gelu_tanh" else {}
        for call in (
            lambda label=label, kinds=kinds: F.gated(torch.ones_like(x), x, label, **kinds),
            lambda label=label, kinds=kinds: F.bias_act_dropout(x, None, label, **kinds),
        ):
            (gradient,) = torch.autograd.grad(call().sum(), x)
            torch.testing.assert_close(gradient, want, rtol=1e-4, atol=2e-5, msg=name)


def test_names() -> None:
    module = importlib.import_module("fusedtrain.functional")
    for name in ("glu", "swiglu", "geglu", "reglu", "bilinear_glu", "gated", "residual_add",
                 "dropout", "bias_act_dropout", "bias_act"):  # fmt: skip
        assert callable(getattr(module, name))
    assert philox(torch.tensor([0, 0]), 0).numel() == 0
