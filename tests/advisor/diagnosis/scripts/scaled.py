"""Gradients that are clipped while they are scaled, and steps beside the scaler's."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import fusedtrain

torch.set_num_threads(1)


def main():
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    first = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    second = fusedtrain.optim.SGD(other.parameters(), lr=1e-3)
    scaler = fusedtrain.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(8):
        first.zero_grad()
        second.zero_grad()
        loss = other(model(torch.randn(4, 8))).square().mean()
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        clip_grad_value_(other.parameters(), 0.5)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        second.step()


if __name__ == "__main__":
    main()
