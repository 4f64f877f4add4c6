"""Large tensors, each in fresh memory: pages are faulted in at every step."""

import torch
from torch import nn

torch.set_num_threads(1)


def main():
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Tanh(), nn.Tanh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(1 << 23, 1)  # 33.6 MB: above glibc's largest threshold for its heap
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
