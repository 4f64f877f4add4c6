"""Batch norms under a checkpoint, frozen batch norms, DataParallel, and float16 without a scale."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, 4)

    def train(self, mode=True):
        super().train(mode)
        self.stem[1].eval()  # its statistics are those of another data set
        return self

    def forward(self, x):
        x = checkpoint(self.block, self.stem(x), use_reentrant=False)
        return self.head(x.mean((2, 3)))


def main():
    model = nn.DataParallel(Net().train())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 3, 10, 10)).float().square().mean()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
