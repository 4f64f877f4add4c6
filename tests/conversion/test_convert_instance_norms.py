"""Instance norms that convert makes one op with their modulation and activation: a 3-d U-Net as
nnU-Net writes it, AdaIN, calls that stay torch's."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def unit(dims: int, i: int, o: int, **options: Any) -> nn.Sequential:
    """Convolution, norm, leaky ReLU, as nnU-Net has them."""
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"InstanceNorm{dims}d")
    return nn.Sequential(
        conv(i, o, 3, padding=1), norm(o, **options), nn.LeakyReLU(0.01, inplace=True)
    )


class AdaIN(nn.Module):
    """The norm of StarGAN v2, with a style for each sample."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.fc = nn.InstanceNorm2d(channels), nn.Linear(4, 2 * channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        style = self.fc(x.mean((2, 3)).repeat(1, 4)[:, :4])[:, :, None, None]
        gamma, beta = torch.chunk(style, 2, dim=1)
        return self.act((1 + gamma) * self.norm(x) + beta)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = model(x)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [y, *torch.autograd.grad(y.square().mean(), [x, *parameters])]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[str, ...]]]] = {
    "nnU-Net": (
        lambda: nn.Sequential(
            unit(3, 2, 8, affine=True), unit(3, 8, 8, affine=True), nn.Conv3d(8, 2, 1)
        ),
        (2, 2, 8, 9, 10), [("LeakyReLU",)] * 2,
    ),
    "without weights, alone": (
        lambda: nn.Sequential(unit(2, 3, 8)[:2], nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8)),
        (2, 3, 16, 16), [()] * 2,
    ),
    "one dimension": (
        lambda: nn.Sequential(*unit(1, 3, 8, affine=True), nn.Conv1d(8, 2, 1)), (4, 3, 300),
        [("LeakyReLU",)],
    ),
    "AdaIN": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 1), AdaIN(8)), (2, 3, 16, 16),
        [("scale", "shift", "ReLU")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("memory", ["store", "recompute"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, memory: str, last: bool) -> None:
    torch.manual_seed(0)
    make, shape, parts = NETWORKS[name]
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    if last and x.dim() > 3:
        model, x = model.to(memory_format=LAST[x.dim()]), x.to(memory_format=LAST[x.dim()])
    stock = copy.deepcopy(model)
    report = fusedtrain.convert(model, x, memory=memory)
    assert [norm.parts for norm in report.group_norms] == parts
    assert f"fused {len(parts)} instance norm" in str(report)
    for net in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.eval()):
        for ours, theirs in zip(results(net, x), results(stock, x), strict=True):
            torch.testing.assert_close(ours, theirs)
    for dtype in (torch.bfloat16, torch.float16):
        narrow, plain = (copy.deepcopy(net).to(dtype) for net in (model, stock))
        y, want = narrow(x.to(dtype)), plain(x.to(dtype))
        assert y.dtype is want.dtype
        torch.testing.assert_close(y, want, rtol=0.05, atol=0.05)
    assert fusedtrain.revert(model) > 0
    assert torch.equal(model(x), stock.eval()(x))


def test_the_op_runs_and_keeps_its_layout() -> None:
    """Torch's instance norm gives a contiguous output."""
    model = unit(2, 3, 16, affine=True).to(memory_format=torch.channels_last)
    fusedtrain.convert(model)
    y = model(torch.randn(2, 3, 32, 32))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.grad_fn.name() == "GroupNormActBackward"


@pytest.mark.filterwarnings("ignore:input's size at dim")
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    "shape", [(8, 32, 32), (2, 8, 1, 1), (0, 8, 4, 4), (2, 4, 32, 32), (2, 8, 32), (2, 8, 3, 3)]
)
def test_other_inputs_are_the_stock_forwards(shape: tuple[int, ...], affine: bool) -> None:
    """No batch, one place, no sample, other channels, another rank, small planes."""
    stock = nn.Sequential(nn.InstanceNorm2d(8, affine=affine), nn.ReLU())
    model, x = copy.deepcopy(stock), torch.randn(shape)
    assert fusedtrain.convert(model).group_norms
    try:
        want = stock(x)
    except (RuntimeError, ValueError, IndexError) as error:
        with pytest.raises(type(error), match=re.escape(str(error))):
            model(x)
    else:
        torch.testing.assert_close(model(x), want, rtol=0, atol=0)


def test_running_statistics() -> None:
    """Such a norm stays; one that gets them later moves them."""
    model, x = unit(2, 3, 8, track_running_stats=True), torch.randn(2, 3, 16, 16)
    assert not fusedtrain.convert(model, x).group_norms
    model = unit(2, 3, 8, affine=True)
    fusedtrain.convert(model, x)
    stock = unit(2, 3, 8, affine=True, track_running_stats=True)
    stock.load_state_dict(model.state_dict(), strict=False)
    norm: Any = model[1]
    norm.track_running_stats, norm.running_mean = True, torch.zeros(8)
    norm.running_var = torch.ones(8)
    torch.testing.assert_close(model(x), stock(x))
    torch.testing.assert_close(norm.running_mean, stock[1].running_mean)
    torch.testing.assert_close(model.eval()(x), stock.eval()(x))


def test_later_changes_count() -> None:
    model, x = unit(2, 3, 8, affine=True), torch.randn(2, 3, 16, 16)
    stock = copy.deepcopy(model)
    fusedtrain.convert(model, x)
    for net in (model, stock):
        net[1].eps, net[2].negative_slope = 0.1, 0.5
        net[1].weight = nn.Parameter(torch.full((8,), 2.0))
    torch.testing.assert_close(model(x), stock(x))
    for net in (model, stock):
        net[1].register_forward_hook(lambda _m, _a, y: y + 1)
    torch.testing.assert_close(model(x), stock(x))
