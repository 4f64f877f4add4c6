"""Biases, weights and running statistics that others see, too: left, with the reason."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from fusedtrain._graph.modules import has_own_forward
from helpers.folding import ByNames, difference, waken


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 1)


def norm() -> nn.BatchNorm2d:
    return nn.BatchNorm2d(4)


class Pair(ByNames):
    """A convolution and its norm, and what a subclass does besides."""

    def __init__(self) -> None:
        super().__init__(c=conv(), n=norm())

    def forward(self, x: Tensor) -> Any:
        return self.n(self.c(x))


class Tied(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(4, 4, 1)
        self.other.bias = self.c.bias

    def forward(self, x: Tensor) -> Any:
        return self.other(self.n(self.c(x)))


class TwoPairs(Pair):
    """Two convolutions of one Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.c2, self.n2 = conv(), norm()
        self.c2.bias = self.c.bias

    def forward(self, x: Tensor) -> Any:
        return self.n2(self.c2(torch.tanh(self.n(self.c(x)))))


class OneConv(Pair):
    """One convolution before two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.n2 = norm()

    def forward(self, x: Tensor) -> Any:
        return self.n2(self.c(torch.tanh(self.n(self.c(x)))))


class ReadsWhereItCalls(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.n(self.c(x)) + self.c.bias.view(1, -1, 1, 1)


class Child(nn.Module):
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = (of,)

    def forward(self, x: Tensor) -> Any:
        return x + self.of[0].bias.view(1, -1, 1, 1)


class ReadByAChild(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.child = Child(self.c)

    def forward(self, x: Tensor) -> Any:
        return self.child(self.n(self.c(x)))


class Penalty(Pair):
    def penalty(self) -> Tensor:
        return self.c.bias.pow(2).sum()


class LoopPenalty(Pair):
    def penalty(self) -> Any:
        return sum(m.bias.pow(2).sum() for m in self.modules() if isinstance(m, nn.Conv2d))


class PropertyOfIt(Pair):
    @property
    def shift(self) -> Tensor:
        return getattr(self.c, "bias") * 2  # noqa: B009


class Untraceable(ByNames):
    def __init__(self) -> None:
        super().__init__(block=nn.Sequential(conv(), norm()))

    def forward(self, x: Tensor) -> Any:
        if float(x.sum()) > 0:
            return self.block(x)
        return self.block(x) + self.block[0].bias.sum()


def plus_bias(method: Callable[..., Tensor]) -> Any:
    @functools.wraps(method)
    def decorated(self: Any, x: Tensor) -> Tensor:
        y = method(self, x)
        return y + self.block[0].bias.sum() if float(x.sum()) < 1e9 else y

    return decorated


class Decorated(ByNames):
    """torch.fx cannot trace it, and its bias is read in the decorator alone."""

    def __init__(self) -> None:
        super().__init__(block=nn.Sequential(conv(), norm()))

    @plus_bias
    def forward(self, x: Tensor) -> Any:
        return self.block(x)


class ThroughParameters(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.n(self.c(x)), sum(p.pow(2).sum() for p in self.c.parameters())


class View(Pair):
    """A registered view of the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(self.c.bias.detach()[:1])


class Flat(Pair):
    """All parameters are views of one storage, outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(self.parameters()).detach(), self.parameters()
        )


class Kept(Pair):
    """A plain attribute that shares memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.c.bias.detach()]


