"""Group norms that convert makes one op with their modulation and activation: a diffusion U-Net as
diffusers writes it, timm's modules, what stays, and what comes back."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.forward import rewritten_of
from fusedtrain.conversion import ConversionReport
from fusedtrain.ops import group_norm
from helpers.models import timm


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "_gains", lambda *_: True)


class ResnetBlock(nn.Module):
    """A block of a diffusion model, with its time embedding added, or as scale and shift."""

    def __init__(self, i: int, o: int, scale_shift: bool) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, i, eps=1e-6), nn.Conv2d(i, o, 3, padding=1)
        self.scale_shift = scale_shift
        self.time_emb_proj = nn.Linear(8, o * (1 + scale_shift))
        self.norm2, self.conv2 = nn.GroupNorm(4, o, eps=1e-6), nn.Conv2d(o, o, 3, padding=1)
        self.dropout, self.nonlinearity = nn.Dropout(0.0), nn.SiLU()
        self.conv_shortcut = nn.Conv2d(i, o, 1) if i != o else None

    def forward(self, input: Tensor, temb: Tensor) -> Tensor:
        hidden = self.conv1(self.nonlinearity(self.norm1(input)))
        temb = self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        if self.scale_shift:
            scale, shift = torch.chunk(temb, 2, dim=1)
            hidden = self.norm2(hidden)
            hidden = hidden * (1 + scale) + shift
        else:
            hidden = self.norm2(hidden + temb)
        hidden = self.conv2(self.dropout(self.nonlinearity(hidden)))
        if self.conv_shortcut is not None:
            input = self.conv_shortcut(input)
        return input + hidden


class UNet(nn.Module):
    def __init__(self, scale_shift: bool = False) -> None:
        super().__init__()
        self.conv_in, self.down = nn.Conv2d(3, 16, 3, padding=1), ResnetBlock(16, 32, scale_shift)
        self.downsample = nn.Conv2d(32, 32, 3, 2, 1)
        self.mid, self.up = ResnetBlock(32, 32, scale_shift), ResnetBlock(64, 16, scale_shift)
        self.norm, self.alone = nn.GroupNorm(4, 16), nn.GroupNorm(4, 32)
        self.out = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skip = self.alone(self.down(self.conv_in(x), t))
        hidden = self.mid(self.downsample(skip), t)
        hidden = torch.cat([T.interpolate(hidden, scale_factor=2.0), skip], 1)
        hidden = self.up(hidden, t)
        hidden = T.silu(T.group_norm(hidden, 4, self.norm.weight, eps=1e-3))
        return self.out(hidden)


def example() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 3, 32, 32), torch.randn(2, 8)


def names(report: ConversionReport) -> dict[str, tuple[str, ...]]:
    return {norm.name: norm.parts for norm in report.group_norms}


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    model.zero_grad()
    model(*inputs).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("scale_shift", [False, True])
def test_unet(scale_shift: bool, last: bool) -> None:
    torch.manual_seed(0)
    model = UNet(scale_shift)
    if last:
        model.to(memory_format=torch.channels_last)
    inputs, stock = example(), copy.deepcopy(model)
    dry = fusedtrain.convert(model, inputs, dry_run=True)
    assert rewritten_of(model.mid) is None
    report = fusedtrain.convert(model, inputs)
    second = ("scale", "shift", "SiLU") if scale_shift else ("SiLU",)
    blocks = [f"{block}.norm{i}" for block in ("down", "mid", "up") for i in (1, 2)]
    assert names(report) == names(dry) == {
        "": ("SiLU",), "out.0": ("SiLU",), **({"alone": ()} if last else {}),
        **{name: second if name.endswith("2") else ("SiLU",) for name in blocks},
    }  # fmt: skip
    assert f"fused {8 + last} group norms with what follows" in str(report)
    assert report.proof is not None
    assert report.proof.saved_after < 0.8 * report.proof.saved_before
    torch.testing.assert_close(model(*inputs), stock(*inputs))
    for ours, theirs in zip(gradients(model, inputs), gradients(stock, inputs)):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    loaded = torch.load(_saved(model), weights_only=False)
    torch.testing.assert_close(loaded(*inputs), model(*inputs), rtol=0, atol=0)
    assert fusedtrain.convert(model, inputs).group_norms == []  # done before
    fusedtrain.revert(model)
    torch.testing.assert_close(model(*inputs), stock(*inputs), rtol=0, atol=0)
    assert [rewritten_of(m) for m in model.modules()] == [None] * len(list(model.modules()))


def _saved(model: nn.Module) -> Any:
    import io

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_recompute_keeps_less() -> None:
    """At most 0.45x of eager's bytes, and the same bits with a plan and without."""
    torch.manual_seed(0)
    model, inputs = UNet(), example()
    report = fusedtrain.convert(model, inputs, memory="recompute")
    assert report.proof is not None
    assert report.proof.saved_after <= 0.45 * report.proof.saved_before
    recomputed = gradients(model, inputs)
    fusedtrain.convert(model, inputs)
    stored = gradients(model, inputs)
    fusedtrain.revert(model)
    plan = fusedtrain.plan_memory(model, inputs, 0.6)
    fusedtrain.convert(model, inputs, memory=plan)
    for planned, again, first in zip(gradients(model, inputs), recomputed, stored):
        assert again.equal(first)
        assert planned.equal(first)


