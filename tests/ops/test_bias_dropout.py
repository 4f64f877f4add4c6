"""Bias + activation + dropout, and StyleGAN's bias_act, as functions and modules: numbers, errors,
masks, what is kept for backward.

test_chain_kernels.py has the kernels, test_chains.py the other chains.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import fusedtrain
import fusedtrain.functional as F
from fusedtrain.ops.bias_act import new_seed
from fusedtrain.reference import ACTIVATIONS
from helpers.batch_norm import last
from helpers.chains import same
from helpers.recompute import assert_same_bits, counted, kept_by, recomputed


def test_dropout_of_bounded_activations() -> None:
    """Backward compares their output with the bound. Dropout's factor would move the output."""
    x = torch.linspace(-8, 8, 4001, requires_grad=True)
    for name in ("relu6", "hardtanh", "hardsigmoid"):
        torch.manual_seed(3)
        y = F.bias_act_dropout(x, None, name, p=0.4)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        kept = y.detach() != 0
        (slope,) = torch.autograd.grad(ACTIVATIONS[name].eager(x).sum(), x)
        want = slope / 0.6
        inside = kept & (want != 0)
        torch.testing.assert_close(gradient[inside], want[inside])
        assert (gradient[want == 0] == 0).all()


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


# The two elements of a word, neighbours, blocks, vectors, rows of 768, tiles and tasks of kernels.
LAGS = (4, 1, 2, 3, 5, 7, 8, 16, 32, 64, 768, 1024, 16384)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_masks_are_independent(p: float) -> None:
    """Rates, and covariances of elements, of steps and of seeds that differ in one bit: each within
    5 standard deviations, for fixed seeds. xformers' kernel gave tiles of 32 rows one mask."""
    count, scale = 1 << 20, p * (1 - p)
    x = torch.ones(count)
    torch.manual_seed(11)
    first, step = new_seed(x), new_seed(x)
    nearby = [first + torch.tensor(bit) for bit in ((1, 0), (0, 1), (1 << 32, 0), (0, 1 << 32))]

    def dropped(seed: Tensor) -> Tensor:
        y = torch.ops.fusedtrain.bias_act(x, None, seed, None, -1, -1, 0.0, 0.0, 1.0, -1.0, p)
        return (y == 0).double() - p

    def check(a: Tensor, b: Tensor) -> None:
        assert abs(a.dot(b)) <= 5 * scale * len(a) ** 0.5

    a = dropped(first)
    for lag in LAGS:
        check(a[:-lag], a[lag:])
    check(a.view(-1, 8)[:, :4].flatten(), a.view(-1, 8)[:, 4:].flatten())
    for seed in (first, step, *nearby):
        b = dropped(seed)
        assert abs(b.sum()) <= 5 * (scale * count) ** 0.5
        if seed is not first:
            check(a, b)
    # Seeds of 126 random bits.
    seeds = [new_seed(x).tolist() for _ in range(100)]
    assert len({tuple(seed) for seed in seeds}) == 100
    assert max(abs(seed[0]) for seed in seeds) > 2**60


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


# Tensors that one pass does not take, and settings that drop nothing or all: input, residual, p.
ADDED: dict[str, tuple[Callable[[], tuple[Any, Any]], float]] = {
    "one pass": (lambda: (torch.randn(3, 5, 7), torch.randn(3, 5, 7)), 0.3),
    "channels last": (lambda: (last(2, 8, 5, 3), last(2, 8, 5, 3)), 0.3),
    "two layouts": (lambda: (last(2, 8, 5, 3), torch.randn(2, 8, 5, 3)), 0.3),
    "sliced": (lambda: (torch.randn(4, 9)[:, 1:8], torch.randn(4, 9)[:, 1:8]), 0.3),
    "broadcast": (lambda: (torch.randn(3, 5, 7), torch.randn(5, 1)), 0.3),
    "a larger residual": (lambda: (torch.randn(7), torch.randn(3, 7)), 0.3),
    "a number": (lambda: (torch.randn(3, 7), 2.5), 0.3),
    "promoted": (lambda: (torch.randn(3, 7).bfloat16(), torch.randn(3, 7)), 0.3),
    "promoted input": (lambda: (torch.randn(3, 7), torch.randn(3, 7).half()), 0.3),
    "no dimension": (lambda: (torch.randn(()), torch.randn(())), 0.3),
    "empty": (lambda: (torch.randn(0, 7), torch.randn(0, 7)), 0.3),
    "0": (lambda: (torch.randn(3, 7), torch.randn(3, 7)), 0.0),
    "1": (lambda: (torch.randn(3, 7), torch.randn(3, 7)), 1.0),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ADDED)
