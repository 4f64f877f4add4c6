"""RMS and layer norms written out: the formulas that convert makes one op, and others."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusedtrain

WIDTH = 24


class Norm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.other = nn.Parameter(torch.linspace(0.5, 2, WIDTH))
        self.eps = eps


class Llama(Norm):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class T5(Norm):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class Gemma(Norm):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Divided(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y / torch.sqrt(torch.mean(y * y, dim=-1, keepdim=True) + self.eps)).to(x) * 2**0


class Bare(Norm):
    """Without a weight, and as wide as the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 / (x.square().mean((-1,), True) + self.eps).sqrt())


class Powered(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (self.eps + torch.mean(x**2, -1, keepdim=True)) ** -0.5


WRITTEN = [Llama, T5, Gemma, Bare, Powered]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("cls", WRITTEN)
@pytest.mark.parametrize(("of_input", "of_weight"), [*itertools.product(DTYPES, DTYPES)])
def test_written(cls: type[Norm], of_input: torch.dtype, of_weight: torch.dtype) -> None:
    """Dtypes are those of the stock forward. Numbers are as near to float64, or nearer."""
    torch.manual_seed(0)
    stock = nn.Sequential(cls()).to(of_weight)
    model = copy.deepcopy(stock)
    assert [call.activation for call in fusedtrain.convert(model).calls] == ["rms_norm"]
    x = torch.randn(3, 5, WIDTH).to(of_input)
    g = torch.randn(3, 5, WIDTH).to(stock(x).dtype)

    def run(net: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = net(x)
        wanted = [x] if cls is Bare else [x, net[0].weight]
        return [y, *torch.autograd.grad(y, wanted, g)]

    # Stock's arithmetic in float64: .float() and float32 squares must not narrow it.
    exact_net = Powered().double()
    factor = 1 + stock[0].weight.double() if cls is Gemma else stock[0].weight.double()
    exact_net.weight.data = torch.ones(WIDTH).double() if cls is Bare else factor.detach()
    exact = run(nn.Sequential(exact_net), x.double(), g.double())
    for want, got, truth in zip(run(stock, x, g), run(model, x, g), exact):
        assert got.dtype is want.dtype
        off, most = ((t.double() - truth).abs().max().item() for t in (got, want))
        assert off <= max(most, 8 * torch.finfo(torch.float32).eps * truth.abs().max().item())


class Channels(Norm):
    """timm's RmsNorm2d."""

    def forward(self, x: Tensor) -> Tensor:
        v = torch.mean(x.pow(2), dim=1, keepdim=True)
        return x * torch.rsqrt(v + self.eps) * self.weight.reshape(1, -1, 1, 1)


class Indexed(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x = x / torch.sqrt(x.square().mean((1,), True) + self.eps)
        return (1 + self.weight)[:, None, None] * x


class Sam(Norm):
    """LayerNorm2d of Segment Anything; LayerNorm of ConvNeXt in "channels_first"."""

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.other[:, None, None]


class Diffusion(Norm):
    """LayerNorm of networks of diffusion, whose parameter has four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.data = self.weight.data.view(1, -1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        var = torch.var(x, dim=1, unbiased=False, keepdim=True)
        mean = torch.mean(x, dim=1, keepdim=True)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight


class Cast(Norm):
    """The norm in float32, as transformers' ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.float()
        u = x.mean(1, keepdim=True)
        s = torch.sub(x, u).square().mean(1, keepdim=True)
        x = ((x - u) * torch.rsqrt(s + self.eps)).to(dtype=dtype)
        return self.other.view(-1, 1, 1) + self.weight.view(-1, 1, 1) * x


class Columns(Norm):
    """Layer norm of the last dimension, as in Restormer."""

    def forward(self, x: Tensor) -> Tensor:
        mu, sigma = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mu) / torch.sqrt(sigma + self.eps) * self.weight + self.other


class Whitened(Norm):
    """Without weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        u = torch.mean(x, -1, True)
        return (x - u) / (torch.var(x, -1, correction=0, keepdim=True) + self.eps) ** 0.5


class Shifted(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.other + (1 + self.weight) * x * torch.rsqrt((x * x).mean(-1, True) + self.eps)


class Tied(Norm):
    """One parameter is weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, True)
        return x * torch.rsqrt(x.square().mean(-1, True) + self.eps) * self.weight + self.weight


RMS, LAST = (Channels, Indexed), (Columns, Whitened, Shifted, Tied)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("of_input", "of_weight"), [*itertools.product(DTYPES, DTYPES)])
@pytest.mark.parametrize("cls", [*RMS, Sam, Diffusion, Cast, *LAST])
def test_over_channels(
    cls: type[Norm], of_input: torch.dtype, of_weight: torch.dtype, last: bool
) -> None:
    """Dtype and layout are stock's. Numbers are as near to float64, or nearer."""
    torch.manual_seed(0)
    model = nn.Sequential(cls()).to(of_weight)
    stock, exact = copy.deepcopy(model), nn.Sequential(Sam() if cls is Cast else cls()).double()
    exact.load_state_dict(model.state_dict())
    name = "rms_norm" if cls in RMS else "layer_norm"
    assert [call.activation for call in fusedtrain.convert(model).calls] == [name]
    x, g = torch.randn(2, 2, WIDTH, 5, 3).to(of_input)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    if cls in LAST:
        x, g = x.movedim(1, -1), g.movedim(1, -1)
    results = []
    for net, dtype in ((exact, torch.float64), (stock, of_input), (model, of_input)):
        leaf = x.to(dtype).requires_grad_()
        y = net(leaf)
        leaves = [leaf, *net.parameters()]
        gradients = torch.autograd.grad(y, leaves, g.to(y.dtype), allow_unused=True)
        results.append([y, *(t for t in gradients if t is not None)])
    assert results[2][0].stride() == results[1][0].stride()
    for truth, want, got in zip(*results, strict=True):
        assert got.dtype is want.dtype
        off, most = ((t.double() - truth).abs().max().item() for t in (got, want))
        least = torch.finfo(torch.promote_types(of_input, torch.float32)).eps
        assert off <= max(most, 8 * least * truth.abs().max().item())


