"""fold_conv_bn follows the data: where a norm folds, and the reason where it does not."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, weight_norm

import fusedtrain
from helpers.conversion import Doubled, OwnNorm
from helpers.folding import DOUBLE, ByNames, Functional, Twice, assert_folds, difference, waken

pytestmark = pytest.mark.usefixtures("one_thread")


class Reversed(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))


def test_by_dataflow_not_by_declaration() -> None:
    model = Reversed(
        norm2=nn.BatchNorm2d(4), conv2=nn.Conv2d(4, 4, 1), norm1=nn.BatchNorm2d(4),
        conv1=nn.Conv2d(4, 4, 3),
    )  # fmt: skip
    assert_folds(waken(model).double(), torch.randn(2, 4, 6, 6).double(), 2)


class ReluBetween(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.conv(x)))


def test_not_through_an_activation() -> None:
    model = ReluBetween(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4), act=nn.ReLU())
    x = torch.randn(2, 4, 5, 5)
    folded, report = fusedtrain.fold_conv_bn(waken(model), x)
    assert len(report) == 0
    assert "the output of ReLU" in report.left[0].reason
    with torch.no_grad():
        assert difference(folded(x), model(x)) < 1e-6


def test_a_convolution_called_twice_is_left() -> None:
    model = waken(Twice(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)))
    x = torch.randn(2, 4, 5, 5)
    folded, report = fusedtrain.fold_conv_bn(model, x)
    assert report.left[0].reason == "conv is called 2 times"
    with torch.no_grad():
        assert torch.equal(folded(x), model(x))


class NormTwice(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


def test_a_norm_called_twice_is_left() -> None:
    model = waken(NormTwice(a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)))
    assert fusedtrain.fold_conv_bn(model)[1].left[0].reason == "called 2 times"


def test_shared_block_is_folded_once() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    model = waken(nn.Sequential(block, nn.Tanh(), block)).double()
    folded = assert_folds(model, torch.randn(2, 4, 5, 5).double())
    assert folded[0] is folded[2]


def test_functional_batch_norm() -> None:
    model = waken(nn.Sequential(Functional())).double()
    x = torch.randn(2, 4, 6, 6).double()
    folded, report = fusedtrain.fold_conv_bn(model, x)
    assert [f.other_type for f in report.folded] == ["F.batch_norm"]
    assert set(folded.state_dict()) == {"0.conv.weight", "0.conv.bias"}
    assert type(folded[0]).__name__ == "Functional"
    with torch.no_grad():
        assert difference(folded(x), model(x)) < DOUBLE
    for part in (copy.deepcopy(folded), pickle.loads(pickle.dumps(folded))):
        assert torch.equal(part(x), folded(x))
    report = fusedtrain.fold_conv_bn(Functional(training=True).eval())[1]
    assert "training mode" in " ".join(left.reason for left in report.left)


class Branches(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 0:
            return self.part(x)
        return self.norm(self.conv(x))


def test_where_torch_fx_cannot_trace() -> None:
    inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()))
    model = Branches(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4), part=inner)
    x = torch.rand(2, 4, 5, 5)
    folded, report = fusedtrain.fold_conv_bn(waken(model), x)
    assert [f.other for f in report.folded] == ["part.1.0"]
    assert "torch.fx cannot trace (the model itself) (TypeError" in report.left[0].reason
    with torch.no_grad():
        for value in (x, -x):
            assert difference(folded(value), model(value)) < 1e-6


def test_across_modules_and_idle_layers() -> None:
    layers = (nn.Conv2d(4, 4, 1), nn.Identity(), nn.Dropout(), nn.Sequential(nn.BatchNorm2d(4)))
    assert_folds(waken(nn.Sequential(*layers)).double(), torch.randn(2, 4, 5, 5).double())


class Stores(ByNames):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.conv(x)
        return self.norm(self.last)


def test_tracing_leaves_nothing_behind() -> None:
    model = waken(Stores(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)))
    folded, _ = fusedtrain.fold_conv_bn(model)
    assert "last" not in vars(model)
    assert "last" not in vars(folded)


class OwnConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def left_alone() -> dict[str, tuple[nn.Module, nn.Module, str]]:
    conv, norm = (lambda: nn.Conv2d(4, 4, 1)), (lambda: nn.BatchNorm2d(4))
    hooked, parametrized, patched = conv(), conv(), norm()
    with torch.no_grad():  # with a graph behind it, the weight could not be copied
        normed = weight_norm(conv())
    hooked.register_forward_hook(lambda *_: None)
    parametrize.register_parametrization(parametrized, "weight", Doubled())
    patched.forward = lambda x: x
    hooked_norm, training = norm(), norm()
    hooked_norm.register_full_backward_hook(lambda *_: None)
    return {
        "own conv": (OwnConv(4, 4, 1), norm(), "OwnConv has a forward of its own"),
        "own norm": (conv(), OwnNorm(4), "OwnNorm has a forward of its own"),
        "hooked conv": (hooked, norm(), "it has hooks"),
        "hooked norm": (conv(), hooked_norm, "it has hooks"),
        "weight norm": (normed, norm(), "computed anew at every call"),
        "parametrized": (parametrized, norm(), "computed anew|parametrized"),
        "patched": (conv(), patched, "its forward is patched"),
        "training": (conv(), training, "in training mode"),
        "no statistics": (conv(), nn.BatchNorm2d(4, track_running_stats=False), "keeps no running"),
        "other kind": (conv(), nn.BatchNorm1d(4), "does not fit"),
    }


@pytest.mark.parametrize("name", left_alone())
def test_left_alone(name: str) -> None:
    conv, norm, reason = left_alone()[name]
    model = nn.Sequential(conv, norm).eval()
    norm.train(name == "training")
    _, report = fusedtrain.fold_conv_bn(model)
    assert len(report) == 0
    assert re.search(reason, report.left[0].reason), report
    assert "left 1 norm" in str(report)


@pytest.mark.parametrize("container", [False, True])
def test_a_part_of_others_between_a_convolution_and_its_norm(container: bool) -> None:
    """A module that the flow has no trace of, and through which the value is followed."""

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.part(x)
            return y

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
            self.between = nn.Sequential(nn.Identity()) if container else Through()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.bn(self.between(self.conv(x)))
            return y

    model, x = Net().eval(), torch.randn(2, 3, 4, 4)
    folded, report = fusedtrain.fold_conv_bn(model)
    assert str(report).startswith("folded 1 norm")
    torch.testing.assert_close(folded(x), model(x))
