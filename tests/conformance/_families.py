"""Families of timm and torchvision, each as small as its constructor allows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from helpers.models import timm, torchvision


@dataclass(frozen=True)
class Family:
    name: str  # "timm:resnet18"
    size: int = 32
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        """In float32, seeded; no parameter is 0, and no running statistic 0 or 1."""
        library, _, name = self.name.partition(":")
        torch.manual_seed(0)
        if library == "timm":
            model = timm().create_model(name, num_classes=10, **self.options)
        else:
            models = importlib.import_module(torchvision().__name__ + ".models")
            model = (
                _TORCHVISION[name](models, **self.options)
                if name in _TORCHVISION
                else (models.get_model(name, num_classes=10, **self.options))
            )
        _waken(model)
        return model

    def example(self) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randn(2, 3, self.size, self.size, generator=generator)


def _waken(model: nn.Module) -> None:
    """Layer scales of 1e-6 and last norms of 0 would hide a branch, and a bias of 0 its loss."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rpartition(".")[2]
            if parameter.dim() < 2 or last in ("gamma", "layer_scale"):
                mean = 0.0 if last == "bias" else 1.0
                parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0, 0.2)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)


def _inception(models: Any, **options: Any) -> nn.Module:
    return models.googlenet(num_classes=10, aux_logits=False, init_weights=True, **options)


_TORCHVISION: dict[str, Callable[..., nn.Module]] = {
    "googlenet": _inception,
    "resnet_basic": lambda m, **o: m.ResNet(m.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10, **o),
    "resnext": lambda m, **o: m.ResNet(
        m.resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, groups=4, width_per_group=16, **o
    ),
    "densenet": lambda m, **o: m.DenseNet(8, (2, 2, 2, 2), 16, num_classes=10, **o),
    "convnext": lambda m, **o: m.ConvNeXt(
        [
            m.convnext.CNBlockConfig(16, 32, 1),
            m.convnext.CNBlockConfig(32, 64, 1),
            m.convnext.CNBlockConfig(64, None, 1),
        ],
        num_classes=10, stochastic_depth_prob=0.5, **o,
    ),
    "mobilenet_v2": lambda m, **o: m.mobilenet_v2(width_mult=0.25, num_classes=10, **o),
    "vgg_bn": lambda m, **o: nn.Sequential(
        m.vgg.make_layers([16, "M", 32, "M", 32, 32, "M"], batch_norm=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ),
}  # fmt: skip


def _timm(size: int, *names: str, **options: Any) -> list[Family]:
    return [Family(f"timm:{name}", size, options) for name in names]


def _of_torchvision(size: int, *names: str) -> list[Family]:
    return [Family(f"torchvision:{name}", size) for name in names]


_ONE = (1, 1, 1, 1)
# One family of each kind.
SHORT = [
    *_timm(
        64, "test_byobnet", "test_efficientnet", "test_efficientnet_gn", "test_mambaout",
        "test_nfnet", "test_resnet",
    ),
    *_timm(64, "test_vit", img_size=64),
    *_timm(64, "resnetblur18", "res2net50_26w_4s", layers=_ONE),
    *_timm(64, "mobilenetv3_small_050", "resnest14d"),
    *_of_torchvision(
        64, "convnext", "densenet", "resnet_basic", "resnext", "squeezenet1_1", "vgg_bn",
    ),
]  # fmt: skip
LONG = [
    *_timm(
        64, "test_convnext2", "test_convnext3", "test_efficientnet_evos", "test_efficientnet_ln",
        "lcnet_035", "mnasnet_small", "mobilenetv2_035", "regnety_002", "resnet10t", "tinynet_e",
    ),
    # Half of the time of all; others have most of what they have.
    *_timm(
        64, "edgenext_xx_small", "efficientvit_b0", "ghostnet_050", "mobilevit_xxs", "repvgg_a0",
        "resnetv2_18", "test_convnext",
    ),
    *_timm(64, "seresnet50", layers=_ONE),
    *_timm(64, "resnet26d", "resnetaa50", "resnext50_32x4d", "skresnet18", layers=_ONE),
    *_of_torchvision(
        64, "googlenet", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5",
    ),
    *_timm(
        64, "dla46_c", "dpn48b", "efficientnet_b0", "ese_vovnet19b_slim_dw", "fasternet_t0",
        "fastvit_t8", "ghostnetv2_100", "hardcorenas_a", "hgnetv2_b0", "hrnet_w18_small",
        "inception_next_atto", "legacy_seresnet18", "mixnet_s", "mobileone_s0", "mobilevitv2_050",
        "nf_resnet26", "poolformer_s12", "pvt_v2_b0", "regnetx_002", "repghostnet_050",
        "repvit_m0_9", "rexnet_100", "selecsls42", "spnasnet_100", "starnet_s050", "swiftformer_xs",
    ),
    *_timm(32, "vgg11_bn"),
    *_timm(64, "densenet121", block_config=(2, 2, 2, 2), growth_rate=8),
    *_timm(64, "convmixer_768_32", dim=32, depth=2),
    *_timm(64, "resmlp_12_224", img_size=64, num_blocks=2, embed_dim=64),
    *_timm(
        64, "coat_lite_tiny", "efficientformerv2_s0", "pit_ti_224", "visformer_tiny", img_size=64,
    ),
    # Smaller images end in norms of two values, which raise rounding in float64 to 1e-4.
    *_timm(128, "levit_128s", img_size=128),
    *_timm(128, "shvit_s1"),
    *_of_torchvision(64, "efficientnet_b0", "regnet_y_400mf"),
]  # fmt: skip
FAMILIES = [*SHORT, *LONG]
