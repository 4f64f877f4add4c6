"""A GAN with two optimizers and one GradScaler, in mixed precision.

python examples/recipes/gan_one_scaler.py --steps 200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import fusedtrain

NOISE, SIZE = 16, 16


def generator_of(width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    sizes = ((NOISE, 2 * width, 1, 0), (2 * width, width, 2, 1))
    for inputs, outputs, stride, padding in sizes:
        layers += [nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh())


def critic_of(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2), nn.Conv2d(2 * width, 1, 4), nn.Flatten(0),
    )  # fmt: skip


def pictures(count: int) -> Tensor:
    """Horizontal or vertical bars, from -1 to 1."""
    rows = torch.rand(count, 1, SIZE, 1).gt(0.5).expand(-1, -1, -1, SIZE)
    images = torch.where(torch.rand(count, 1, 1, 1) < 0.5, rows, rows.transpose(2, 3))
    return images.float() * 2 - 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=16)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    generator, critic = generator_of(args.width).to(device), critic_of(args.width).to(device)
    noise = torch.randn(args.batch_size, NOISE, 1, 1, device=device)
    print(fusedtrain.convert(generator, noise, memory="recompute"))
    print(fusedtrain.convert(critic, torch.randn(args.batch_size, 1, SIZE, SIZE, device=device)))
    adam = fusedtrain.optim.Adam
    of_critic = adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.999))
    of_generator = adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.999), ema_decay=0.99)
    scaler = fusedtrain.amp.GradScaler(device)
    criterion = nn.BCEWithLogitsLoss()
    ones = torch.ones(args.batch_size, device=device)
    for step in range(args.steps):
        real = pictures(args.batch_size).to(device)
        noise = torch.randn(args.batch_size, NOISE, 1, 1, device=device)
        of_critic.zero_grad()
        with torch.autocast(device, dtype):
            fake = generator(noise)
            judged = criterion(critic(real), ones) + criterion(critic(fake.detach()), 0 * ones)
        scaler.scale(judged).backward()
        scaler.step(of_critic)

        of_generator.zero_grad()
        with torch.autocast(device, dtype):
            cheated = criterion(critic(fake), ones)
        scaler.scale(cheated).backward()
        scaler.step(of_generator)
        scaler.update()  # once, after both optimizers
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step + 1}: critic {judged.item():.3f}, generator {cheated.item():.3f}")
    with of_generator.swap_averages(), torch.no_grad():
        images = generator(noise)  # by the averaged weights
    print(
        f"loss scale {scaler.get_scale():g}; pictures from {images.min():.2f} to {images.max():.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