class OneMean(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.c2, self.n2 = conv(), norm()
        self.n2.running_mean = self.n.running_mean

    def forward(self, x: Tensor) -> Any:
        return self.n2(self.c2(torch.tanh(self.n(self.c(x)))))


class ReadsMean(Pair):
    def center(self) -> Any:
        return self.n.running_mean.sum()


class NormElsewhere(Pair):
    def again(self, x: Tensor) -> Any:
        return self.n(x)


class ConvElsewhere(Pair):
    def features(self, x: Tensor) -> Any:
        return self.c(x)


class OnlyInTraining(Pair):
    def forward(self, x: Tensor) -> Any:
        y = self.c(x)
        return self.n(y) if self.training else y


def hooked() -> nn.Module:
    model = Pair()
    model.register_forward_hook(lambda m, inputs, output: output + m.c.bias.sum())
    return model


def hooked_bias() -> nn.Module:
    model = Pair()
    model.c.bias.register_hook(lambda g: g)
    return model


def patched() -> nn.Module:
    model = nn.Sequential(conv(), norm(), nn.Identity())
    model[2].shift = lambda x: x + model[0].bias.sum()
    return model


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Pair()


SHARED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (Tied, "c: its bias is other.bias, too"),
    "two pairs": (TwoPairs, "c: its bias is c2.bias, too"),
    "one convolution": (OneConv, "c is called 2 times"),
    "read in the forward": (ReadsWhereItCalls, "c: its bias is read by the forward of"),
    "read by a child": (ReadByAChild, "c: its bias is read by Child.forward"),
    "read by a method": (Penalty, "c: its bias is read by Penalty.penalty"),
    "read in a loop": (LoopPenalty, "c: its bias is read by LoopPenalty.penalty"),
    "read by a property": (PropertyOfIt, "c: its bias is read by PropertyOfIt.shift"),
    "no trace": (
        Untraceable,
        "block.0: its bias is read by Untraceable.forward",
    ),
    "read by a decorator": (Decorated, "block.0: its bias is read by Decorated.forward"),
    "by parameters()": (ThroughParameters, "c: its bias is read by ThroughParameters.forward"),
    "view": (View, "c: its bias shares memory with first"),
    "flat": (Flat, "c: its bias is a view of a larger storage"),
    "attribute": (Kept, "c: its bias shares memory with kept"),
    "one running mean": (OneMean, "its running_mean is n2.running_mean, too"),
    "running mean read": (ReadsMean, "its running_mean is read by ReadsMean.center"),
    "norm elsewhere": (NormElsewhere, "NormElsewhere.again calls n, too"),
    "convolution elsewhere": (ConvElsewhere, "ConvElsewhere.features calls c, too"),
    "by mode": (OnlyInTraining, "c is called without it in one mode"),
    "hook": (hooked, "c: its bias is read by a hook of (the model itself)"),
    "hook of the bias": (hooked_bias, "c: its bias has a hook"),
    "lambda": (patched, "0: its bias is read by Identity.shift (of the instance)"),
    "inference": (in_inference_mode, "c: its bias was made in inference mode"),
}


@pytest.mark.parametrize("name", SHARED)
def test_bias_that_others_see_is_left(name: str) -> None:
    make, reason = SHARED[name]
    model = make().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    report = fusedtrain.drop_redundant_bias(model)
    assert len(report) == 0
    assert report.left[0].reason.startswith(reason), report
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not any(has_own_forward(m) for m in model.modules())


class Harmless(Pair):
    """Code that writes a bias, or asks for its shape."""

    def __init__(self) -> None:
        super().__init__()
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.ones_(m.bias * 1)
        self.lengths = [self.c.bias.numel()]

    def reset(self) -> None:
        for m in self.modules():
            if isinstance(m, nn.Conv2d) and m.bias is not None:
                nn.init.zeros_(m.bias)
                m.bias.data.fill_(0.5)
        self.where = self.c.bias.shape, next(self.parameters()).device

    def freeze(self) -> None:
        for p in self.parameters():
            p.requires_grad_(False)

    def forward_features(self, x: Tensor, flag: bool = False) -> Tensor:
        x = self.c(x)
        x = self.n(x)
        return x if flag else torch.relu(x)


def test_harmless_code_hinders_nothing() -> None:
    for function in (fusedtrain.drop_redundant_bias, fusedtrain.fold_frozen_norms):
        report = function(Harmless())
        assert (len(report), report.left) == (1, []), report
    _, report = fusedtrain.fold_conv_bn(Harmless().eval())
    assert (len(report), report.left) == (1, []), report


