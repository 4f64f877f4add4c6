"""Forwards with optional arguments: rewritten where they hand these on, left where they look."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.flow import trace
from fusedtrain._graph.modules import has_own_forward
from helpers.models import model_of, timm


def summed(self: Any, x: Tensor, other: Tensor) -> Tensor:
    y: Tensor = self.norm(self.conv(x)) + other
    return y


class Inner(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None, flag: bool = False) -> Tensor:
        y = x if mask is None else x * mask
        return -y if flag else y


def made(forward: Callable[..., Any]) -> Any:
    return model_of(forward, conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3), inner=Inner())


HANDED_ON: dict[str, Callable[..., Any]] = {
    "on": lambda self, x, mask=None, flag=False: summed(
        self, self.inner(x, mask, flag=flag), x
    ).relu(),
    "keyword only": lambda self, x, *, mask=None: summed(self, self.inner(x, mask=mask), x).relu(),
    "unused": lambda self, x, mask=None: summed(self, x, x).relu(),
}
LOOKED_AT: dict[str, Callable[..., Any]] = {
    "None": lambda self, x, mask=None: (
        summed(self, x, x).relu() if mask is None else (summed(self, x, x) * mask).relu()
    ),
    "None is not the default": lambda self, x, factor=2.0: (
        summed(self, x, x).relu() if factor is None else summed(self, x, x).relu() * factor
    ),
    "True": lambda self, x, flag=False: (
        summed(self, x, x).sigmoid() if flag is True else summed(self, x, x).relu()
    ),
    "truth": lambda self, x, flag=False: (
        summed(self, x, x).sigmoid() if flag else summed(self, x, x).relu()
    ),
    "comparison": lambda self, x, mode="relu": (
        summed(self, x, x).relu() if mode == "relu" else summed(self, x, x).sigmoid()
    ),
    "type": lambda self, x, mode=None: (
        summed(self, x, x).sigmoid() if isinstance(mode, str) else summed(self, x, x).relu()
    ),
    "any number": lambda self, x, *rest: summed(self, x, x).relu(),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_handed_on(name: str) -> None:
    result = trace(made(HANDED_ON[name]))
    assert not isinstance(result, str)
    assert result.inexact == ""
    assert len(result.graphs) == 1


@pytest.mark.parametrize("name", LOOKED_AT)
def test_looked_at(name: str) -> None:
    result = trace(made(LOOKED_AT[name]))
    assert isinstance(result, str) or result.inexact
    model = made(LOOKED_AT[name])
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
    model = made(HANDED_ON["on"])
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
    assert not has_own_forward(model)


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
