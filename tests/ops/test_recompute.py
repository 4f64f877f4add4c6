"""`fusedtrain.recompute`: what is kept, and that gradients have the same bits."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain import _recompute
from fusedtrain.nn import BatchNormAct2d
from helpers.recompute import Blocks, assert_same_bits, kept_by, recomputed, run_both


class Computed:
    """How often an output is computed again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        compute = _recompute.Recipe._compute

        def counting(recipe: _recompute.Recipe) -> Tensor:
            self.count += 1
            return compute(recipe)

        monkeypatch.setattr(_recompute.Recipe, "_compute", counting)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    return Computed(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("act", ["relu", "silu", "elu", "gelu", "hardswish", "mish"])
def test_conv_norm_act_conv_keeps_two_tensors(
    act: str, layout: torch.memory_format, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    norm = BatchNormAct2d(8, act_layer=act)
    model: Any = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), norm, nn.Conv2d(8, 8, 1))
    model[0].to(dtype), model[2].to(dtype)
    if dtype is torch.float64:
        norm.to(dtype)
    x = torch.randn(4, 8, 6, 5).to(dtype).contiguous(memory_format=layout).requires_grad_()
    assert kept_by(lambda: model(x), x.nbytes) == 3
    assert kept_by(lambda: recomputed(model, x), x.nbytes) == 2
    assert_same_bits(run_both(model, x))


@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_block_outputs_come_from_the_block_before(count: int, act: str, computed: Computed) -> None:
    """Kept: the input, two convolutions' outputs a block, and every so many blocks an output."""
    model, x = Blocks(count, act), torch.randn(4, 8, 6, 5)
    x.requires_grad_()
    chain = _recompute.LONGEST
    kept = kept_by(lambda: recomputed(model, x), x.nbytes)
    # The stem's recipe is the first of the chain. The last block's output: nobody but its own ReLU
    # needs it, which SiLU does not.
    outputs = [n for n in range(1, count + 1) if n % (chain + 1) == chain]
    if act == "silu":
        outputs = [n for n in outputs if n < count]
    assert kept == 1 + 2 * count + len(outputs)
    assert_same_bits(run_both(model, x))
    # Each output once: norm1 and block outputs, the stem; but for those that were kept.
    needed = 1 + count + (count if act == "relu" else count - 1) - len(outputs)
    assert computed.count == needed


def test_nothing_is_gained_where_nothing_else_is_kept() -> None:
    """ReLU keeps its output alone, so the output has no recipe; norms that are frozen likewise."""
    conv = nn.Conv2d(8, 8, 1)
    x = torch.randn(4, 8, 6, 5, requires_grad=True)
    shifted = x + 1
    assert kept_by(lambda: recomputed(lambda: conv(F.relu(shifted))), x.nbytes) == 1
    frozen = BatchNormAct2d(8).eval().requires_grad_(False)
    assert kept_by(lambda: recomputed(lambda: conv(frozen(shifted))), x.nbytes) == 1
    assert kept_by(lambda: recomputed(lambda: conv(F.silu(shifted))), x.nbytes) == 1  # its input


@pytest.mark.parametrize("name", ["silu", "gelu", "mish", "hardswish", "quick_gelu", "tanhshrink"])
def test_activations_that_keep_their_input(name: str) -> None:
    linear = nn.Linear(16, 16)
    x = torch.randn(4, 6, 16, requires_grad=True)
    run = lambda: linear(getattr(F, name)(linear(x)))  # noqa: E731
    assert kept_by(run, x.nbytes) == 3
    assert kept_by(lambda: recomputed(run), x.nbytes) == 2
    module: Any = nn.Sequential(linear, fusedtrain.nn.GELU(), nn.Linear(16, 16))
    assert_same_bits(run_both(module, x))


def test_prelu_is_computed_again() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), fusedtrain.nn.PReLU(8), nn.Conv2d(8, 8, 1))
    x = torch.randn(4, 8, 6, 5)
    assert kept_by(lambda: recomputed(model, x.requires_grad_()), x.nbytes) == 2
    assert_same_bits(run_both(model, x))


class Consumers(nn.Module):
    """All at once: conv, linear on a view, pooling, a product, a sum, a slice, a matmul."""

    def __init__(self, pixels: int = 48) -> None:
        super().__init__()
        self.norm = BatchNormAct2d(8, act_layer="silu")
        self.conv, self.linear = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(pixels, pixels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = self.conv(y) * y + nn.functional.max_pool2d(y, 3, 1, 1)
        z = z + self.linear(y.flatten(2)).view_as(y)
        z = z + (y[:, 2:5] * y[:, 3:6]).sum(1, keepdim=True)
        products: Tensor = y.flatten(2) @ y.flatten(2).transpose(1, 2)
        return z + products.mean()


def test_every_consumer_gets_it_and_it_is_computed_once(computed: Computed) -> None:
    x = torch.randn(2, 8, 6, 8)
    assert_same_bits(run_both(Consumers(), x))
    assert computed.count == 1


def test_an_output_made_of_a_view_of_another(computed: Computed) -> None:
    """Else the view would keep what its recipe is to replace."""
    norm, linear = BatchNormAct2d(8, act_layer="silu"), nn.Linear(24, 24)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = copy.deepcopy(norm), copy.deepcopy(linear)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.norm(x).flatten(2)
            return self.linear(F.swiglu(tokens)) + self.linear(F.gelu(tokens[..., 24:]))

    x = torch.randn(4, 8, 6, 8, requires_grad=True)
    assert kept_by(lambda: recomputed(Model(), x), x.nbytes) == 1
    assert_same_bits(run_both(Model(), x))
    assert computed.count == 3


def test_retained_graph_and_partial_gradients(computed: Computed) -> None:
    model, x = Consumers(), torch.randn(2, 8, 6, 8, requires_grad=True)
    want = model(x).square().sum()
    weights = [*model.conv.parameters(), *model.linear.parameters()]
    wanted = torch.autograd.grad(want, [x, *weights], retain_graph=True)
    with fusedtrain.recompute():
        loss = model(x).square().sum()
    for _ in range(3):
        gradients = torch.autograd.grad(loss, [x, *weights], retain_graph=True)
        assert all(map(torch.equal, gradients, wanted))
    assert computed.count == 3
    some = torch.autograd.grad(loss, weights[:1], retain_graph=True)
    assert torch.equal(some[0], wanted[1])
    assert computed.count == 4
    recipes = [o for o in gc.get_objects() if type(o) is _recompute.Recipe]
    assert recipes
    assert all(r._value is None for r in recipes), "kept after a partial backward"


def test_a_branch_outlives_the_backward_of_another() -> None:
    """The first head's backward frees the norm's graph. The second asks for its own weights."""
    norm, a, b = BatchNormAct2d(4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    with fusedtrain.recompute():
        y = norm(x)
        first, second = a(y).sum(), b(y).sum()
    first.backward()
    (gradient,) = torch.autograd.grad(second, [b.weight])
    expected = norm(x).sum((0, 2, 3)).expand(4, 4)
    torch.testing.assert_close(gradient.flatten(1), expected)


def test_second_derivatives() -> None:
    small = Consumers(pixels=6).double().eval()
    x = torch.randn(2, 8, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: recomputed(small, x), (x,), nondet_tol=0)
