"""timm's optimizer factory knows ours."""

from __future__ import annotations

import importlib

import pytest
import torch

import fusedtrain
from fusedtrain.integrations.timm import register
from helpers.models import timm


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("sgd", "sgd"), ("momentum", "momentum"), ("sgdw", "sgdw"), ("adam", "adam"),
     ("adamw", "adamw"), ("nadamw", "nadamw"), ("lion", "lion"), ("rmsprop", "rmsprop"),
     ("rmsproptf", "rmsproptf"), ("adagrad", "adagrad"), ("lars", "lars"), ("larc", "larc"),
     ("lamb", "lamb"), ("lambc", "lambc"), ("novograd", "novograd")],
)  # fmt: skip
def test_same_options_and_same_steps_as_timm(name: str, theirs: str) -> None:
    timm()
    factory = importlib.import_module("timm.optim")
    assert f"fusedtrain-{name}" in register()
    models = []
    for opt in (f"fusedtrain-{name}", theirs):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 8, 3)).double()
        kwargs = {"layer_decay": 0.75} if name == "adamw" else {}
        optimizer = factory.create_optimizer_v2(
            model, opt=opt, lr=0.01, weight_decay=0.05, momentum=0.8, **kwargs
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        models.append((model, optimizer))
    (ours, optimizer), (stock, _) = models
    assert isinstance(optimizer, fusedtrain.optim.FusedOptimizer)
    # NovoGrad keeps its second moment in float32
    tolerance = 1e-6 if name == "novograd" else 1e-12
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_registering_twice_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    timm()
    register()
    register()
    assert not caplog.records
