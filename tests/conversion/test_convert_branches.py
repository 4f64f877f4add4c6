"""`convert` makes one op of layer scale, stochastic depth and the sum of a residual branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain.conversion._branches import add_branch
from helpers.conversion import compared, outline
from helpers.models import but_long, timm
from helpers.norm_models import make

SHAPE = (4, 6, 5, 5)


def drop_path(p: float = 0.4) -> nn.Module:
    from importlib import import_module

    timm()
    module: nn.Module = import_module("timm.layers").DropPath(p)
    return module


def vector(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return x + self.drop(y.mul(self.gamma.reshape(1, -1, 1, 1)))


def planes(self: Any, x: Tensor, y: Tensor) -> Tensor:
    y = self.gamma * y
    y = self.drop(y)
    y += x
    return y


def twice(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x + self.drop(y * self.gamma)
    return x + self.drop(self.conv(x) * self.gamma)


def over_the_shortcut(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x * 1
    x += self.drop(y)
    return x


def over_the_branch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    y = self.drop(y)
    y += x
    return y


def overwritten(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = y * self.gamma
    y += 1
    return x + self.drop(z) + y


def read_twice(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self.drop(y * self.gamma)
    return x + z + z


WAYS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "vector": vector, "planes": planes, "twice": twice, "over the shortcut": over_the_shortcut,
    "over the branch": over_the_branch, "overwritten": overwritten, "read twice": read_twice,
    "scale last": lambda self, x, y: self.drop(y) * self.gamma + x,
    "drop": lambda self, x, y: self.drop(y) + x,
    "no branch": lambda self, x, y: x + y,
}  # fmt: skip


class Block(nn.Module):
    """A branch in one of the ways in which networks write it."""

    def __init__(self, how: str, p: float = 0.4) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(6, 6, 1), how
        self.gamma = nn.Parameter(torch.randn(6) if how == "vector" else torch.randn(6, 1, 1))
        self.gamma.requires_grad_(how != "overwritten")  # else backward needs what it multiplied
        self.drop = drop_path(p) if p else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.how](self, x, self.conv(x))


@pytest.mark.parametrize(
    ("how", "p", "parts"),
    [
        ("vector", 0.4, ["layer scale + DropPath"]),
        ("vector", 0.0, ["layer scale"]),
        ("planes", 0.4, ["layer scale + DropPath"]),
        ("scale last", 0.4, ["layer scale + DropPath"]),
        ("drop", 0.4, ["DropPath"]),
        ("twice", 0.4, ["layer scale + DropPath"] * 2),
    ],
)
def test_ways_to_write_it(how: str, p: float, parts: list[str]) -> None:
    model = nn.Sequential(Block(how, p), Block(how, p)).double()
    report = compared(model, torch.randn(SHAPE).double(), tolerance=1e-9)
    assert outline(report) == [f"{i}: branch {part}" for i in (0, 1) for part in parts]
    assert f"fused {2 * len(parts)} residual branches with the sum" in str(report)
    assert sorted(set(report.rewritten)) == ["0", "1"]


@pytest.mark.parametrize(
    "how", ["over the shortcut", "over the branch", "overwritten", "read twice", "no branch"]
)
def test_sums_that_stay(how: str) -> None:
    model, x = Block(how).double(), torch.randn(SHAPE).double()
    assert compared(model, x, tolerance=1e-9).branches == []


def test_excluded_and_hooked_modules_stay() -> None:
    model = nn.Sequential(Block("drop"), Block("vector"))
    assert compared(model, torch.randn(SHAPE), exclude=["0", "1.drop"]).branches == []
    calls: list[int] = []
    hooked = Block("drop")
    hooked.drop.register_forward_hook(lambda *_: calls.append(1))
    assert fusedtrain.convert(hooked).branches == []
    hooked(torch.randn(SHAPE))
    assert len(calls) == 1


def test_with_an_example_it_proves_itself() -> None:
    report = fusedtrain.convert(Block("vector"), torch.randn(SHAPE))
    assert len(report.branches) == 1
    assert report.proof is not None


@pytest.mark.parametrize(
    ("shortcut", "branch", "scale"),
    [
        ((4, 6, 5, 5), (4, 6, 5, 5), (6, 1, 1)),
        ((4, 6, 5, 5), (4, 6, 5, 5), (1, 6, 1, 1)),
        ((4, 6), (4, 6), (6,)),
        ((4, 6), (4, 6), (1,)),  # one number for all
        ((4, 6), (4, 6), (4, 1)),  # of samples
        ((4, 6), (4, 6), (4, 6)),
        ((1, 6), (4, 6), (6,)),  # a shortcut that is broadcast
        ((4, 6), (4, 6), (2, 1, 6)),
        ((6,), (6,), (6,)),
    ],
)
@pytest.mark.parametrize("drops", [False, True])
def test_shapes(shortcut: Any, branch: Any, scale: Any, drops: bool) -> None:
    """Arithmetic that is not layer scale and stochastic depth is computed as written."""
    drop = drop_path() if drops else None
    x, y, s = (torch.randn(size, requires_grad=True) for size in (shortcut, branch, scale))
    if drop is not None and len(torch.broadcast_shapes(branch, scale)) > len(branch):
        pytest.skip("not a case: there is nothing to drop by sample")
    torch.manual_seed(1)
    output = add_branch(x, y, s, drop)
    torch.manual_seed(1)
    want = x + (y * s if drop is None else drop(y * s))
    torch.testing.assert_close(output, want)
    grad = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(output, (x, y, s), grad), torch.autograd.grad(want, (x, y, s), grad),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_number_in_place_of_a_scale() -> None:
    x, y = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    assert torch.equal(add_branch(x, y, 0.5, None), x + y * 0.5)


BRANCHES = {"convnext_atto": 12, "resmlp_12_224": 24, "edgenext_xx_small": 14}


@pytest.mark.slow
@pytest.mark.parametrize("name", but_long(BRANCHES, "resmlp_12_224", "edgenext_xx_small"))
def test_timms_models(name: str) -> None:
    options = {"img_size": 64} if "resmlp" in name else {}
    torch.manual_seed(0)
    model = timm().create_model(name, drop_path_rate=0.2, num_classes=10, **options).double()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert len(compared(model, x, tolerance=1e-6, copies=False).branches) == BRANCHES[name]
    # And with recomputation: bit for bit.
    losses = []
    for memory in ("store", "recompute"):
        fusedtrain.convert(model, memory=memory)
        torch.manual_seed(2)
        model.zero_grad()
        model.train()(x).square().sum().backward()
        losses.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *losses))


def test_torchvisions_convnext() -> None:
    model = make("torchvision ConvNeXt")
    for drop in model.modules():
        if type(drop).__name__ == "StochasticDepth":
            drop.p = 0.3
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    report = compared(model.double(), x, tolerance=1e-6, copies=False)
    assert {b.parts for b in report.branches} == {("layer scale", "StochasticDepth")}
    assert len(report.branches) == 2


def test_norms_keep_their_sums() -> None:
    """A sum that a batch norm takes over is no branch."""
    report = fusedtrain.convert(make("timm EfficientNet"))
    assert report.branches == []
    assert any("add" in norm.parts for norm in report.norms)
