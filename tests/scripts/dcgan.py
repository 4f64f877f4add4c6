"""Two networks against each other, initialised by the names of their classes; two optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

import fusedtrain

from .harness import Part, Run, images

nz, ngf, ndf, nc = 6, 4, 4, 3


def weights_init(m: nn.Module) -> None:
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        torch.nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        torch.nn.init.normal_(m.weight, 1.0, 0.02)
        torch.nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input).view(-1, 1).squeeze(1)


def train(
    netG: nn.Module, netD: nn.Module, loader: DataLoader, optimizerG: Any, optimizerD: Any
) -> list[float]:
    criterion = nn.BCELoss()
    netG.train()
    netD.train()
    losses = []
    for real, _ in loader:
        netD.zero_grad()
        batch_size = real.size(0)
        label = torch.full((batch_size,), 1.0)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        noise = torch.randn(batch_size, nz, 1, 1)
        fake = netG(noise)
        label.fill_(0.0)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        optimizerD.step()

        netG.zero_grad()
        label.fill_(1.0)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        optimizerG.step()
        losses += [errD_real.item(), errD_fake.item(), errG.item()]
    return losses


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    dataset = images(16, 16)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    netG, netD = Generator(), Discriminator()
    netG.apply(weights_init)
    netD.apply(weights_init)
    reports: list[Any] = [None, None]
    if fused:
        reports = [
            fusedtrain.convert(netG, lambda: torch.randn(4, nz, 1, 1), memory=fused),
            fusedtrain.convert(netD, lambda: torch.randn(4, nc, 16, 16), memory=fused),
        ]
    Adam = fusedtrain.optim.Adam if fused else optim.Adam
    optimizerD = Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    losses = train(netG, netD, loader, optimizerG, optimizerD)
    noise = torch.randn(4, nz, 1, 1, generator=torch.Generator().manual_seed(0))
    parts = {
        "generator": Part(netG, optimizerG, noise, reports[0]),
        "discriminator": Part(netD, optimizerD, dataset.tensors[0][:4], reports[1]),
    }
    return Run(parts, losses, lambda: train(netG, netD, loader, optimizerG, optimizerD))
