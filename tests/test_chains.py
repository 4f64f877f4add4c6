"""Functions and modules of the pointwise chains: eager torch's numbers and errors, gradients of any
order, what is kept for backward, random numbers, everything around them.

tests/test_chain_kernels.py has the kernels.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from _cases import DTYPES
from test_recompute import assert_same_bits, counted, kept_by, recomputed, run_both
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.reference import ACTIVATIONS, chains

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 5e-3, torch.bfloat16: 4e-2}

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


def same(found: Any, want: Any, dtype: torch.dtype) -> None:
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found, want.to(found.dtype), rtol=limit, atol=limit)


def gradients(function: Callable[..., Tensor], *tensors: Tensor, grad: Tensor) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    output = function(*inputs)
    assert output.dtype == grad.dtype
    return [output.detach(), *torch.autograd.grad(output, inputs, grad)]


# --- gated linear units ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GLUS)
def test_glu_of_two_tensors(name: str, dtype: torch.dtype) -> None:
    ours, gate_of = GLUS[name]
    g, v, grad = (torch.randn(4, 6, 10).to(dtype) for _ in range(3))
    found = gradients(ours, g, v, grad=grad)
    want = gradients(
        lambda g, v: gate_of(g) * v, g.double(), v.double(), grad=grad.double()
    )  # fmt: skip
    for a, b in zip(found, want, strict=True):
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
            found = gradients(run, x, grad=grad)
            want = gradients(lambda x, dim=dim: eager(x, dim), x, grad=grad)
            same(found[0], want[0], torch.float32)
            same(found[1], want[1], torch.float32)
            assert found[1].stride() == x.stride()


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
        (found,) = torch.autograd.grad(y, x, retain_graph=True)
        same(found, want, torch.float32)
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
    found = gradients(lambda x, s: F.gated(x, s, name), x, s, grad=grad)
    eager = gradients(lambda x, s: x * act(s), x, s, grad=grad)
    want = gradients(lambda x, s: x * act(s), x.double(), s.double(), grad=grad.double())
    # Eager rounds the gate to 16 bits before it multiplies, and so does this.
    if dtype in (torch.float32, torch.float64) or name == "identity":
        same(found[0], eager[0], dtype)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(
            a.double(), b, rtol=4 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype]
        )
    assert found[0].stride() == eager[0].stride()


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

            found = gradients(
                lambda r, x, g, b=branch, d=dim: F.residual_add(r, x, g, b, d), residual, x, gamma,
                grad=grad,
            )  # fmt: skip
            want = gradients(eager, *(t.double() for t in (residual, x, gamma)), grad=grad.double())
            for a, b in zip(found, want, strict=True):
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


# --- bias, activation, dropout ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["relu", "gelu", "silu", "leaky_relu", "relu6", "hardtanh", "identity"]
)
def test_bias_and_activation(name: str, dtype: torch.dtype) -> None:
    act = (lambda t: t) if name == "identity" else ACTIVATIONS[name].eager
    x, grad = (torch.randn(4, 6, 10).to(dtype) for _ in range(2))
    for dim in (-1, 1):
        bias = torch.randn(x.shape[dim]).to(dtype)
        shape = [-1 if d == dim % 3 else 1 for d in range(3)]
        arguments = {} if name in ("identity", "relu", "gelu", "silu", "relu6") else dict(
            zip(ACTIVATIONS[name].parameters, ACTIVATIONS[name].example, strict=True)
        )  # fmt: skip
        found = gradients(
            lambda x, b, d=dim, a=arguments: F.bias_act_dropout(x, b, name, dim=d, **a), x, bias,
            grad=grad,
        )  # fmt: skip
        want = gradients(
            lambda x, b, s=shape: act(x + b.view(s)), x.double(), bias.double(), grad=grad.double()
        )
        jumps = name in ("relu6", "hardtanh") and dtype.itemsize == 2
        for a, b in list(zip(found, want, strict=True))[: 1 if jumps else 3]:
            torch.testing.assert_close(
                a.double(), b, rtol=2 * TOLERANCE[dtype], atol=12 * TOLERANCE[dtype]
            )


def test_dropout_of_bounded_activations() -> None:
    """Their output tells the slope by a comparison with the bound, which a factor would move."""
    x = torch.linspace(-8, 8, 4001, requires_grad=True)
    for name in ("relu6", "hardtanh", "hardsigmoid"):
        torch.manual_seed(3)
        y = F.bias_act_dropout(x, None, name, p=0.4)
        (found,) = torch.autograd.grad(y.sum(), x)
        kept = y.detach() != 0
        (slope,) = torch.autograd.grad(ACTIVATIONS[name].eager(x).sum(), x)
        want = slope / 0.6
        inside = kept & (want != 0)
        torch.testing.assert_close(found[inside], want[inside])
        assert (found[want == 0] == 0).all()


def test_dropout_has_the_right_rate_and_size() -> None:
    x = torch.ones(1 << 20)
    for p in (0.1, 0.5, 0.9):
        y = F.dropout(x, p)
        assert abs((y == 0).float().mean() - p) < 2e-3
        assert abs(y.mean() - 1) < 1e-2
        assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}
    assert F.dropout(x, 0.5, training=False) is x
    assert F.dropout(x, 0.0) is x
    assert (F.dropout(x, 1.0) == 0).all()
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(x, p)


def test_masks_of_tiles_and_calls_are_independent() -> None:
    """xformers' kernel gave every tile of 32 rows the same mask."""
    x = torch.ones(256, 512)
    kept = (F.dropout(x, 0.5) != 0).float()
    for rows in (1, 2, 16, 32, 64, 128):
        agreement = (kept[:-rows] == kept[rows:]).float().mean()
        assert abs(agreement - 0.5) < 0.01, rows
        agreement = (kept[:, :-rows] == kept[:, rows:]).float().mean()
        assert abs(agreement - 0.5) < 0.01, rows
    again = (F.dropout(x, 0.5) != 0).float()
    assert abs((kept == again).float().mean() - 0.5) < 0.01
    # Seeds of 126 random bits.
    seeds = {tuple(fusedtrain._chains.new_seed(x).tolist()) for _ in range(100)}
    assert len(seeds) == 100
    assert max(abs(s[0]) for s in seeds) > 2**60


