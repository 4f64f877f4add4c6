"""Forwards with optional arguments: rewritten where they hand these on, left where they look."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.flow import trace
from helpers.models import timm


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def branch(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


class Inner(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        y = x if mask is None else x * mask
        return -y if flag else y


class HandsOn(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        return (self.branch(self.inner(x, mask, flag=flag)) + x).relu()


class KeywordOnly(HandsOn):
    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return (self.branch(self.inner(x, mask=mask)) + x).relu()


class AsksForNone(_Part):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.branch(x) + x
        return y.relu() if mask is None else (y * mask).relu()


class NoneIsNotTheDefault(_Part):
    def forward(self, x: Tensor, factor: Any = 2.0) -> Tensor:
        y = self.branch(x) + x
        return y.relu() if factor is None else (y.relu() * factor)


class AsksTrue(_Part):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        y = self.branch(x) + x
        return y.sigmoid() if flag is True else y.relu()


class AsksTruth(_Part):
    def forward(self, x: Tensor, flag: bool = False) -> Tensor:
        y = self.branch(x) + x
        return y.sigmoid() if flag else y.relu()


class Compares(_Part):
    def forward(self, x: Tensor, mode: str = "relu") -> Tensor:
        y = self.branch(x) + x
        return y.relu() if mode == "relu" else y.sigmoid()


class AsksForType(_Part):
    def forward(self, x: Tensor, mode: Any = None) -> Tensor:
        y = self.branch(x) + x
        return y.sigmoid() if isinstance(mode, str) else y.relu()


class AnyNumber(_Part):
    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return (self.branch(x) + x).relu()


class Unused(_Part):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return (self.branch(x) + x).relu()


@pytest.mark.parametrize("kind", [HandsOn, KeywordOnly, Unused])
def test_handed_on(kind: Any) -> None:
    result = trace(kind())
    assert not isinstance(result, str)
    assert result.inexact == ""
    assert len(result.graphs) == 1


@pytest.mark.parametrize(
    "kind",
    [AsksForNone, NoneIsNotTheDefault, AsksTrue, AsksTruth, Compares, AsksForType, AnyNumber],
)
def test_looked_at(kind: Any) -> None:
    result = trace(kind())
    assert isinstance(result, str) or result.inexact
    model = kind()
    twin = copy.deepcopy(model)
    fusedtrain.convert(model)
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(model(x), twin(x))
    for value in (None, True, "sigmoid", torch.tensor(2.0)):
        try:
            want = twin(x, value)
        except (TypeError, RuntimeError):
            continue
        torch.testing.assert_close(model(x, value), want)


def test_a_rewritten_forward_takes_them_still() -> None:
    model = HandsOn()
    twin = copy.deepcopy(model)
    report = fusedtrain.convert(model)
    assert report.norms[0].parts == ("add", "ReLU")
    x, mask = torch.randn(4, 3, 5, 5), torch.rand(4, 3, 5, 5)
    for arguments, named in (
        ((x,), {}), ((x, mask), {}), ((x, mask, True), {}), ((x,), {"mask": mask}),
        ((x,), {"flag": True, "mask": mask}), ((), {"x": x, "flag": True}),
    ):  # fmt: skip
        torch.testing.assert_close(model(*arguments, **named), twin(*arguments, **named))
    fusedtrain.revert(model)
    assert "forward" not in vars(model)


def test_timm_vit() -> None:
    """Blocks with a mask: layer scale, stochastic depth and sum of both branches."""
    model = timm().create_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, drop_path_rate=0.3, init_values=0.1,
        num_classes=3,
    )  # fmt: skip
    twin = copy.deepcopy(model)
    report = fusedtrain.convert(model)
    parts = [branch.parts for branch in report.branches]
    assert parts == [("layer scale",)] * 2 + [("layer scale", "DropPath")] * 4
    x = torch.randn(4, 3, 32, 32)
    gradients = []
    for net in (model, twin):
        torch.manual_seed(0)
        y = net(x)
        y.square().sum().backward()
        gradients.append([y.detach(), *(p.grad for p in net.parameters())])
    for ours, theirs in zip(*gradients, strict=True):
        scale = float(theirs.abs().max()) + 1e-12
        assert float((ours - theirs).abs().max()) <= 2e-5 * scale
    # A scale in place overwrites what it is given, and one with a hook must be called.
    model = copy.deepcopy(twin)
    model.blocks[0].ls1.inplace = True
    model.blocks[1].ls2.register_forward_hook(lambda *_: None)
    assert len(fusedtrain.convert(model).branches) == 5  # the sum behind the hook drops, still
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    block, other = model.blocks[2], twin.blocks[2]
    tokens = torch.randn(2, 5, 192)
    for net in (block, other):
        net.eval()
    torch.testing.assert_close(block(tokens, attn_mask=mask), other(tokens, attn_mask=mask))
    torch.testing.assert_close(block(tokens, is_causal=True), other(tokens, is_causal=True))
