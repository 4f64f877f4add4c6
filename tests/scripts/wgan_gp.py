"""Two networks against each other, the critic's gradient held near one: a second derivative."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fusedtrain

from .harness import Part, Run, images

nz, n_critic, weight = 8, 2, 10.0


def make_generator() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(nz, 256, bias=False), nn.Unflatten(1, (16, 4, 4)), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(16, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 3, padding=1), nn.Tanh(),
    )  # fmt: skip


def make_critic() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(),
        nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(1, 16), nn.SiLU(),
        nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(1, 16), nn.SiLU(), nn.Flatten(),
        nn.Linear(256, 1),
    )  # fmt: skip


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    share = torch.rand(len(real), 1, 1, 1)
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    generator, critic = make_generator(), make_critic()
    dataset = images(16, 16)
    noise = torch.randn(4, nz, generator=torch.Generator().manual_seed(0))
    reports: list[Any] = [None, None]
    if fused:
        reports = [
            fusedtrain.convert(generator, noise, memory=fused),
            fusedtrain.convert(critic, dataset.tensors[0][:4], memory=fused),
        ]
    Adam = fusedtrain.optim.Adam if fused else torch.optim.Adam
    opt_g = Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.9))
    opt_d = Adam(critic.parameters(), lr=1e-4, betas=(0.5, 0.9))
    loader = DataLoader(dataset, batch_size=4, shuffle=True)

    def train() -> list[float]:
        generator.train()
        critic.train()
        losses = []
        for i, (real, _) in enumerate(loader, 1):
            fake = generator(torch.randn(len(real), nz))
            opt_d.zero_grad()
            d_loss = critic(fake.detach()).mean() - critic(real).mean()
            penalty = gradient_penalty(critic, real, fake.detach())
            (d_loss + weight * penalty).backward()
            opt_d.step()
            losses += [d_loss.item(), penalty.item()]
            if i % n_critic:
                continue
            opt_g.zero_grad()
            g_loss = -critic(generator(torch.randn(len(real), nz))).mean()
            g_loss.backward()
            opt_g.step()
            losses.append(g_loss.item())
        return losses

    parts = {
        "generator": Part(generator, opt_g, noise, reports[0]),
        "critic": Part(critic, opt_d, dataset.tensors[0][:4], reports[1]),
    }
    return Run(parts, train(), train)
