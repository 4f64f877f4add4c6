"""Converted networks under autocast, as people train, beside float64 and beside eager torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusedtrain
from helpers.models import build

FEW = ("timm:test_efficientnet", "timm:test_convnext")
SLOW = """
timm:mobilenetv3_small_050 timm:tinynet_e timm:regnety_002 timm:convnextv2_atto timm:ghostnet_050
timm:test_byobnet timm:test_nfnet torchvision:shufflenet_v2_x0_5
"""
LONG = """
test_resnet test_efficientnet_gn test_efficientnet_ln test_efficientnet_evos test_vit test_convnext2
test_convnext3 test_mambaout resnet10t resnet14t mobilenetv2_035 lcnet_035 mnasnet_small regnetx_002
regnetz_005 efficientnet_lite0 mobilenetv4_conv_small_035 repghostnet_050 convnext_atto dla46_c
edgenext_xx_small ese_vovnet19b_slim_dw semnasnet_075 hardcorenas_a poolformer_s12 dla60x_c
tf_mobilenetv3_small_minimal_100 spnasnet_100 fbnetc_100 mobileone_s0
"""
NAMES = [
    *FEW,
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW.split()),
    *(pytest.param(f"timm:{name}", marks=pytest.mark.long) for name in LONG.split()),
]
pytestmark = pytest.mark.usefixtures("one_thread")

# Distance from float64 beside eager torch's; the largest of 80 was 1.26 (mnasnet_small).
MOST = 1.5


def outcome(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The output, and all gradients in one vector, in float64."""
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = model(x)
    y.double().square().mean().backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return y.detach().double(), torch.cat(gradients)


@pytest.mark.parametrize("name", NAMES)
def test_no_further_from_float64_than_eager(name: str) -> None:
    model = build(name)
    size = getattr(model, "default_cfg", {})
    side = size["input_size"][1] if size.get("fixed_input_size") else 32
    x = torch.randn(8, 3, side, side)
    truth = outcome(copy.deepcopy(model).double(), x.double(), None)
    for layout in (torch.channels_last, torch.contiguous_format):
        eager = copy.deepcopy(model).to(memory_format=layout)
        converted = copy.deepcopy(eager)
        report = fusedtrain.convert(converted, verify=False)
        assert len(report) > 0
        images = x.to(memory_format=layout)
        ours = outcome(converted, images, torch.bfloat16)
        theirs = outcome(eager, images, torch.bfloat16)
        for what, a, b, exact in zip(("output", "gradients"), ours, theirs, truth):
            share = float((a - exact).norm() / (b - exact).norm())
            assert share <= MOST, f"{what}, {layout}: {share:.2f} of eager's distance"


def test_float16_under_a_scaler() -> None:
    """Losses of 8 steps stay as close to float64's as eager's do, and no step is skipped."""
    model, x = build("timm:test_efficientnet"), torch.randn(8, 3, 64, 64)
    losses = {}
    for who in ("float64", "eager", "fusedtrain"):
        net = copy.deepcopy(model)
        wide = who == "float64"
        if wide:
            net.double()
        elif who == "fusedtrain":
            fusedtrain.convert(net, verify=False)
        optim = fusedtrain.optim if who == "fusedtrain" else torch.optim
        optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        kind = fusedtrain.amp.GradScaler if who == "fusedtrain" else torch.amp.GradScaler
        scaler = kind("cpu", init_scale=1024.0, enabled=not wide)
        images = x.double() if wide else x.to(memory_format=torch.channels_last)
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=not wide):
                y = net(images)
            loss = y.double().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.setdefault(who, []).append(float(loss))
        assert wide or scaler.get_scale() == 1024.0
    exact, eager, ours = (torch.tensor(losses[who]) for who in ("float64", "eager", "fusedtrain"))
    assert ours[-1] < ours[0]
    assert float((ours - exact).norm()) <= MOST * float((eager - exact).norm()) + 1e-3
