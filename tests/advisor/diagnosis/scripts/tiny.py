"""Many small layers: the calls take the time. A loss scale with bfloat16, and layers that stay
channels_first."""

import torch
from torch import nn

torch.set_num_threads(1)


def main():
    layers = [layer for _ in range(40) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), *layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, 3, 3, 3)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)


if __name__ == "__main__":
    main()
