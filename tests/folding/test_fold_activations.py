"""fold_conv_bn with the activation, and a residual, inside of the convolution."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedtrain
from fusedtrain.folding import _conv_act
from fusedtrain.folding._conv_act import Act, ConvAct2d, ConvAct3d
from helpers.folding import difference, waken

pytestmark = pytest.mark.usefixtures("one_thread")
ACTS: dict[str, tuple[nn.Module, Act]] = {
    "relu": (nn.ReLU(), Act("relu")),
    "relu6": (nn.ReLU6(), Act("hardtanh", (0.0, 6.0))),
    "hardtanh": (nn.Hardtanh(-0.3, 0.4), Act("hardtanh", (-0.3, 0.4))),
    "leaky_relu": (nn.LeakyReLU(0.2), Act("leaky_relu", (0.2,))),
    "silu": (nn.SiLU(), Act("swish")),
    "hardswish": (nn.Hardswish(), Act("hardswish")),
    "hardsigmoid": (nn.Hardsigmoid(), Act("hardsigmoid")),
    "sigmoid": (nn.Sigmoid(), Act("sigmoid")),
    "tanh": (nn.Tanh(), Act("tanh")),
    "gelu": (nn.GELU(), Act("gelu", (), "none")),
    "gelu_tanh": (nn.GELU("tanh"), Act("gelu", (), "tanh")),
    "fused silu": (fusedtrain.nn.SiLU(), Act("swish")),
}


def test_the_private_ops_are_there() -> None:
    """Where this fails, torch has renamed them: convolutions then run unfused."""
    assert _conv_act.PLATFORMS["cpu"].available
    assert _conv_act.PLATFORMS["cpu"]._reorder is not None


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", ACTS)
def test_activation_is_fused(name: str, last: bool) -> None:
    module, act = ACTS[name]
    conv = nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1, dilation=1)
    model = nn.Sequential(conv, nn.BatchNorm2d(6), copy.deepcopy(module))
    x = 3 * torch.randn(2, 4, 7, 6)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    folded, report = fusedtrain.fold_conv_bn(waken(model), x)
    assert isinstance(folded[0], ConvAct2d)
    assert folded[0]._act == act
    assert len(report.fused) == 1
    assert isinstance(folded[2], nn.Identity)
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):  # packed, and packed already
            y = folded(x)
            assert difference(y, expected) < 1e-5
            assert y.stride() == expected.stride()
    assert folded[0]._refused is None  # fused indeed
    assert set(folded.state_dict()) == {"0.weight", "0.bias"}
    # With gradients: plain torch.
    x.requires_grad_()
    (g,) = torch.autograd.grad(folded(x).sum(), x)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    assert difference(g, wanted) < 1e-5


def test_3d_and_bfloat16() -> None:
    model = waken(nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), nn.ReLU()))
    x = torch.randn(2, 3, 4, 5, 6)
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        folded, _ = fusedtrain.fold_conv_bn(model, x.contiguous(memory_format=layout))
        assert isinstance(folded[0], ConvAct3d)
    model = waken(nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU())).bfloat16()
    fusedtrain.fold_conv_bn(model, torch.randn(2, 3, 5, 6).bfloat16())


class Residual(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.act = how, nn.ReLU(inplace=True)
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(h))
        if self.how == "in place":
            y += h
        elif self.how == "into the other":
            h += y
            return self.act(h)
        elif self.how == "other first":
            y = h + y
        elif self.how == "scalar":
            y = y + 1.0
        elif self.how == "alpha":
            y = torch.add(y, h, alpha=2)
        elif self.how == "broadcast":
            y = y + x.mean((2, 3), keepdim=True)
        elif self.how == "no act":
            return y + h
        return self.act(y)


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        ("in place", ["ReLU", "add + ReLU"]),
        ("other first", ["ReLU", "add + ReLU"]),
        ("broadcast", ["ReLU", "add + ReLU"]),
        ("no act", ["ReLU", "add"]),
        ("into the other", ["ReLU", "add + ReLU"]),
        ("scalar", ["ReLU"]),
        ("alpha", ["ReLU"]),
    ],
)
def test_residual(how: str, kinds: list[str]) -> None:
    model = waken(nn.Sequential(Residual(how)))
    x = torch.randn(2, 4, 6, 6)
    folded, report = fusedtrain.fold_conv_bn(model, x, tolerance=1e-5)
    assert [f.other_type for f in report.fused] == kinds
    lasting = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert difference(folded(lasting), model(x)) < 1e-5
        assert difference(folded.double()(x.double()), model.double()(x.double())) < 1e-5


def test_packed_weight_follows_the_weight() -> None:
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    folded, _ = fusedtrain.fold_conv_bn(model)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        before = folded(x)
        assert folded[0]._packs is not None
        state = {k: 2 * v for k, v in folded.state_dict().items()}
        folded.load_state_dict(state)
        assert difference(folded(x), 2 * before) < 1e-6
        for size in (5, 6, 7, 8):
            y = torch.randn(2, 4, size, size).contiguous(memory_format=torch.channels_last)
            assert difference(folded(y), F.relu(F.conv2d(y, *state.values()))) < 1e-5
        assert len(folded[0]._packs[1]) <= 2
        buffer = io.BytesIO()
        torch.save(folded, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
        assert other[0]._packs is None
        assert torch.equal(other(x), folded(x))
        assert torch.equal(copy.deepcopy(folded)(x), folded(x))


def test_packed_without_an_activation() -> None:
    """The convolution of a shortcut, which nothing but an addition follows, and that of a cat."""
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 1, stride=2, bias=False), nn.BatchNorm2d(6)))
    folded, report = fusedtrain.fold_conv_bn(model)
    assert report.fused == []
    conv = folded[0]
    assert isinstance(conv, ConvAct2d)
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 4, 6, 6).contiguous(memory_format=layout)
        with torch.no_grad():
            assert difference(folded(x), model(x)) < 1e-5
    assert conv._packs is not None
    for untouched in (nn.Conv2d(4, 6, 1, padding="same"), nn.ConvTranspose2d(4, 6, 1)):
        model = waken(nn.Sequential(untouched, nn.BatchNorm2d(6)))
        assert type(fusedtrain.fold_conv_bn(model)[0][0]) is type(untouched)
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6)))
    assert type(fusedtrain.fold_conv_bn(model, fuse_activation=False)[0][0]) is nn.Conv2d


def test_fused_convolution_elsewhere() -> None:
    """Unbatched, empty, other dtypes, autocast, compiled: as eager torch."""
    model = waken(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    folded, _ = fusedtrain.fold_conv_bn(model)
    conv = folded[0]
    with torch.no_grad():
        x = torch.randn(2, 4, 6, 6)
        plain = F.relu(F.conv2d(x, conv.weight, conv.bias))
        assert difference(conv(x[0]), plain[0]) < 1e-6
        assert conv(x[:0]).shape == (0, 6, 4, 4)
        with torch.autocast("cpu", torch.bfloat16):
            assert conv(x).dtype == torch.bfloat16
        with torch.inference_mode():
            assert difference(conv(x), plain) < 1e-6
        assert difference(torch.compile(conv, backend="eager", fullgraph=True)(x), plain) < 1e-6
        with pytest.raises(RuntimeError, match="channels"):
            conv(torch.randn(2, 3, 6, 6))
    off, report = fusedtrain.fold_conv_bn(model, fuse_activation=False)
    assert type(off[0]) is nn.Conv2d
    assert not report.fused
    _, report = fusedtrain.fold_conv_bn(copy.deepcopy(model).double())
    assert not report.fused
