"""The network of `depthwise.py`, converted, beside a tiny layer of torch that matters little."""

import torch
from torch import nn

import fusedtrain

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
    fusedtrain.convert(model)
    model.body.append(nn.Conv2d(16, 16, 3, stride=14, groups=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    x = torch.ones(2, 16, 28, 28)
    for _ in range(8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
