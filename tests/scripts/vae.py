"""A variational autoencoder: the loss from outputs of one forward, a prior that is sampled."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fusedtrain

from .harness import Part, Run, images


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


def loss_function(reconstruction: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    likelihood = F.binary_cross_entropy(reconstruction, x.view(-1, 64), reduction="sum")
    divergence = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return likelihood + divergence


def train(model: nn.Module, loader: DataLoader, optimizer: optim.Optimizer) -> list[float]:
    model.train()
    losses = []
    for data, _ in loader:
        data = data.sigmoid()
        optimizer.zero_grad()
        reconstruction, mu, logvar = model(data)
        loss = loss_function(reconstruction, data, mu, logvar)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def main(fused: str = "") -> Run:
    torch.manual_seed(1)
    dataset = images(32, 8, channels=1)
    loader = DataLoader(dataset, batch_size=16, shuffle=True)
    model, report = VAE(), None
    if fused:
        report = fusedtrain.convert(model, lambda: torch.rand(4, 1, 8, 8), memory=fused)
    Adam = fusedtrain.optim.Adam if fused else optim.Adam
    optimizer = Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        losses += train(model, loader, optimizer)
        with torch.no_grad():  # samples of the prior: another method than forward
            model.eval()
            losses.append(model.decode(torch.randn(8, 4)).mean().item())
    part = Part(model, optimizer, dataset.tensors[0][:4].sigmoid(), report)
    return Run({"model": part}, losses, lambda: train(model, loader, optimizer))