class NoSquare(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.mean(-1, keepdim=True) + self.eps)


class OtherDimension(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps)


class NoKeepdim(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1) + self.eps)


class NoEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


class TwoWeights(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.other
        )


class BothWeights(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (1 + self.weight) * y * self.weight


class TwoPlus(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (2 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Cubes(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.eps)


class Twice(Norm):
    def forward(self, x: Tensor) -> Tensor:
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x * r * r


class OfTwo(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt((x * self.other).mean(-1, keepdim=True) + self.eps)


class Kept(Norm):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(self.last + self.eps)


class NoGrad(Norm):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x * r


class Scaled(Norm):
    """BiasFree_LayerNorm of Restormer: the variance has no mean, the input has."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + self.eps) * self.weight


class Unbiased(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + self.eps)


class OfSquares(Norm):
    """The variance of squares, not their mean."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, True)
        return x * torch.rsqrt(x.square().var(-1, unbiased=True, keepdim=True) + self.eps)


class OtherMean(Norm):
    def forward(self, x: Tensor) -> Tensor:
        s = x.var(-1, keepdim=True, unbiased=False)
        return (x - x.mean(1, True)) / torch.sqrt(s + self.eps)


class Mixed(Norm):
    """Squares without a mean, and values with it taken off."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, True)) * torch.rsqrt(x.pow(2).mean(-1, True) + self.eps)


class Added(Norm):
    """An RMS norm with a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, True) + self.eps) * self.weight + self.other


class Negated(Norm):
    def forward(self, x: Tensor) -> Tensor:
        s = x.var(-1, keepdim=True, unbiased=False)
        return (x.mean(-1, True) - x) / torch.sqrt(s + self.eps)


class Dtype(Norm):
    """The weight gives its dtype alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(self.weight.dtype)


class RowsOfChannels(Norm):
    """The mean is that of channels, the weight one of the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * r * self.weight[:, None]


class Sliced(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight[::1]


class Truncated(Norm):
    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(torch.int64)


class Overflowing(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (1e6 * x).half() * torch.rsqrt((x * x).mean(-1, True) + self.eps)


NONE = [NoSquare, OtherDimension, NoKeepdim, NoEps, TwoWeights, BothWeights, TwoPlus, Cubes,
        Twice, OfTwo, Kept, NoGrad, Scaled, Unbiased, OfSquares, OtherMean, Mixed, Added, Negated,
        Dtype, RowsOfChannels, Sliced, Truncated, Overflowing]  # fmt: skip


@pytest.mark.parametrize("cls", NONE)
def test_no_rms_norm(cls: type[Norm]) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(cls()), torch.rand(WIDTH, WIDTH) + 0.5
    want = model(x)
    for example in (None, x):  # an example would undo what is wrong
        assert not fusedtrain.convert(model, example).calls
        assert torch.equal(model(x), want)


def changed_eps(norm: Norm) -> None:
    norm.eps = 1.0


def narrowed(norm: Norm) -> None:
    norm.weight.data = norm.weight.data.bfloat16()


def replaced(norm: Norm) -> None:
    norm.weight = nn.Parameter(torch.ones(WIDTH) * 3)


def hooked(norm: Norm) -> None:
    norm.register_forward_hook(lambda _m, _a, y: y + 1)


@pytest.mark.parametrize("edit", [changed_eps, narrowed, replaced, hooked])
@pytest.mark.parametrize("cls", [Llama, T5, Gemma, Columns])
@pytest.mark.filterwarnings("ignore:.*is not what fusedtrain.convert found:UserWarning")
def test_edits_after_convert_count(cls: type[Norm], edit: Callable[[Norm], None]) -> None:
    stock = nn.Sequential(cls())
    model = copy.deepcopy(stock)
    fusedtrain.convert(model)
    edit(stock[0])
    edit(model[0])
    x = torch.randn(2, WIDTH)
    want, got = stock(x), model(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("cls", [Llama, Channels, Indexed, Sam, Diffusion, Columns])
@pytest.mark.parametrize(
    "shape", [(WIDTH + 1,), (2, 1), (0, WIDTH), (), (WIDTH,) * 2, (WIDTH,) * 3, (1, WIDTH, 1, 1, 2)]
)
def test_unusual_sizes_are_the_stock_forwards(cls: type[Norm], shape: tuple[int, ...]) -> None:
    """Widths that broadcast or raise, weights that add dimensions, empty tensors and numbers."""
    stock = nn.Sequential(cls())
    model, x = copy.deepcopy(stock), torch.randn(shape)
    fusedtrain.convert(model)
    try:
        want = stock(x)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error)):
            model(x)
    else:
        torch.testing.assert_close(model(x), want)


def test_copies_pickles_and_revert() -> None:
    model, x = nn.Sequential(Llama()), torch.randn(2, WIDTH)
    want = model(x)
    fusedtrain.convert(model)
    for net in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        y = net(x)
        torch.testing.assert_close(y, want)
        assert y.grad_fn.name() != want.grad_fn.name()
    assert fusedtrain.revert(model) == 1
    assert torch.equal(model(x), want)


def test_second_derivatives_and_vmap() -> None:
    stock = nn.Sequential(Gemma())
    model, x = copy.deepcopy(stock), torch.randn(3, WIDTH)
    fusedtrain.convert(model)
    for function in (
        lambda net: torch.func.vmap(net)(x),
        lambda net: torch.func.jacrev(net)(x[0]),
        lambda net: torch.func.hessian(lambda v: net(v).sin().sum())(x[0]),
    ):
        torch.testing.assert_close(function(model), function(stock), rtol=1e-4, atol=1e-5)
