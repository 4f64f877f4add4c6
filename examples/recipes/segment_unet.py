"""Segmentation with a U-Net whose training must fit into a budget of memory.

python examples/recipes/segment_unet.py --budget 0.5 --steps 100
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import fusedtrain

SIZE = 64


def block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)]
        layers += [nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(map(block, [3, *widths], widths))
        self.bottom = block(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * channels, channels, 2, stride=2) for channels in widths[::-1]
        )
        self.join = nn.ModuleList(block(2 * channels, channels) for channels in widths[::-1])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


def pictures(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise with a brighter disc, and the mask of the disc."""
    places = torch.rand(count, 2, 1, 1, generator=generator) * SIZE
    radius = SIZE * (0.1 + 0.2 * torch.rand(count, 1, 1, 1, generator=generator))
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    distance = (torch.stack([rows, columns]) - places).square().sum(1, keepdim=True).sqrt()
    masks = (distance < radius).float()
    return torch.randn(count, 3, SIZE, SIZE, generator=generator) + masks, masks


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--budget", type=float, default=0.5, help="of the peak of eager PyTorch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = UNet()
    images, _ = pictures(args.batch_size, generator)

    plan = fusedtrain.plan_memory(model, images, args.budget)
    print(plan)
    print(fusedtrain.convert(model, images, memory=plan))
    optimizer = fusedtrain.optim.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)
    losses = []
    for _ in range(args.steps):
        images, masks = pictures(args.batch_size, generator)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(images), masks)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"peak: {plan.peak / 1e6:.1f} MB instead of {plan.eager_peak / 1e6:.1f}")
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {args.steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
