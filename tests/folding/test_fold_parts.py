"""Folding models with parts that are no plain Python, and what folding leaves untouched."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusedtrain
from helpers.folding import difference, waken


def pair() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


class Two(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.plain, self.part = pair(), part

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.part(x)


def example() -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def quantized() -> nn.Module:
    from torch.ao.nn.quantized import BatchNorm2d, Conv2d, DeQuantize, Quantize

    layers = (Quantize(0.1, 0, torch.quint8), Conv2d(3, 4, 3), BatchNorm2d(4), DeQuantize())
    return nn.Sequential(*layers)


PARTS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "script": (lambda: torch.jit.script(waken(pair())), 1, "it is scripted"),
    "trace": (lambda: torch.jit.trace(waken(pair()), example()), 1, "it is scripted"),
    "freeze": (lambda: torch.jit.freeze(torch.jit.script(pair().eval())), 1, "it is scripted"),
    "compile": (lambda: torch.compile(pair(), backend="eager"), 2, ""),
    "fx": (lambda: fx.symbolic_trace(pair()), 2, ""),
    "quantized": (quantized, 1, "a BatchNorm2d has a forward of its own"),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("what", ["tune", "drop", "fold"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_rest_of_the_model(name: str, what: str) -> None:
    make, count, reason = PARTS[name]
    model, x = waken(Two(make())), example()
    model.plain.train(what == "drop")
    model.part.train(what == "drop" and name in ("compile", "fx"))
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
    training = [m.training for m in model.modules()]
    changed: nn.Module = model
    if what == "fold":
        changed, report = fusedtrain.fold_conv_bn(model, x)
    else:
        function = (
            fusedtrain.fold_frozen_norms if what == "tune" else fusedtrain.drop_redundant_bias
        )
        report = function(model)
    assert len(report) == count
    assert [left.reason for left in report.left] == [reason] * bool(reason)
    if "scripted" in reason:
        assert report.left[0][:2] == ("part", "Sequential")
        assert "left 1 part\n  1 x Sequential: it is scripted (part)" in str(report)
    assert [m.training for m in model.modules()] == training
    with torch.no_grad():
        assert difference(changed(x), expected) < 1e-5
    if what != "fold":
        assert fusedtrain.revert(model) == count
        with torch.no_grad():
            assert difference(copy.deepcopy(model)(x), expected) < 1e-5


def test_scripted_model() -> None:
    model = torch.jit.script(waken(pair()))
    for report in (
        fusedtrain.fold_frozen_norms(model),
        fusedtrain.drop_redundant_bias(model),
        fusedtrain.fold_conv_bn(model, example())[1],
    ):
        assert len(report) == 0
        assert report.left[0].name == "(the model itself)"
    with pytest.raises(ValueError, match="scripted"):
        fusedtrain.fold_conv_bn(model, inplace=True)


class Counting(nn.Module):
    """State of every kind that a call or a trace moves."""

    def __init__(self) -> None:
        super().__init__()
        self.block = pair()
        self.free = nn.BatchNorm2d(3)
        self.register_buffer("calls", torch.zeros(()))
        self.number, self.log, self.seen = 0, [0], {"shapes": 0}
        self.hidden = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.log.append(self.number)
        self.seen["shapes"] += 1
        self.calls += 1
        self.hidden[0] = self.hidden[0] + 1
        noise = random.random() + torch.rand(()) + torch.randn(1)
        return self.block(torch.tanh(self.free(x))) * noise


def state(model: Any) -> list[Any]:
    values: list[Any] = [model.number, list(model.log), dict(model.seen), model.hidden[0].item()]
    return [*values, *(v.tolist() for v in model.state_dict().values())]


@pytest.mark.parametrize("inplace", [False, True])
def test_an_example_changes_nothing(inplace: bool) -> None:
    """Neither the model, nor the result, nor the generators."""
    model = waken(Counting())
    model.free.train()
    wanted, report = fusedtrain.fold_conv_bn(copy.deepcopy(model))
    assert len(report) == 1
    before, generators = state(model), (random.getstate(), torch.get_rng_state())
    folded, report = fusedtrain.fold_conv_bn(model, example(), inplace=inplace)
    assert len(report) == 1
    assert report.error is not None
    assert state(folded) == state(wanted)
    assert folded.free.num_batches_tracked == 0
    if not inplace:
        assert state(model) == before
    assert generators[0] == random.getstate()
    assert torch.equal(generators[1], torch.get_rng_state())


def test_tracing_changes_nothing() -> None:
    for function in (fusedtrain.fold_frozen_norms, fusedtrain.drop_redundant_bias):
        model = Counting()
        twin = copy.deepcopy(model)
        random_state, torch_state = random.getstate(), torch.get_rng_state()
        assert len(function(model)) == 1
        fusedtrain.revert(model)
        assert state(model) == state(twin)
        assert random_state == random.getstate()
        assert torch.equal(torch_state, torch.get_rng_state())
