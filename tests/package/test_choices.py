"""An option that is one of some strings: the error names the argument and every choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain import functional as F

X = torch.ones(2, 4, 6, 6)
BAD = "scaled"


def sgd(**options: Any) -> Any:
    return fusedtrain.optim.SGD([nn.Parameter(torch.ones(2))], 0.1, **options)


def tune(**options: Any) -> Any:
    return fusedtrain.tune("m.py:f", (3, 8, 8), **options)


SAVES = ("q2", "q3", "q4", "q8")
ACTIVATIONS = ("identity", "relu", "silu", "mish", "gelu_tanh", "squareplus")
# Call, argument: some of the choices, or all of a few.
OPTIONS: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "gradient_writeback": (
        lambda: sgd(gradient_writeback=BAD), "gradient_writeback", ("none", "unscaled", "zero")
    ),
    "master_weights": (
        lambda: sgd(master_weights=BAD), "master_weights", ("True", "False", "split24", "split32")
    ),
    "state_dtype": (
        lambda: sgd(state_dtype=BAD), "state_dtype", ("torch.float32", "torch.bfloat16", "q8")
    ),
    "loss_scale": (
        lambda: fusedtrain.apex.amp.initialize(nn.Linear(2, 2), opt_level="O2", loss_scale=BAD),
        "loss_scale", ("number", "dynamic"),
    ),
    "gelu, save": (lambda: F.gelu(X, save=BAD), "save", ("None", *SAVES)),
    "relu, save": (lambda: F.relu(X, save=BAD), "save", ("None", "q1")),
    "nn.SiLU, save": (lambda: fusedtrain.nn.SiLU(save=BAD)(X), "save", ("None", *SAVES)),
    "gated": (lambda: F.gated(X, X, activation=BAD), "activation", ACTIVATIONS),
    "batch_norm_act": (
        lambda: F.batch_norm_act(X, torch.zeros(4), torch.ones(4), activation=BAD),
        "activation", ACTIVATIONS,
    ),
    "group_norm_act": (lambda: F.group_norm_act(X, 1, activation=BAD), "activation", ACTIVATIONS),
    "bias_act": (lambda: F.bias_act(X, act=BAD), "act", ("linear", "lrelu", "swish")),
    "nn.BiasActDropout": (
        lambda: fusedtrain.nn.BiasActDropout(4, activation=BAD), "activation", ACTIVATIONS
    ),
    "act_layer": (
        lambda: fusedtrain.nn.ConvBnAct(4, 4, 1, act_layer=BAD), "act_layer", ("relu", "silu")
    ),
    "convert": (
        lambda: fusedtrain.convert(nn.ReLU(), memory=BAD), "memory",
        ("store", "recompute", "inplace", "q8"),
    ),
    "tune, optimizer": (lambda: tune(optimizer=BAD), "optimizer", ("sgd", "adamw")),
    "tune, device": (lambda: tune(device=BAD), "device", ("cpu", "cuda")),
    "tune, switches": (
        lambda: tune(switches=[BAD]), "switches", ("precision", "channels_last", "batch")
    ),
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_the_error_names_the_argument_and_its_choices(option: str) -> None:
    call, argument, choices = OPTIONS[option]
    with pytest.raises(ValueError, match=BAD) as error:
        call()
    for word in (argument, *choices):
        assert word in str(error.value)
