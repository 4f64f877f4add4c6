"""Large tensors, each in fresh memory: pages are faulted in at every step."""

import torch
from torch import nn

torch.set_num_threads(1)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.weight * 2


def main():
    model = Scale()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.ones(1 << 23)  # 33.6 MB: above glibc's largest threshold for its heap
    for _ in range(5):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