def doubles(make: Callable[[], nn.Module]) -> Any:
    """In float64 from the start: `model.double()` would give each norm a buffer of its own."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return waken(make())
    finally:
        torch.set_default_dtype(torch.float32)


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    values = [model(x)]
    for name in ("penalty", "center"):
        if hasattr(model, name):
            values.append(getattr(model, name)())
    for name in ("again", "features"):
        if hasattr(model, name):
            values.append(getattr(model, name)(x))
    flat: list[Tensor] = []
    for value in values:
        flat += value if isinstance(value, tuple) else [value]
    return flat


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", [n for n in SHARED if n not in ("inference", "hook of the bias")])
def test_fold_frozen_norms_gives_the_same(name: str, mode: str) -> None:
    """Shared parameters are read anew at every call; calls by others are seen."""
    model = doubles(SHARED[name][0]).train(mode == "train")
    tuned = copy.deepcopy(model)
    fusedtrain.fold_frozen_norms(tuned)
    x = torch.randn(2, 4, 3, 3).double()
    for actual, expected in zip(outputs(tuned, x), outputs(model, x), strict=True):
        assert difference(actual.detach(), expected.detach()) < 1e-12
    for loss in (sum(t.pow(2).sum() for t in outputs(m, x)) for m in (tuned, model)):
        loss.backward()
    for a, b in zip(tuned.parameters(), model.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("name", [n for n in SHARED if n not in ("inference", "hook of the bias")])
def test_fold_gives_the_same(name: str) -> None:
    model = doubles(SHARED[name][0])
    folded, _ = fusedtrain.fold_conv_bn(model)
    x = torch.randn(2, 4, 3, 3).double()
    tested = zip(outputs(folded, x)[:1], outputs(model, x)[:1], strict=True)
    if name not in ("read by a method", "read in a loop"):  # the numbers of which are others now
        tested = zip(outputs(folded, x), outputs(model, x), strict=True)
    with torch.no_grad():
        for actual, expected in tested:
            assert difference(actual, expected) < 1e-12


class ReadsWeight(Pair):
    def forward(self, x: Tensor) -> Any:
        return self.n(self.c(x)) * self.c.weight.sum() + self.n.weight.sum()


def test_weight_that_a_forward_reads() -> None:
    model = doubles(ReadsWeight)
    x = torch.randn(2, 4, 3, 3).double()
    folded, report = fusedtrain.fold_conv_bn(model)
    assert "is read by the forward of" in report.left[0].reason
    assert torch.equal(folded(x), model(x))
    tuned = copy.deepcopy(model)
    assert len(fusedtrain.fold_frozen_norms(tuned)) == 1
    assert difference(tuned(x).detach(), model(x).detach()) < 1e-12


def test_running_statistics_of_a_norm_that_trains() -> None:
    """A norm in eval mode follows the statistics that another one moves."""
    model = doubles(OneMean)
    model.n2.train()
    _, report = fusedtrain.fold_conv_bn(model)
    assert [left.reason for left in report.left] == [
        "its running_mean is that of n2, which trains",
        "it is in training mode (model.eval() first)",
    ]
    tuned = copy.deepcopy(model)
    report = fusedtrain.fold_frozen_norms(tuned)
    assert "its running_mean is shared with n2" in report.left[0].reason
    assert len(fusedtrain.fold_conv_bn(model.eval())[1]) == 2


class HandsItselfOn(nn.Module):
    """Not the norm: the norm's own methods may hand `self` on, as those of fusedtrain.nn do."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = conv(), fusedtrain.nn.BatchNormAct2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.n(self.c(x))


def test_own_methods_hinder_nothing() -> None:
    assert len(fusedtrain.drop_redundant_bias(HandsItselfOn())) == 1


class Loops(ByNames):
    """A forward that torch.fx cannot trace hands on what belongs to a block."""

    def __init__(self) -> None:
        super().__init__(block=nn.Sequential(conv(), norm()))

    def forward(self, x: Tensor) -> Any:
        if float(x.sum()) > 0:
            for layer in (self.block[0], torch.tanh):
                x = layer(x)
        return self.block(x)


def test_handed_on_where_torch_fx_cannot_trace() -> None:
    for function in (fusedtrain.drop_redundant_bias, fusedtrain.fold_frozen_norms):
        report = function(Loops())
        assert report.left[0].reason == "Loops.forward hands block.0 on", report
