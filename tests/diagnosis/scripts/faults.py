"""A small network with many faults; `healthy.py` is the same without them."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)  # a file is read
        return torch.randn(3, 16, 16), index % 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.SiLU(inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


def evaluate(model, loader):
    model.eval()
    right = 0
    for x, y in loader:
        right += (model(x).argmax(1) == y).sum().item()
    model.train()
    return right


def main():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    loader = DataLoader(Slow(), batch_size=8)
    total = 0
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss
        print(step, loss.item())
        if step == 4:
            evaluate(model, [(x, y)])


if __name__ == "__main__":
    main()
