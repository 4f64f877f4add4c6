"""ConvBnAct: timm's ConvNormAct, seen by folding, tuning and bias removal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusedtrain
from fusedtrain.nn.conv import ConvBnAct
from helpers.folding import difference, waken
from helpers.models import timm

ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"kernel_size": 3, "stride": 2, "act_layer": nn.SiLU},
    {"kernel_size": 2, "stride": 3},
    {"kernel_size": 3, "dilation": 2, "groups": 2, "bias": True},
    {"kernel_size": 5, "padding": 1, "apply_act": False},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_is_timms(arguments: dict[str, Any]) -> None:
    timm()
    from timm.layers import ConvNormAct

    theirs = ConvNormAct(4, 6, **arguments)
    ours = ConvBnAct(4, 6, **arguments)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 9, 8)
    for mode in (True, False):
        assert difference(ours.train(mode)(x).detach(), theirs.train(mode)(x).detach()) < 1e-5


def test_folds_tunes_and_drops() -> None:
    model = waken(ConvBnAct(4, 6, 3, bias=True, act_layer=nn.SiLU))
    x = torch.randn(2, 4, 9, 8)
    expected = model(x).detach()
    _, report = fusedtrain.fold_conv_bn(model, x)
    assert (len(report), report.left) == (1, [])
    tuned = copy.deepcopy(model)
    assert len(fusedtrain.fold_frozen_norms(tuned)) == 1
    assert difference(tuned(x).detach(), expected) < 1e-5
    model.train()
    assert len(fusedtrain.drop_redundant_bias(model)) == 1
    assert difference(model.eval()(x).detach(), expected) < 1e-5


def test_with_a_norm_of_timm() -> None:
    timm()
    from timm.layers import BatchNormAct2d

    model = waken(ConvBnAct(4, 6, 3, norm_layer=BatchNormAct2d, act_layer=nn.SiLU, bias=True))
    assert list(model.state_dict())[:2] == ["conv.weight", "conv.bias"]
    x = torch.randn(2, 4, 9, 8)
    _, report = fusedtrain.fold_conv_bn(model, x)
    assert (len(report), report.left) == (1, [])
    assert model(x).shape == (2, 6, 9, 8)
    assert (model.in_channels, model.out_channels) == (4, 6)


def test_without_norm_and_mistakes() -> None:
    timm()
    from timm.layers import ConvNormAct

    for options in ARGUMENTS:
        for_size = {k: v for k, v in options.items() if k not in ("act_layer", "apply_act")}
        theirs = ConvNormAct(4, 6, **for_size).conv
        assert ConvBnAct(4, 6, **for_size, apply_norm=False).conv.padding == theirs.padding
    model = ConvBnAct(4, 6, (1, 3), apply_norm=False, dtype=torch.float64)
    assert model(torch.randn(2, 4, 5, 5).double()).shape == (2, 6, 5, 5)
    with pytest.raises(NotImplementedError, match="aa_layer"):
        ConvBnAct(4, 6, aa_layer=nn.Identity)
    with pytest.raises(ValueError, match="divisible"):
        ConvBnAct(4, 6, groups=3, apply_norm=False)
