"""The training of `scaled.py` as it should be, and a part of it without a scale."""

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import fusedtrain

torch.set_num_threads(1)


def main():
    model, other, critic = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    first = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    second = fusedtrain.optim.SGD(other.parameters(), lr=1e-3)
    third = torch.optim.SGD(critic.parameters(), lr=1e-3, fused=True)
    scaler = fusedtrain.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(8):
        for optimizer in (first, second, third):
            optimizer.zero_grad()
        loss = other(model(torch.randn(4, 8))).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(first)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.unscale_(second)
        clip_grad_value_(other.parameters(), 0.5)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        critic(torch.randn(4, 8)).square().mean().backward()
        clip_grad_norm_(critic.parameters(), 1.0)
        third.step()


if __name__ == "__main__":
    main()
