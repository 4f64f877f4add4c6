"""`convert` makes one op of layer scale, stochastic depth and the sum of a residual branch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from fusedtrain.conversion._branches import add_branch
from helpers.models import but_long, timm
from helpers.norm_models import make

SHAPE = (4, 6, 5, 5)


def drop_path(p: float = 0.4) -> nn.Module:
    from importlib import import_module

    timm()
    module: nn.Module = import_module("timm.layers").DropPath(p)
    return module


class Block(nn.Module):
    """A branch in one of the ways in which networks write it."""

    def __init__(self, how: str, p: float = 0.4) -> None:
        super().__init__()
        self.conv, self.how = nn.Conv2d(6, 6, 1), how
        self.gamma = nn.Parameter(torch.randn(6) if "vector" in how else torch.randn(6, 1, 1))
        self.gamma.requires_grad_(how != "overwritten")  # else backward needs what it multiplied
        self.drop = drop_path(p) if p else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.how == "vector":
            return x + self.drop(y.mul(self.gamma.reshape(1, -1, 1, 1)))
        if self.how == "planes":
            y = self.gamma * y
            y = self.drop(y)
            y += x
            return y
        if self.how == "scale last":
            return self.drop(y) * self.gamma + x
        if self.how == "drop":
            return self.drop(y) + x
        if self.how == "twice":
            x = x + self.drop(y * self.gamma)
            return x + self.drop(self.conv(x) * self.gamma)
        if self.how == "over the shortcut":
            x = x * 1
            x += self.drop(y)
            return x
        if self.how == "over the branch":
            y = self.drop(y)
            y += x
            return y
        if self.how == "overwritten":
            z = y * self.gamma
            y += 1
            return x + self.drop(z) + y
        if self.how == "read twice":
            z = self.drop(y * self.gamma)
            return x + z + z
        if self.how == "no branch":
            return x + y
        raise ValueError(self.how)


def both(
    model: nn.Module, x: Tensor, **options: Any
) -> tuple[fusedtrain.ConversionReport, nn.Module]:
    """Conversion keeps outputs and gradients in both modes, with the same random numbers."""
    converted = copy.deepcopy(model)
    report = fusedtrain.convert(converted, **options)
    for training in (True, False):
        results = []
        for twin in (model, converted):
            torch.manual_seed(7)
            twin.zero_grad()
            output = twin.train(training)(x)
            output.square().sum().backward()
            results.append((output, *(p.grad for p in twin.parameters() if p.requires_grad)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    return report, converted


@pytest.mark.parametrize(
    ("how", "p", "parts"),
    [
        ("vector", 0.4, [("layer scale", "DropPath")]),
        ("vector", 0.0, [("layer scale",)]),
        ("planes", 0.4, [("layer scale", "DropPath")]),
        ("scale last", 0.4, [("layer scale", "DropPath")]),
        ("drop", 0.4, [("DropPath",)]),
        ("twice", 0.4, [("layer scale", "DropPath")] * 2),
    ],
)
def test_ways_to_write_it(how: str, p: float, parts: list[tuple[str, ...]]) -> None:
    model = nn.Sequential(Block(how, p), Block(how, p))
    report, converted = both(model, torch.randn(SHAPE))
    assert [b.parts for b in report.branches] == parts * 2
    assert f"fused {2 * len(parts)} residual branches with the sum" in str(report)
    assert sorted(set(report.rewritten)) == ["0", "1"]
    # Once more changes nothing, and it can be taken back.
    assert fusedtrain.convert(converted).branches == []
    x = torch.randn(SHAPE)
    for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        torch.testing.assert_close(twin.eval()(x), model.eval()(x))
    assert fusedtrain.revert(converted)
    assert all(not has_own_forward(m) for m in converted.modules())


@pytest.mark.parametrize(
    "how", ["over the shortcut", "over the branch", "overwritten", "read twice", "no branch"]
)
def test_sums_that_stay(how: str) -> None:
    report, _ = both(Block(how), torch.randn(SHAPE))
    assert report.branches == []


def test_excluded_and_hooked_modules_stay() -> None:
    model = nn.Sequential(Block("drop"), Block("vector"))
    report, _ = both(model, torch.randn(SHAPE), exclude=["0", "1.drop"])
    assert report.branches == []
    calls: list[int] = []
    hooked = Block("drop")
    hooked.drop.register_forward_hook(lambda *_: calls.append(1))
    report, _ = both(hooked, torch.randn(SHAPE))
    assert report.branches == []
    assert len(calls) == 4


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


BRANCHES = {"convnext_atto": 12, "resmlp_12_224": 24, "edgenext_xx_small": 14}


@pytest.mark.slow
@pytest.mark.parametrize("name", but_long(BRANCHES, "resmlp_12_224", "edgenext_xx_small"))
def test_timms_models(name: str) -> None:
    options = {"img_size": 64} if "resmlp" in name else {}
    torch.manual_seed(0)
    model = timm().create_model(name, drop_path_rate=0.2, num_classes=10, **options).double()
    report, converted = both(model, torch.randn(2, 3, 64, 64, dtype=torch.float64))
    assert len(report.branches) == BRANCHES[name]
    # And with recomputation: bit for bit.
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    losses = []
    for memory in ("store", "recompute"):
        fusedtrain.convert(converted, memory=memory)
        torch.manual_seed(2)
        converted.zero_grad()
        converted.train()(x).square().sum().backward()
        losses.append([p.grad.clone() for p in converted.parameters() if p.grad is not None])
    assert all(map(torch.equal, *losses))


def test_torchvisions_convnext() -> None:
    model = make("torchvision ConvNeXt")
    for drop in model.modules():
        if type(drop).__name__ == "StochasticDepth":
            drop.p = 0.3
    report, _ = both(model.double(), torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert {b.parts for b in report.branches} == {("layer scale", "StochasticDepth")}
    assert len(report.branches) == 2


def test_norms_keep_their_sums() -> None:
    """A sum that a batch norm takes over is no branch."""
    report = fusedtrain.convert(make("timm EfficientNet"))
    assert report.branches == []
    assert any("add" in norm.parts for norm in report.norms)
