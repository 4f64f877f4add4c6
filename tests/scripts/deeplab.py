"""DeepLab by Lightning: atrous convolutions, two losses, a metric of torchmetrics, `self.log`."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain
from helpers.lightning_runs import callback, trainer
from helpers.models import lightning, torchvision

from .harness import Part, Run, images

CLASSES = 4


class DeepLab(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        deeplab = importlib.import_module(f"{torchvision().__name__}.models.segmentation.deeplabv3")
        self.low = nn.Sequential(*block(3, 8, stride=2), *block(8, 16))
        self.high = nn.Sequential(*block(16, 16, stride=2), *block(16, 24, dilation=2))
        self.aspp = deeplab.ASPP(24, [2, 4], 16)
        self.decoder = nn.Sequential(*block(32, 16), nn.Conv2d(16, CLASSES, 1))
        self.aux = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.low(x)
        h = F.interpolate(self.aspp(self.high(low)), size=low.shape[-2:], mode="bilinear")
        sizes: Any = {"size": x.shape[-2:], "mode": "bilinear", "align_corners": False}
        out = F.interpolate(self.decoder(torch.cat([h, low], 1)), **sizes)
        return {"out": out, "aux": F.interpolate(self.aux(low), **sizes)}


def block(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]


def main(fused: str = "") -> Run:
    package: Any = lightning()
    torchmetrics = importlib.import_module("torchmetrics")
    torch.manual_seed(1)
    net, report = DeepLab(), None
    pictures = images(16, 32).tensors[0]
    masks = (pictures.mean(1) * 2).long().clamp(0, CLASSES - 1)
    dataset = TensorDataset(pictures, masks)
    if fused:
        report = fusedtrain.convert(net, pictures[:4], memory=fused)
    SGD = fusedtrain.optim.SGD if fused else torch.optim.SGD
    optimizer = SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    losses: list[float] = []

    class Segmentation(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net
            self.iou = torchmetrics.JaccardIndex(task="multiclass", num_classes=CLASSES)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            x, y = batch
            outputs = self.net(x)
            loss = F.cross_entropy(outputs["out"], y) + 0.4 * F.cross_entropy(outputs["aux"], y)
            self.iou(outputs["out"].argmax(1), y)
            self.log("loss", loss)
            self.log("iou", self.iou, on_epoch=True)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    module = Segmentation()
    loader = DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)

    def train() -> list[float]:
        net.train()
        losses.clear()
        added = {"callbacks": callback(submodule="net")} if fused else {}
        trainer(max_epochs=1, precision="bf16-mixed", **added).fit(module, loader)
        return losses[:]

    return Run({"net": Part(net, optimizer, pictures[:4], report)}, train(), train)