def test_dropout_add_is_the_sum_of_residual_and_dropout(name: str, training: bool) -> None:
    """Dtype, layout, mask and gradients of the two steps, also under autocast, and the state of the
    generator behind them."""
    make, p = ADDED[name]
    input, residual = make()
    leaves = [t.requires_grad_() for t in (input, residual) if isinstance(t, Tensor)]
    for enabled in (False, True):
        results = []
        for function in (F.dropout_add, lambda x, r, p, on: r + F.dropout(x, p, on)):
            torch.manual_seed(4)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                y = function(input, residual, p, training)
            grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
            gradients = torch.autograd.grad(y, leaves, grad)
            results.append([y.detach(), *gradients, torch.get_rng_state()])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, check_stride=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dropout_add_beside_float64(dtype: torch.dtype) -> None:
    """Output and gradients for the mask of the call, and what it keeps."""
    x, r = (torch.randn(9, 117).to(dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(9, 117).to(dtype)
    with counted() as kept:
        y = F.dropout_add(x, r, 0.3)
    assert sum(kept.values()) == 16
    gx, gr = torch.autograd.grad(y, (x, r), grad, retain_graph=True)
    mask = (gx != 0).double() / 0.7
    digits = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(gx.double(), grad.double() * mask, **digits)
    assert torch.equal(gr, grad)
    want = r.detach().double() + x.detach().double() * mask
    digits["atol"] = torch.finfo(dtype).eps
    torch.testing.assert_close(y.detach().double(), want, **digits)
    assert abs((mask == 0).double().mean() - 0.3) < 5 * (0.21 / x.numel()) ** 0.5
    # One of the two alone, with gradients that can be differentiated.
    for leaf, want in ((x, gx), (r, gr)):
        (g,) = torch.autograd.grad(y, leaf, grad, retain_graph=True, create_graph=True)
        assert torch.equal(g.detach(), want)
    torch.manual_seed(5)
    alone = F.dropout_add(x.detach(), r, 0.3)
    assert torch.equal(torch.autograd.grad(alone, r, grad)[0], grad)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        F.dropout_add(x, r, 1.5)
    with pytest.raises(RuntimeError, match="must match"):
        F.dropout_add(x, r[:, 1:], 0.3)


@pytest.mark.parametrize("hooks", [nullcontext, save_on_cpu], ids=["", "save_on_cpu"])
@pytest.mark.parametrize("name", ["identity", "relu6", "hardsigmoid", "gelu", "relu", "dropout"])
def test_the_mask_is_of_elements_not_of_the_order_of_the_gradient(name: str, hooks: Any) -> None:
    """The gradient of a channels_last output comes contiguous, as does what save_on_cpu had."""
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    bias = torch.zeros(3, requires_grad=True)
    with hooks():
        if name == "dropout":
            y = F.dropout(x, 0.5)
        else:
            y = F.bias_act_dropout(x, bias, name, 0.5, dim=1)
    weight = torch.randn(x.shape)
    kept = (y != 0) if name != "gelu" else (y != 0) | (x == 0)
    (y * weight).sum().backward()
    plain = x.detach().requires_grad_()
    f = getattr(F, name) if name not in ("dropout", "identity") else torch.clone
    (f(plain) * 2 * weight * kept).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)
    if name != "dropout":
        torch.testing.assert_close(bias.grad, plain.grad.sum((0, 2, 3)), rtol=1e-4, atol=1e-5)
    # Differentiable gradients, too.
    torch.manual_seed(0)
    y = F.dropout(x, 0.5).transpose(1, 2)
    (g,) = torch.autograd.grad((y * weight.transpose(1, 2)).sum(), x, create_graph=True)
    assert torch.equal(g, torch.where(y.transpose(1, 2) != 0, 2 * weight, 0.0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_and_checkpoint(reentrant: bool) -> None:
    linear = nn.Linear(32, 32)
    block = lambda x: F.bias_act_dropout(linear(x), None, "gelu", p=0.5)  # noqa: E731
    x = torch.randn(16, 32, requires_grad=True)
    runs = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        y = run(x)
        runs.append(
            [y.detach(), *torch.autograd.grad(y.square().sum(), [x, linear.weight])]
            if not reentrant
            else [y.detach()]
        )
        if reentrant:
            x.grad = linear.weight.grad = None
            y.square().sum().backward()
            runs[-1] += [x.grad.clone(), linear.weight.grad.clone()]
    assert_same_bits(runs)


def test_dropout_is_computed_again() -> None:
    model = nn.Sequential(
        nn.Linear(32, 32), fusedtrain.nn.BiasActDropout(32, "gelu", 0.5), nn.Linear(32, 32),
        fusedtrain.nn.Dropout(0.5), nn.Linear(32, 32),
    )  # fmt: skip
    x = torch.randn(16, 32)
    runs = []
    for recompute in (False, True):
        torch.manual_seed(1)
        twin = copy.deepcopy(model)
        y = recomputed(twin, x) if recompute else twin(x)
        y.square().sum().backward()
        runs.append([y.detach(), *(p.grad for p in twin.parameters() if p.grad is not None)])
    assert_same_bits(runs)


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

ACTS = ["linear", "relu", "lrelu", "tanh", "sigmoid", "elu", "selu", "softplus", "swish"]


@pytest.mark.parametrize("act", ACTS)
def test_bias_act_keeps_one_tensor(act: str) -> None:
    """StyleGAN's keeps input and output for tanh, sigmoid, elu, selu and softplus."""
    x, b = torch.randn(4, 8, 6, 6, requires_grad=True), torch.randn(8, requires_grad=True)
    assert kept_by(lambda: F.bias_act(x, b, dim=1, act=act), x.nbytes) == (
        0 if act == "linear" else 1
    )


@pytest.mark.long  # 35 s, most of which is page faults
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
        F.bias_act(x, torch.ones(4), dim=2)
    with pytest.raises(
        ValueError, match=r"4 channels \(dim=-1\), got shape \(3,\); dim=0 would fit"
    ):
        F.bias_act_dropout(x, torch.ones(3))
    same(F.bias_act(x, act="relu", gain=0), 0 * x, torch.float32)


def test_bias_act_has_the_default_dim_of_bias_act_dropout() -> None:
    x, bias = torch.randn(2, 3, 5), torch.randn(5)
    same(F.bias_act(x, bias, act="relu", gain=1), F.bias_act_dropout(x, bias, "relu"), x.dtype)
    assert F.bias_act(x, bias, act="relu", gain=1).equal((x + bias).relu())


def test_bias_act_by_position_warns_and_works() -> None:
    """StyleGAN's calls; "relu" in the third place gave "'<=' not supported"."""
    x, bias = torch.randn(2, 3, 5), torch.randn(3)
    want = F.bias_act(x, bias, dim=1, act="lrelu", alpha=0.1, gain=2.0, clamp=1.0)
    with pytest.warns(
        DeprecationWarning, match="pass dim, act, alpha, gain, clamp by keyword"
    ) as w:
        assert F.bias_act(x, bias, 1, "lrelu", 0.1, 2.0, 1.0).equal(want)
    assert w[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="pass dim by keyword"):
        assert F.bias_act(x, bias, 1, act="lrelu", alpha=0.1, gain=2.0, clamp=1.0).equal(want)
    with pytest.raises(TypeError, match="dim: expected an integer, got 'relu'; pass act='relu'"):
        F.bias_act(x, bias, "relu")
    with pytest.raises(TypeError, match="at most 7 arguments, got 8"):
        F.bias_act(x, bias, 1, "relu", None, None, None, None)


@pytest.mark.parametrize("act", ["relu", "lrelu", "sigmoid", "tanh"])
def test_small_gains_in_float16(act: str) -> None:
    """Backward takes the slope from the output, which would have lost its digits."""
    leaf, want = (
        torch.tensor([0.01, 0.02, 1, 3, -1], dtype=torch.float16, requires_grad=True)
        for _ in range(2)
    )
    F.bias_act(leaf, act=act, gain=1e-6).backward(torch.full((5,), 1e4, dtype=torch.float16))
    F.bias_act(want.float(), act=act, gain=1e-6).backward(torch.full((5,), 1e4))
    torch.testing.assert_close(leaf.grad, want.grad, rtol=5e-3, atol=1e-4)