def test_timm_and_other_forwards() -> None:
    timm()
    import timm.layers as layers

    for norm in (layers.GroupNormAct(8, 2, act_layer=nn.SiLU), layers.GroupNorm1Act(8)):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), norm)
        x = torch.randn(2, 3, 9, 9)
        want = model(x)
        report = fusedtrain.convert(model, x)
        assert names(report) == {"1": (type(norm.act).__name__,)}
        torch.testing.assert_close(model(x), want)
    norm_layer = functools.partial(layers.GroupNorm, num_groups=8)
    resnet = timm().create_model("resnet10t", norm_layer=norm_layer, num_classes=3)
    report = fusedtrain.convert(resnet, torch.randn(2, 3, 64, 64))
    assert {*names(report).values()} == {("ReLU",)}
    assert {f"layer{i}.0.bn1" for i in range(1, 5)} <= {*names(report)}
    assert report.proof is not None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, 4), nn.SiLU()
        self.scale = nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.act(self.norm(x))


class Shared(Block):
    def forward(self, x: Tensor) -> Any:
        z = self.norm(x)
        return self.act(z) + z


class WithoutGrad(Block):
    def forward(self, x: Tensor) -> Any:
        z = self.norm(x)
        with torch.no_grad():
            z = self.act(z)
        return z * x


class OfChannels(Block):
    def forward(self, x: Tensor) -> Any:  # a scale of no sample
        return self.act(self.norm(x) * (1 + self.scale))


class ByScale(Block):
    def forward(self, x: Tensor) -> Any:  # without the 1
        return self.act(self.norm(x) * self.scale)


class Overwritten(Block):
    def forward(self, x: Tensor) -> Any:
        x, scale = x * 1, x.mean((2, 3), keepdim=True)
        z = self.norm(x)
        factor = 1 + scale
        scale.mul_(2)
        return self.act(z * factor)


class NoKernel(Block):
    def forward(self, x: Tensor) -> Any:
        return torch.softmax(self.norm(x), 1)


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.norm.register_forward_hook(lambda *_: self.calls.append(1))


class Parametrized(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.norm, dim=None)


class Excluded(Block):
    pass


FUSED = (Block, OfChannels)
STAYS = (
    Shared, WithoutGrad, ByScale, Overwritten, NoKernel, Hooked, Parametrized, Excluded,
)  # fmt: skip


@pytest.mark.parametrize("cls", FUSED + STAYS)
def test_what_stays(cls: type[Block]) -> None:
    """Or is right nevertheless."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), cls()).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    want, stock = model(x), gradients(model, (x,))
    report = fusedtrain.convert(model, x, exclude=["1.norm"] if cls is Excluded else [])
    assert bool(report.group_norms) == (cls in FUSED), str(report)
    torch.testing.assert_close(model(x), want)
    for ours, theirs in zip(gradients(model, (x,)), stock):
        torch.testing.assert_close(ours, theirs)
    if cls is Hooked:
        calls = model[1].calls
        assert len(calls) >= 4


def test_later_changes_count() -> None:
    """A hook, another activation, eps: as of the next call."""
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.LeakyReLU(0.1))
    norm, act = model
    x = torch.randn(2, 4, 5, 5)
    assert names(fusedtrain.convert(model, x)) == {"0": ("LeakyReLU",)}
    norm.eps, act.negative_slope = 0.1, 0.5
    torch.testing.assert_close(model(x), T.leaky_relu(T.group_norm(x, 2, eps=0.1), 0.5))
    seen: list[tuple[int, ...]] = []
    norm.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    model(x)
    assert seen == [x.shape]
    model[1] = nn.Tanh()
    torch.testing.assert_close(model(x), T.group_norm(x, 2, eps=0.1).tanh())


class Untraced(Block):
    def forward(self, x: Tensor) -> Any:
        return self.act(self.norm(x)) if len(x) else x


def test_a_norm_in_a_forward_that_cannot_be_traced_has_a_line() -> None:
    model = nn.Sequential(Untraced(), Untraced())
    report = fusedtrain.convert(model, torch.randn(2, 4, 3, 3))
    assert [left.name for left in report.left] == ["0.norm", "1.norm"]
    assert {left.reason for left in report.left} == {
        "torch.fx cannot trace Untraced (TypeError: its forward takes the length of a tensor)"
    }
