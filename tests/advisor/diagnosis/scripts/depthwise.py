"""Depthwise convolutions of 5 x 5 and 7 x 7, in torch's kernels."""

import torch
from torch import nn

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 5, padding=2, groups=16), nn.Conv2d(16, 16, 7, padding=3, groups=16)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    x = torch.ones(2, 16, 28, 28)
    for _ in range(8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
