"""Batch norms that convert leaves as they are, and the reasons in the report."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from helpers.conversion import OwnNorm, compared, image, left_of, small, snapshot
from helpers.models import Parts, model_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Loop(Parts):
    """torch.fx cannot follow it."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.shape[0])):
            x = torch.relu(self.bn(x))
        return x


class Moody(nn.Module):
    """Looks at the mode of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.relu(self.bn(self.conv(x))), 0.5, self.bn.training)


class Lonely(nn.Module):
    """Returns what the activation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.act = nn.BatchNorm2d(3), nn.SiLU()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.bn(x)
        return y, self.act(y)


class HandDrop(Parts):
    """Stochastic depth that is written over the norm's output."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn(x)
        if self.training:
            y.div_(0.8)
        return y + x


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def _patched(module: nn.Module) -> nn.Module:
    module.forward = type(module).forward.__get__(module)
    return module


def _parametrized(module: nn.Module) -> nn.Module:
    parametrizations.weight_norm(module, dim=None)
    return module


def _shared_norm() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    return nn.Sequential(norm, nn.ReLU(), norm, nn.ReLU())


def _left() -> dict[str, tuple[nn.Module, str]]:
    norm, act = nn.BatchNorm2d, nn.ReLU
    excluded = "excluded"
    return {
        "subclass": (nn.Sequential(OwnNorm(3), act()), "subclass of torch.nn.BatchNorm2d"),
        "parametrized": (nn.Sequential(_parametrized(norm(3)), act()), "parametrized"),
        "hooked": (nn.Sequential(_hooked(norm(3)), act()), "it has hooks"),
        "patched": (nn.Sequential(_patched(norm(3)), act()), "its forward is patched"),
        "hooked activation": (nn.Sequential(norm(3), _hooked(act())), "1 has hooks"),
        "patched activation": (
            nn.Sequential(norm(3), _patched(act())), "the forward of 1 is patched",
        ),
        "shared": (_shared_norm(), "called 2 times"),
        "PReLU": (nn.Sequential(norm(3), nn.PReLU()), "PReLU has no kernel inside of batch norm"),
        "no kernel": (
            nn.Sequential(norm(3), nn.RReLU()), "RReLU has no kernel inside of batch norm",
        ),
        "inexact": (
            nn.Sequential(norm(3), nn.LeakyReLU(-1.0)),
            "LeakyReLU has no kernel inside of batch norm",
        ),
        "used twice": (Lonely(), "its output is used elsewhere, too"),
        "written over": (HandDrop(bn=nn.BatchNorm2d(3)), "div_ writes over its output"),
        "loop": (Loop(bn=nn.BatchNorm2d(3)), "torch.fx cannot trace the model ("),
        "mode": (
            Moody(), "the model cannot be rewritten: its forward depends on the mode of training",
        ),
        excluded: (nn.Sequential(norm(3), act()), excluded),
        "excluded activation": (nn.Sequential(norm(3), act()), "1 is excluded"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _left())
def test_left_with_a_reason(name: str) -> None:
    model, reason = _left()[name]
    before, stock = snapshot(model), copy.deepcopy(model)
    exclude = {"excluded": [nn.BatchNorm2d], "excluded activation": ["1"]}.get(name, [])
    report = fusedtrain.convert(model, exclude=exclude)
    assert not report.norms
    reasons = {entry.reason for entry in report.left if "Norm" in entry.type}
    assert len(reasons) == 1
    assert reasons.pop().startswith(reason)
    model.eval()
    stock.eval()
    x = image()
    torch.testing.assert_close(model(x), stock(x))
    model.train()
    fusedtrain.revert(model)
    assert snapshot(model) == before


def test_weight_norm_by_hooks_is_left() -> None:
    norm = nn.utils.weight_norm(nn.BatchNorm2d(3), dim=None)
    report = fusedtrain.convert(nn.Sequential(norm, nn.ReLU()))
    assert left_of(report)[0].reason == "it has hooks"


def test_no_word_about_a_norm_that_nothing_follows() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3))
    report = fusedtrain.convert(model)
    assert (report.norms, report.left) == ([], [])
    assert type(model[1]) is nn.BatchNorm2d


def test_scripted_modules_stay() -> None:
    model = nn.Sequential(torch.jit.script(small(nn.ReLU())), nn.BatchNorm2d(4), nn.ReLU())
    report = fusedtrain.convert(model)
    assert [norm.name for norm in report.norms] == ["1"]
    assert {entry.reason for entry in report.left} == {"scripted; convert before scripting"}


def _joined(self: Any, x: Any) -> Tensor:
    """A question that torch.fx cannot ask at each call again."""
    if isinstance(x, (list, tuple)):
        x = torch.cat(x)
    y: Tensor = self.act(self.bn(x))
    return y


def _of_parts(self: Any, x: Any) -> Tensor:
    """As torchvision's DenseNet asks: both ways are one new forward."""
    parts = [x] if isinstance(x, Tensor) else x
    y: Tensor = self.act(self.bn(torch.cat(parts)))
    return y


@pytest.mark.parametrize(("forward", "fused"), [(_joined, False), (_of_parts, True)])
def test_asking_for_the_type_of_the_input(forward: Any, fused: bool) -> None:
    model = model_of(forward, bn=nn.BatchNorm2d(3), act=nn.SiLU())
    stock = copy.deepcopy(model)
    report = fusedtrain.convert(model)
    assert len(report.norms) == has_own_forward(model) == fused
    assert ("cannot be rewritten" in str(report)) != fused
    for x in (image(), [image(), image()], -image()):
        torch.testing.assert_close(model(x), stock(x))


class _Under(nn.Module):
    def __init__(self, around: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.bn, self.around = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), around

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.around(self.inner, x))

    def inner(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def _without_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return function(x)


def _in_half(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function(x)


AROUND: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "no_grad": _without_gradient,
    "autocast": _in_half,
    "checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=False),
    "reentrant checkpoint": lambda function, x: checkpoint(function, x, use_reentrant=True),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_a_graph_does_not_tell_is_not_rewritten(name: str) -> None:
    model = _Under(AROUND[name])
    report = fusedtrain.convert(model)
    assert not report.norms
    assert len(report.left) == 1
    assert not has_own_forward(model)


def test_a_norm_that_two_forwards_call() -> None:
    """As in timm's hrnet, which calls the forward of a part."""
    norm = nn.BatchNorm2d(3)
    inner = model_of(lambda self, x: self.act(self.norm(x)), norm=norm, act=nn.ReLU())
    model = model_of(
        lambda self, x: self.relu(self.norm(self.inner(x))), norm=norm, relu=nn.ReLU(), inner=inner
    )
    report = compared(model, torch.randn(2, 3, 4, 4))
    assert [left.reason for left in left_of(report)] == ["called 2 times"]
