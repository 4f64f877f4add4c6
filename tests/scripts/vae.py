"""A variational autoencoder: the loss from outputs of one forward, a prior that is sampled."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fusedtrain

from .harness import Part, Run, epoch, images


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 24)
        self.fc21 = nn.Linear(24, 4)
        self.fc22 = nn.Linear(24, 4)
        self.fc3 = nn.Linear(4, 24)
        self.fc4 = nn.Linear(24, 64)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z: Tensor) -> Tensor:
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(outputs: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    reconstruction, mu, logvar = outputs
    likelihood = F.binary_cross_entropy(reconstruction, x.view(-1, 64), reduction="sum")
    divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return likelihood + divergence


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    data = images(32, 8, channels=1).tensors[0].sigmoid()
    loader = DataLoader(TensorDataset(data, data), batch_size=16, shuffle=True)
    model, report = VAE(), None
    if fused:
        report = fusedtrain.convert(model, lambda: torch.rand(4, 1, 8, 8), memory=fused)
    Adam = fusedtrain.optim.Adam if fused else optim.Adam
    optimizer = Adam(model.parameters(), lr=1e-3)

    def train() -> list[float]:
        return epoch(model, loader, optimizer, loss_function)

    losses = []
    for _ in range(2):
        losses += train()
        with torch.no_grad():  # samples of the prior: another method than forward
            model.eval()
            losses.append(model.decode(torch.randn(8, 4)).mean().item())
    return Run({"model": Part(model, optimizer, data[:4], report)}, losses, train)
