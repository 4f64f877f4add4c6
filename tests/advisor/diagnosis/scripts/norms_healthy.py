"""The network of `norms.py` with fused norms, which a checkpoint does not move twice."""

import torch
from norms import Net
from torch import nn

import fusedtrain

torch.set_num_threads(1)


def main():
    model = Net()
    model.train()
    fusedtrain.fold_frozen_norms(model)
    fusedtrain.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = fusedtrain.amp.GradScaler("cpu", init_scale=8.0)
    teacher = nn.Linear(4, 4).eval()  # in eval mode, and gradients go through
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = teacher(model(torch.randn(4, 3, 10, 10))).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main()
