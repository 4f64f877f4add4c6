"""Depthwise convolutions within `fusedtrain.recompute`: what is kept, and the bits of "store"."""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fusedtrain
import fusedtrain.functional as F
from fusedtrain import _recompute
from fusedtrain.nn import BatchNormAct2d, DepthwiseConv2d
from fusedtrain.ops import depthwise as _depthwise
from helpers.recompute import assert_same_bits, kept_by, recomputed, run_both

RULES = [_depthwise.Faster(*some) for some in itertools.product((False, True), repeat=3)]
OURS, TORCHS = RULES[-1], RULES[0]


def use(patch: pytest.MonkeyPatch, rule: _depthwise.Faster) -> None:
    patch.setattr(_depthwise, "_MEASURED", {"cpu": lambda *_: rule})


def block(**options: Any) -> nn.Sequential:
    """An inverted bottleneck: narrow, wide, depthwise, narrow."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 16, 1, bias=False), BatchNormAct2d(16, act_layer="silu"),
        DepthwiseConv2d(16, 16, 3, padding=1, **options), BatchNormAct2d(16, act_layer="silu"),
        nn.Conv2d(16, 4, 1),
    )  # fmt: skip


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_bottleneck_keeps_one_wide_tensor(
    rule: _depthwise.Faster, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager keeps four: the inputs of both norms, and their outputs."""
    use(monkeypatch, rule)
    x = torch.randn(3, 4, 9, 8, requires_grad=True)
    if last:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    model = block()
    assert kept_by(lambda: model(x), 4 * x.nbytes) == 4.25
    assert kept_by(lambda: recomputed(model, x), 4 * x.nbytes) == 1.25
    assert_same_bits(run_both(model, x))


@pytest.mark.parametrize("rule", [TORCHS, OURS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_samples_alone(
    dtype: torch.dtype, rule: _depthwise.Faster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, rule)
    weight = torch.randn(6, 1, 3, 3).to(dtype)
    for shape in ((2, 3, 8, 7), (3, 8, 7)):
        x = torch.randn(shape).to(dtype).requires_grad_()

        def run(x: Tensor = x) -> Tensor:
            return F.depthwise_conv2d(F.silu(x), weight, None, (2, 1), "valid").exp().sin()

        assert kept_by(lambda: recomputed(run), x.nbytes) < kept_by(run, x.nbytes)
        stored = torch.autograd.grad(run().sum(), x)
        again = torch.autograd.grad(recomputed(run).sum(), x)
        assert torch.equal(stored[0], again[0])


@pytest.mark.parametrize("rule", [TORCHS, OURS])
def test_autocast(rule: _depthwise.Faster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are recomputed in their dtype, wherever autocast is active."""
    use(monkeypatch, rule)
    model, x = block(), torch.randn(3, 4, 8, 7)
    for forward, backward in ((True, False), (False, True), (True, True)):
        runs = []
        for context in (nullcontext(), fusedtrain.recompute()):
            twin = copy.deepcopy(model)
            with torch.autocast("cpu", torch.bfloat16, enabled=forward), context:
                y = twin(x)
            assert y.dtype is (torch.bfloat16 if forward else torch.float32)
            with torch.autocast("cpu", torch.bfloat16, enabled=backward):
                y.float().square().sum().backward()
            runs.append([y.detach(), *(p.grad for p in twin.parameters() if p.grad is not None)])
        assert_same_bits(runs)


@pytest.mark.parametrize("rule", [TORCHS, OURS])
@pytest.mark.parametrize("what", ["input", "weight", "bias"])
def test_modified_tensors(
    what: str, rule: _depthwise.Faster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, rule)
    layer, weight = DepthwiseConv2d(4, 4, 3), torch.ones((), requires_grad=True)
    with fusedtrain.recompute():
        shifted = torch.randn(2, 4, 6, 6, requires_grad=True) + 1
        z = layer(shifted) * weight
    with torch.no_grad():
        {"input": shifted, "weight": layer.weight, "bias": layer.bias}[what].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z.sum(), [weight])


def test_outputs_without_gradient_or_of_other_devices_have_no_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, OURS)
    layer, x = DepthwiseConv2d(4, 4, 3), torch.randn(2, 4, 6, 6)
    with fusedtrain.recompute():
        assert _recompute.tagged(layer(x)) is not None
        with torch.no_grad():
            assert _recompute.tagged(layer(x)) is None
        elsewhere = copy.deepcopy(layer).to("meta")(x.to("meta"))
    assert elsewhere.grad_fn.name() == T.conv2d(x, layer.weight, groups=4).grad_fn.name()