def test_dropout_follows_the_seed_and_keeps_sixteen_bytes() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    torch.manual_seed(5)
    first = F.dropout(x, 0.3)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert torch.equal(F.dropout(x, 0.3), first)
    assert torch.equal(torch.get_rng_state(), state)
    with counted() as kept:
        y = F.dropout(x, 0.3)
    assert sum(kept.values()) == 16
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g != 0, y != 0)
    bias = torch.zeros(64, requires_grad=True)
    assert kept_by(lambda: F.bias_act_dropout(x, bias, "relu", p=0.3), x.nbytes) == 1  # the output
    assert kept_by(lambda: F.bias_act_dropout(x, bias, "gelu", p=0.3), x.nbytes) == 1  # the input
    eager = lambda: T.dropout(T.gelu(x + bias), 0.3)  # noqa: E731
    assert kept_by(eager, x.nbytes) == 2  # on the CPU, the mask in float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_and_checkpoint(reentrant: bool) -> None:
    linear = nn.Linear(32, 32)
    block = lambda x: F.bias_act_dropout(linear(x), None, "gelu", p=0.5)  # noqa: E731
    x = torch.randn(16, 32, requires_grad=True)
    found = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        y = run(x)
        found.append(
            [y.detach(), *torch.autograd.grad(y.square().sum(), [x, linear.weight])]
            if not reentrant
            else [y.detach()]
        )
        if reentrant:
            x.grad = linear.weight.grad = None
            y.square().sum().backward()
            found[-1] += [x.grad.clone(), linear.weight.grad.clone()]
    assert_same_bits(found)


