"""Train a small detector with one box a cell, as YOLO has them, fold it, and export it to ONNX.

python examples/recipes/detect_onnx.py --steps 300 --output detector.onnx
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import fusedtrain

SIZE, CELL = 64, 8  # pixels; the grid has (SIZE / CELL)^2 cells


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
    )


class Detector(nn.Module):
    """Five numbers a cell: whether an object has its centre there, its offset and its size."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        stages = [conv(3, width, 2)]
        for channels in (width, 2 * width):
            stages += [conv(channels, channels), conv(channels, 2 * channels, 2)]
        self.backbone = nn.Sequential(*stages)
        self.head = nn.Conv2d(4 * width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise with one bright rectangle; its centre and size in pixels."""
    sizes = torch.randint(8, 25, (count, 2), generator=generator)
    corners = (torch.rand(count, 2, generator=generator) * (SIZE - sizes)).long()
    images = torch.randn(count, 3, SIZE, SIZE, generator=generator) * 0.3
    for image, (top, left), (high, wide) in zip(
        images, corners.tolist(), sizes.tolist(), strict=True
    ):
        image[:, top : top + high, left : left + wide] += 1.5
    return images, torch.cat([corners + sizes / 2, sizes.float()], 1)


def loss_of(output: Tensor, boxes: Tensor) -> Tensor:
    number = torch.arange(len(boxes))
    rows, columns = (boxes[:, :2] / CELL).long().clamp(max=SIZE // CELL - 1).unbind(1)
    present = torch.zeros_like(output[:, 0])
    present[number, rows, columns] = 1.0
    presence = nn.functional.binary_cross_entropy_with_logits(output[:, 0], present)
    predicted = output[number, 1:, rows, columns]
    target = torch.cat([boxes[:, :2] / CELL % 1, boxes[:, 2:] / SIZE], 1)
    return presence + nn.functional.smooth_l1_loss(predicted, target)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("runs/detector.onnx"))
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Detector()
    print(fusedtrain.convert(model, (args.batch_size, 3, SIZE, SIZE)))
    optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=3e-3, ema_decay=0.9)
    losses = []
    for _ in range(args.steps):
        images, boxes = pictures(args.batch_size, generator)
        optimizer.zero_grad()
        loss = loss_of(model(images), boxes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {args.steps} steps")

    example = torch.randn(2, 3, SIZE, SIZE)
    with optimizer.swap_averages():  # the averaged weights are what is folded
        folded, report = fusedtrain.fold_conv_bn(model.eval(), example)
    print(report)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    torch.onnx.export(
        folded, (example,), args.output, dynamo=True, dynamic_shapes=({0: "batch"},), verbose=False
    )
    print(f"Wrote {args.output}, {args.output.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
