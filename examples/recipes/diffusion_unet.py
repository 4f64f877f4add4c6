"""A diffusion U-Net in bfloat16 and channels_last, with averages of its weights.

python examples/recipes/diffusion_unet.py --width 32 --steps 200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedtrain

SIZE, TIMES = 32, 1000


class ResBlock(nn.Module):
    """Group norm, SiLU and convolution, twice; the time scales and shifts in between (AdaGN)."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.drop = nn.Linear(time, 2 * outputs), nn.Dropout(0.1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, 1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = F.silu(self.norm2(h) * (1 + scale) + shift)
        return self.skip(x) + self.conv2(self.drop(h))


class UNet(nn.Module):
    rates: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = ResBlock(width, width, time)
        self.shrink = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = ResBlock(2 * width, 2 * width, time)
        self.up = ResBlock(3 * width, width, time)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)
        self.register_buffer("rates", torch.logspace(0, -4, width // 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * self.rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        high = self.down(self.first(x), time)
        low = self.middle(self.shrink(high), time)
        h = self.up(torch.cat([F.interpolate(low, scale_factor=2.0), high], 1), time)
        return self.last(F.silu(self.norm(h)))


def pictures(count: int) -> Tensor:
    """Discs of one colour before another."""
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    places = SIZE * torch.rand(count, 2, 1, 1)
    distance = (torch.stack([rows, columns]) - places).square().sum(1, keepdim=True).sqrt()
    front, back = torch.rand(2, count, 3, 1, 1) * 2 - 1
    discs = torch.where(distance < SIZE / 4, front, back)
    return discs.contiguous(memory_format=torch.channels_last)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--memory", choices=["store", "recompute"], default="store")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    model = UNet(args.width)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    example = pictures(args.batch_size), torch.randint(TIMES, (args.batch_size,))
    with torch.autocast("cpu", torch.bfloat16):
        report = fusedtrain.convert(model, example, memory=args.memory, dropout="fused")
    print(report)
    optimizer = fusedtrain.optim.AdamW(
        model.parameters(), lr=2e-3, max_grad_norm=1.0, ema_decay=0.99
    )
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), 0)
    losses = []
    for _ in range(args.steps):
        images, t = pictures(args.batch_size), torch.randint(TIMES, (args.batch_size,))
        noise, share = torch.randn_like(images), kept[t][:, None, None, None]
        noisy = share.sqrt() * images + (1 - share).sqrt() * noise
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(noisy, t).float(), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {args.steps} steps")
    with optimizer.swap_averages(), torch.no_grad():
        model.eval()
        error = F.mse_loss(model(noisy, t), noise).item()
    print(f"error of the averaged weights on the last batch: {error:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