def test_dropout_is_computed_again() -> None:
    model = nn.Sequential(
        nn.Linear(32, 32), fusedtrain.nn.BiasActDropout(32, "gelu", 0.5), nn.Linear(32, 32),
        fusedtrain.nn.Dropout(0.5), nn.Linear(32, 32),
    )  # fmt: skip
    x = torch.randn(16, 32)
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        twin = copy.deepcopy(model)
        y = recomputed(twin, x) if recompute else twin(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad for p in twin.parameters() if p.grad is not None)])
    assert_same_bits(found)


def test_modules_have_parameters_and_states() -> None:
    """xformers' bias was a tensor that no optimizer and no checkpoint knew."""
    layer = fusedtrain.nn.BiasActDropout(8, "leaky_relu", 0.1, negative_slope=0.2)
    assert [n for n, _ in layer.named_parameters()] == ["bias"]
    assert list(layer.state_dict()) == ["bias"]
    x = torch.randn(4, 8)
    layer.eval()
    same(layer(x), T.leaky_relu(x, 0.2), torch.float32)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    with pytest.raises(ValueError, match="none of"):
        fusedtrain.nn.BiasActDropout(8, "glu")
    with pytest.raises(ValueError, match="dropout probability"):
        fusedtrain.nn.BiasActDropout(8, "relu", 2.0)
    dropout = fusedtrain.nn.Dropout(0.5)
    assert isinstance(dropout, nn.Dropout)
    assert dropout.eval()(x) is x


# --- StyleGAN's op ---


def stylegan(
    x: Tensor, b: Tensor | None, dim: int, act: str, alpha: Any, gain: Any, clamp: Any
) -> Tensor:
    """What its paper's reference path computes (arXiv:2106.12423, appendix)."""
    functions: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
        "linear": (lambda x: x, 1),
        "relu": (torch.relu, 2**0.5),
        "lrelu": (lambda x: T.leaky_relu(x, 0.2 if alpha is None else alpha), 2**0.5),
        "tanh": (torch.tanh, 1),
        "sigmoid": (torch.sigmoid, 1),
        "elu": (T.elu, 1),
        "selu": (T.selu, 1),
        "softplus": (T.softplus, 1),
        "swish": (lambda x: torch.sigmoid(x) * x, 2**0.5),
    }
    function, standard = functions[act]
    if b is not None:
        x = x + b.reshape([-1 if d == dim else 1 for d in range(x.dim())])
    y = function(x) * (standard if gain is None else gain)
    return y if clamp is None else y.clamp(-clamp, clamp)


ACTS = ["linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_bias_act_is_stylegans(act: str, dtype: torch.dtype) -> None:
    x, grad = (torch.randn(4, 6, 5, 7).to(dtype) for _ in range(2))
    for options in ({}, {"gain": 0.5}, {"clamp": 0.7}, {"gain": 2.0, "clamp": 1.1, "alpha": 0.1}):
        for dim in (1, 3):
            b = torch.randn(x.shape[dim]).to(dtype)
            full = {"alpha": None, "gain": None, "clamp": None} | options
            found = gradients(
                lambda x, b, d=dim, o=options: F.bias_act(x, b, d, act, **o), x, b, grad=grad
            )
            want = gradients(
                lambda x, b, d=dim, o=full: stylegan(x, b, d, act, *o.values()),
                x.double(), b.double(), grad=grad.double(),
            )  # fmt: skip
            jumps = "clamp" in options and dtype.itemsize == 2
            for a, w in list(zip(found, want, strict=True))[: 1 if jumps else 3]:
                torch.testing.assert_close(
                    a.double(), w, rtol=2 * TOLERANCE[dtype], atol=20 * TOLERANCE[dtype]
                )
    same(F.bias_act(x, act=act), stylegan(x, None, 1, act, None, None, None), dtype)


@pytest.mark.parametrize("act", ACTS)
def test_bias_act_keeps_one_tensor(act: str) -> None:
    """StyleGAN's keeps input and output for tanh, sigmoid, elu, selu and softplus."""
    x, b = torch.randn(4, 8, 6, 6, requires_grad=True), torch.randn(8, requires_grad=True)
    assert kept_by(lambda: F.bias_act(x, b, act=act), x.nbytes) == (0 if act == "linear" else 1)


@pytest.mark.parametrize("act", ACTS)
def test_bias_act_is_differentiable_twice(act: str) -> None:
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for options in ({}, {"clamp": 0.6}):
        run = lambda x, b, o=options: F.bias_act(x, b, 1, act, **o)  # noqa: E731
        assert torch.autograd.gradcheck(run, (x, b))
        assert torch.autograd.gradgradcheck(run, (x, b))


@pytest.mark.skipif(
    os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") < 12 << 30,
    reason="needs 12 GiB of free memory",
)
def test_bias_act_of_many_elements() -> None:
    """StyleGAN's refuses more than 2^31 - 1."""
    x = torch.zeros(2**31 + 24, dtype=torch.bfloat16)
    x[-3:] = torch.tensor([-2.0, 1.0, 3.0])
    y = F.bias_act(x, act="lrelu", gain=2.0, clamp=4.0)
    assert y[-4:].tolist() == [0.0, -0.80078125, 2.0, 4.0]


def test_mistakes_of_bias_act() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="act: 'gelu' is none of linear, relu"):
        F.bias_act(x, act="gelu")
    with pytest.raises(ValueError, match="clamp: must be at least 0, not -1"):
        F.bias_act(x, clamp=-1)
    with pytest.raises(ValueError, match=r"bias: expected one value for each of 4 channels"):
        F.bias_act(x, torch.ones(3))
    with pytest.raises(IndexError, match="dim: 2 is not a dimension"):
        F.bias_act(x, torch.ones(4), 2)
    same(F.bias_act(x, act="relu", gain=0), 0 * x, torch.float32)


# --- all of them ---

CALLS: dict[str, Callable[..., Tensor]] = {
    "glu": lambda x, s: F.glu(x, 1),
    "swiglu halves": lambda x, s: F.swiglu(x, dim=1),
    "swiglu": lambda x, s: F.swiglu(x, x.flip(0)),
    "gate": lambda x, s: F.gated(x, s.view(*s.shape, 1)),
    "residual": lambda x, s: F.residual_add(x.flip(0), x, s[0], x.new_full((len(x),), 1.5), 1),
    "bias act": lambda x, s: F.bias_act_dropout(x, s[0], "gelu", dim=1),
    "stylegan": lambda x, s: F.bias_act(x, s[0], act="lrelu", clamp=1.0),
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
    if name not in ("bias act", "stylegan", "swiglu halves", "swiglu"):
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
    for op, given in (
        (OPS.gated, (x, x, 6, 0.0, 0.0)),
        (OPS.gated_backward, (x, x, x, *out, 6, 0.0, 0.0)),
        (OPS.scale_add, (x, s, x, 1)),
        (OPS.scale_add_backward, (x, x, s, 1, True)),
        (OPS.scale_add_backward, (x, None, s, 1, True)),
        (OPS.bias_act, (x, s[0], seed, 1, 6, 0.0, 0.0, 1.0, -1.0, 0.5)),
        (OPS.bias_act_backward, (x, x, s[0], seed, 1, 6, 0.0, 0.0, 1.0, -1.0, 0.5, True)),
        (OPS.bias_act_backward, (x, x, None, None, 1, 6, 0.0, 0.0, 1.0, 2.0, 0.0, False)),
    ):
        torch.library.opcheck(op.default, given, test_utils=tests)


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
            (found,) = torch.autograd.grad(call().sum(), x)
            torch.testing.assert_close(found, want, rtol=1e-4, atol=2e-5, msg=name)


def test_names() -> None:
    module = importlib.import_module("fusedtrain.functional")
    for name in ("glu", "swiglu", "geglu", "reglu", "bilinear_glu", "gated", "residual_add",
                 "dropout", "bias_act_dropout", "bias_act"):  # fmt: skip
        assert callable(getattr(module, name))
    assert chains.philox(torch.tensor([0, 0]), 0).numel() == 0
